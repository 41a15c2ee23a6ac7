# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
from mla_kernels.pipeline import plan_cycle, simulate, timeline_png, timeline_text
from mla_kernels.pipeline.cli import main

AMLA = [10, 8, 6]


def test_text_shows_each_stage_where_it_runs():
    text = timeline_text(simulate(plan_cycle([4, 4]), 3), width=32)
    assert text.splitlines() == [
        "cube   |C1.0===|C1.1===|C1.2===........|",
        "vector ........|V1.0===|V1.1===|V1.2===|",
        "       ^preload^steady         ^drain",
    ]


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
        (["1", "2", "--blocks", "0"], "blocks must be at least 1"),
        (["1", "2", "--width", "5"], "width must be at least 20"),
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
