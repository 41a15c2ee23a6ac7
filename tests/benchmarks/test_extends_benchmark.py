# SPDX-License-Identifier: Apache-2.0
"""benchmarks/extends.py: engines that answer otherwise get no time."""

import json
import math
import os
from unittest.mock import MagicMock

import pytest
import torch


def apart(one, other):
    """What is said of two engines with these first tokens."""
    from extends import disagreements

    return disagreements({"a": {"logprobs": one}, "b": {"logprobs": other}})


def test_engines_are_held_to_the_best_tokens_of_either():
    one = [{"5": -0.1, "6": -2.6}, {"7": -1.0, "8": -1.1}]
    assert apart(one, one) == []
    # A near-tie may fall either way; its logprobs are what counts.
    assert apart(one, [{"5": -0.1}, {"8": -1.05, "7": -1.08}]) == []
    inf = ["b differs from a by inf nats"]
    assert apart(one, [{"5": -0.1}, {"9": -0.2, "7": -1.0}]) == inf
    assert apart(one, [{"6": -0.1}, {"7": -1.0}]) == inf
    assert apart(one, [{"5": -0.4, "6": -2.0}, one[1]]) == ["b differs from a by 0.3 nats"]


@pytest.mark.parametrize("sound", [True, False])
def test_what_is_no_number_agrees_with_nothing(sound):
    """Not even with another engine of which the same is no number."""
    nan = [{"5": math.nan, "6": math.nan}]
    said = apart([{"5": -0.1, "6": -2.6}] if sound else nan, nan)
    assert said == ["b differs from a by inf nats"]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"ms": {"absorbed": 1.0}}, 0),
        ({"not_run": "no time was left"}, 0),
        ({"not_run": "expanded differs from absorbed by 0.3 nats"}, 1),
        ({"not_run": "expanded: out of memory"}, 1),
    ],
)
def test_a_case_that_failed_is_told_by_the_exit_code(row, code, tmp_path, monkeypatch):
    import extends

    monkeypatch.setattr(extends, "measure", lambda *_: [row])
    monkeypatch.setattr(extends, "markdown", lambda result: "")
    monkeypatch.setattr(extends, "exit_on_signals", lambda: None)
    assert extends.main(["--heads", "16", "--results", str(tmp_path)]) == code


def test_a_run_that_is_cut_off_leaves_its_rows_and_says_so(tmp_path, monkeypatch):
    import extends

    def measured(args, heads, deadline):
        yield {"heads": heads, "context": 512, "new": 4, "ms": {"absorbed": 1.0, "expanded": 2.0}}
        if heads == 8:
            raise SystemExit(143)

    monkeypatch.setattr(extends, "measure", measured)
    monkeypatch.setattr(extends, "nvidia_smi", lambda *_: [])
    monkeypatch.setattr(extends, "exit_on_signals", lambda: None)
    said = "Not whole: the run was cut off."
    for heads, rows in (("16 8", 2), ("16", 1)):
        words = ["--heads", *heads.split(), "--results", str(tmp_path)]
        if rows == 2:
            with pytest.raises(SystemExit):
                extends.main(words)
        else:
            assert extends.main(words) == 0
        names = [f"extends{'_partial' * (rows == 2)}{ending}" for ending in (".json", ".md")]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert len(json.loads((tmp_path / names[0]).read_text())["rows"]) == rows
        for name in names:
            assert (said in (tmp_path / name).read_text()) == (rows == 2)


@pytest.mark.parametrize("words", ["--contexts 512", "--new 4 16", "--heads 8", "--sparse --new 9"])
def test_some_cases_do_not_replace_the_results_of_all(words, tmp_path, monkeypatch):
    import extends

    row = {"heads": 16, "context": 512, "new": 4, "not_run": "no time was left"}
    monkeypatch.setattr(extends, "measure", lambda *_: [row | {"not_run": "not asked"}])
    monkeypatch.setattr(extends, "nvidia_smi", lambda *_: [])
    monkeypatch.setattr(extends, "exit_on_signals", lambda: None)
    assert extends.main([*words.split(), "--results", str(tmp_path)]) == 1
    name = "sparse_extends" if "--sparse" in words else "extends"
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [f"{name}_partial.json", f"{name}_partial.md"]
    assert "Not whole" not in (tmp_path / found[1]).read_text()
    whole = ["--contexts", "4096", "2048", "512", "--repeats", "1"]  # all, in any order
    late, row = row | {"new": 16}, row | {"ms": {"absorbed": 1.0, "expanded": 2.0}}
    del row["not_run"]
    monkeypatch.setattr(extends, "measure", lambda *_: [row, late])
    assert extends.main([*whole, "--results", str(tmp_path / "late")]) == 0
    page = (tmp_path / "late" / "extends_partial.md").read_text()
    assert "Not whole: no time was left for 1 rows." in page
    monkeypatch.setattr(extends, "measure", lambda *_: [row])
    assert extends.main([*whole, "--results", str(tmp_path / "all")]) == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [
        "extends.json",
        "extends.md",
    ]


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


def test_a_page_has_the_lowest_turns_and_the_best_peer(monkeypatch):
    import extends

    ms = {"absorbed": [4.0, 2.0, 3.0], "expanded": [5.0, 8.0], "FLASHMLA": [9.0, 6.0], "FA": [7.0]}
    found = {name: {"ms": turns, "logprobs": [{"1": -0.1}]} for name, turns in ms.items()}
    monkeypatch.setattr(extends, "Engine", MagicMock())
    monkeypatch.setattr(extends, "all_ask", lambda engines, do: [{}] * len(engines))
    monkeypatch.setattr(extends, "in_turns", lambda engines, ask: found)
    args = extends.parse_arguments(["--contexts", "512", "--new", "4"])
    args.engines = {name: ("", {}) for name in ms}
    (row,) = extends.measure(args, 16, math.inf)
    assert row["ms"] == {"absorbed": 2.0, "expanded": 5.0, "FLASHMLA": 6.0, "FA": 7.0}
    about = {"machine": {}, "command": "x", "layers": 2, "engines": list(ms)}
    page = extends.markdown({**about, "rows": [row]})
    assert "| 16 | 512 | 4 | 2.00 | 5.00 | 6.00 | 7.00 | 2.50 | 3.00 |" in page


def engines_that_start(monkeypatch, *names):
    """Stand-ins: engines of other names do not start."""
    import extends

    def build(engines, do):
        assert do == "build"
        broken = "CUDA error\nCUDA kernel errors might be reported later"
        return [{} if engine.name in names else {"error": broken} for engine in engines]

    def engine(backend, options, log, *_):
        log.write_text("")
        made = MagicMock(log=log)
        made.name = log.stem
        return made

    monkeypatch.setattr(extends, "Engine", engine)
    monkeypatch.setattr(extends, "all_ask", build)
    said = {"ms": [2.0], "logprobs": [{"1": -0.1}]}
    monkeypatch.setattr(extends, "in_turns", lambda engines, ask: dict.fromkeys(engines, said))
    args = extends.parse_arguments(["--contexts", "512", "--new", "4"])
    args.engines = extends.ENGINES
    return args


@pytest.mark.parametrize("dead", ["FLASHMLA", "expanded", "absorbed"])
def test_an_engine_that_does_not_start_is_listed_and_the_others_timed(dead, monkeypatch):
    import extends
    from ending import exit_code

    args = engines_that_start(monkeypatch, *(extends.ENGINES.keys() - {dead}))
    failed, row = rows = list(extends.measure(args, 16, math.inf))
    assert (failed["heads"], failed["backend"], exit_code(rows)) == (16, dead, 1)
    assert row["ms"].keys() == extends.ENGINES.keys() - {dead}
    about = {"machine": {}, "command": "x", "layers": 2, "engines": list(extends.ENGINES)}
    page = extends.markdown({**about, "rows": rows})
    assert page.endswith(f"\nNot measured:\n\n* heads 16 backend {dead}: CUDA error\n")
    cells = ["" if name == dead else "2.00" for name in extends.ENGINES]
    cells.append("1.00" * (dead == "FLASHMLA"))
    cells.append("1.00" * (dead != "absorbed"))
    assert f"| 16 | 512 | 4 | {' | '.join(cells)} |\n" in page


@pytest.mark.parametrize("left", [["absorbed"], ["absorbed", "expanded"], ["FLASHMLA"]])
def test_engines_that_nobody_vouches_for_are_not_timed(left, monkeypatch):
    """Both of ours may have one fault."""
    import extends

    args = engines_that_start(monkeypatch, *left)
    rows = list(extends.measure(args, 16, math.inf))
    gone = [name for name in extends.ENGINES if name not in left]
    assert [row.get("backend") for row in rows] == [*gone, None]
    assert rows[-1]["not_run"] == "too few engines are left to compare their answers"


def test_an_engine_that_dies_is_listed_and_the_others_timed(monkeypatch):
    import extends

    args, asked = engines_that_start(monkeypatch, *extends.ENGINES), []
    args.new = [4, 8]
    said = {"ms": [2.0], "logprobs": [{"1": -0.1}]}

    def in_turns(engines, ask):
        asked.append(list(engines))
        found = dict.fromkeys(engines, said)
        return found | {"expanded": {"error": "CUDA error"}} if "expanded" in found else found

    monkeypatch.setattr(extends, "in_turns", in_turns)
    failed, *timed = extends.measure(args, 16, math.inf)
    assert failed == {"heads": 16, "backend": "expanded", "error": "CUDA error"}
    assert [row["new"] for row in timed] == [4, 8]
    assert all(row["ms"].keys() == extends.ENGINES.keys() - {"expanded"} for row in timed)
    assert asked == [
        list(extends.ENGINES),
        [name for name in extends.ENGINES if name != "expanded"],
    ]


def test_results_without_an_engine_do_not_replace_those_of_all(tmp_path, monkeypatch):
    import extends

    (tmp_path / "extends.json").write_text("earlier")
    key = {"heads": 16, "context": 512, "new": 4}
    rows = [{"heads": 16, "backend": "expanded", "error": "no memory"}, {**key, "not_run": "none"}]
    monkeypatch.setattr(extends, "measure", lambda *_: rows)
    monkeypatch.setattr(extends, "nvidia_smi", lambda *_: [])
    monkeypatch.setattr(extends, "exit_on_signals", lambda: None)
    assert extends.main(["--results", str(tmp_path)]) == 1
    assert (tmp_path / "extends.json").read_text() == "earlier"
    assert "Not whole: an engine failed." in (tmp_path / "extends_partial.md").read_text()


def test_engines_without_time_are_not_built(monkeypatch):
    import extends

    monkeypatch.setattr(extends, "Engine", MagicMock(side_effect=AssertionError("started")))
    args = extends.parse_arguments(["--contexts", "512", "64", "--new", "4"])
    key = {"heads": 16, "new": 4, "not_run": "no time was left"}
    rows = [{**key, "context": context} for context in (512, 64)]
    assert list(extends.measure(args, 16, -math.inf)) == rows


def test_an_error_of_several_lines_is_one_row_of_the_page():
    import extends

    about = {"machine": {}, "command": "x", "layers": 2, "engines": ["absorbed", "expanded"]}
    row = {"heads": 16, "context": 512, "new": 4, "not_run": "absorbed: CUDA error\nFor debugging"}
    page = extends.markdown({**about, "rows": [row]})
    assert page.endswith("| 16 | 512 | 4 | absorbed: CUDA error |\n")


@pytest.mark.parametrize("sparse", [False, True])
def test_engines_on_a_cpu_have_the_heads_that_rows_name(sparse, monkeypatch):
    import extends

    monkeypatch.setattr(extends, "nvidia_smi", lambda *_: [])
    args = extends.parse_arguments(["--heads", "16", "128", *["--sparse"] * sparse])
    for heads in args.heads:
        model = extends.engine_options(args, heads)["hf_overrides"]
        assert (model["num_attention_heads"], model["num_key_value_heads"]) == (heads, heads)
        assert (model["num_hidden_layers"], model["first_k_dense_replace"]) == (2, 2)
        assert ("intermediate_size" in model) == sparse  # V2-Lite's own MLP stays


def test_the_first_tokens_that_warm_up_are_not_timed():
    """But compared: they are answers like the others."""
    from extend_worker import Worker

    worker, asked = Worker({}), []

    def first_token(name, prompt):
        asked.append(prompt)
        return float(len(asked)), {len(asked): -0.1}, 64

    worker.first_token = first_token
    said = worker.time(turn=0, context=64, new=4, repeats=2)
    assert said["ms"] == [3.0, 4.0]
    assert [list(one) for one in said["logprobs"]] == [[2], [3], [4]]
    assert [len(prompt) for prompt in asked] == [65, 68, 68, 68]
    assert all(prompt[:64] == asked[0][:64] for prompt in asked)
    assert len({tuple(prompt[64:]) for prompt in asked}) == 4


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
    words = ["--contexts", "512", "--new", "8", "--repeats", "3", "--results", str(tmp_path)]
    assert extends.main(words) == (1 if broken else 0)
    (row,) = json.loads((tmp_path / "extends_partial.json").read_text())["rows"]
    assert ("ms" in row) == (broken is None)
    if broken:
        assert row["not_run"].startswith("expanded differs from absorbed by")
