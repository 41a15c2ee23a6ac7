# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mla_kernels.pipeline import (
    Chain,
    Cycle,
    plan_cycle,
    simulate,
    timeline_png,
    timeline_text,
)
from mla_kernels.pipeline.cli import main

ROOT = Path(__file__).parents[2]
AMLA = [10, 8, 6]


def test_text_shows_each_stage_where_it_runs():
    text = timeline_text(simulate(plan_cycle([4, 4]), 3), width=32)
    assert text.splitlines() == [
        "cube   |C1.0===|C1.1===|C1.2===........|",
        "vector ........|V1.0===|V1.1===|V1.2===|",
        "       ^preload^steady         ^drain",
    ]
    # A stage of no length: the steady phase begins where preloading does.
    marks = timeline_text(simulate(plan_cycle([0, 5]), 3), width=32).splitlines()[-1]
    assert marks.split() == ["^steady", "^drain"]


def test_main_prints_cycle_and_timeline(capsys):
    assert main([*map(str, AMLA), "--blocks", "4"]) == 0
    out = capsys.readouterr().out
    assert "preload count  2 (n = 2)" in out
    assert "cycle length   16 (busier unit 16)" in out
    assert "|C1.3" in out and "^steady" in out


def test_fewest(capsys):
    main(["10", "3", "6", "--fewest"])
    assert "preload count  1 (n = 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["1", "-2"], "finite numbers"),
        (["1", "2", "--blocks", "0"], "blocks in 1..2147483647, got 0"),
        (["1", "2", "--width", "5"], "width in 20..10000, got 5"),
        (["1e308"] * 4, "too large"),
        (["1", "2", "--png", "/nowhere/x.png"], "No such file"),
        (["1"] * 10 + ["--fewest"], "at most 4 pairs"),
    ],
)
def test_refusals(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    timeline_png(simulate(plan_cycle(AMLA), 5), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_module_runs_without_matplotlib():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from mla_kernels.pipeline.cli import main\n"
        "main(['10', '8', '6'])\n"
        "main(['10', '8', '6', '--png', 'x.png'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "preload count" in done.stdout
    assert "matplotlib" in done.stderr


def test_the_timeline_in_the_documentation(capsys):
    """docs/pipeline.md shows the plan of the stage times in benchmarks/results."""
    stages = json.loads((ROOT / "benchmarks/results/h200/hopper_stages.json").read_text())["clocks"]
    durations = [str(stages[name]) for name in ("C1", "V1", "C2")]
    main([*durations, "--blocks", "5", "--width", "84"])
    shown = (ROOT / "docs/pipeline.md").read_text().replace("\n    ", "\n")
    assert f"pipeline {' '.join(durations)} --blocks 5 --width 84`" in shown
    assert capsys.readouterr().out in shown
    c1, v1, c2 = stages.values()
    kernel = Cycle(
        Chain.of([c1, v1, c2 / 2, 0, c2 / 2]), (2, 1, 3), (2, 1, 3), frozenset({0, 2, 3, 4})
    )
    assert f"# {kernel.preload_count}, {float(kernel.length)}:" in shown
