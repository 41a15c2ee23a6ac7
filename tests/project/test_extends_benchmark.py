# SPDX-License-Identifier: Apache-2.0
"""benchmarks/extends.py: engines that answer otherwise get no time."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_engines_are_held_to_the_best_tokens_of_either():
    from extends import disagreements, drift

    def said(*requests):
        return {"logprobs": list(requests)}

    one = said({"5": -0.1, "6": -2.6}, {"7": -1.0, "8": -1.1})
    assert drift(one, one) == 0
    # A near-tie may fall either way; its logprobs are what counts.
    assert drift(one, said({"5": -0.1}, {"8": -1.05, "7": -1.08})) == pytest.approx(0.08)
    assert drift(one, said({"5": -0.1}, {"9": -0.2, "7": -1.0})) == math.inf
    assert drift(one, said({"5": -0.4, "6": -2.0}, one["logprobs"][1])) == pytest.approx(0.3)
    found = {"absorbed": one, "expanded": one, "FLASHMLA": said({"6": -0.1}, {"7": -1.0})}
    assert disagreements(found) == ["FLASHMLA differs from absorbed by inf nats"]


def test_engines_take_turns_and_the_lowest_turn_counts():
    """A slow spell of the host is not an engine's; one that fails is asked no more."""
    from extends import in_turns
    from step_driver import ROUNDS

    asked = []

    class Engine:
        def __init__(self, name):
            self.name = name

        def ask(self, do, *, turn, context):
            asked.append((self.name, turn))
            if self.name == "broken":
                return {"error": "out of memory"}
            return {"ms": [9, 5 + turn, 1], "logprobs": [{str(turn): -0.1}]}

    found = in_turns({name: Engine(name) for name in ("sound", "broken", "other")}, {"context": 8})
    assert found["broken"] == {"error": "out of memory"}
    assert found["sound"]["ms"] == [min(5 + turn, 9) for turn in range(ROUNDS)]
    assert len(found["sound"]["logprobs"]) == ROUNDS
    assert asked[:5] == [("sound", 0), ("broken", 0), ("other", 0), ("other", 1), ("sound", 1)]
    assert len(asked) == 2 * ROUNDS + 1


# In one engine alone the oldest block of the cache is read twice, and the newest not at all.
TWICE = "attend = lambda f, q, keys, *r: f(q, torch.cat([keys[:, :64], keys[:, :-64]], 1), *r)"


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="it breaks the attention of a CPU")
@pytest.mark.parametrize("broken", [None, TWICE])
def test_engines_on_a_cpu(demo_checkpoint, tmp_path, monkeypatch, broken):
    """Sound ones agree; with attention broken in one of them there is no time."""
    import extends

    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    if broken:
        (tmp_path / "sitecustomize.py").write_text(
            "import functools, torch\n"
            "from mla_kernels.decode import torch_sdpa as module\n"
            f"{broken}\n"
            "module.attend_in_call = functools.partial(attend, module.attend_in_call)\n"
        )
    monkeypatch.setitem(extends.ENGINES, "absorbed", ("CUSTOM", env))
    monkeypatch.setattr(extends, "CPU_MODEL", demo_checkpoint("v2-lite"))
    monkeypatch.setattr(extends, "nvidia_smi", lambda *_: [])
    monkeypatch.setattr(extends, "exit_on_signals", lambda: None)
    extends.main(["--contexts", "512", "--new", "8", "--repeats", "3", "--results", str(tmp_path)])
    (row,) = json.loads((tmp_path / "extends.json").read_text())["rows"]
    assert ("ms" in row) == (broken is None)
    if broken:
        assert row["not_run"].startswith("expanded differs from absorbed by")
