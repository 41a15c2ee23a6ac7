# SPDX-License-Identifier: Apache-2.0
"""Results of a whole run stay until a whole run replaces them."""

import importlib
import json
import sys
from argparse import Namespace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

GPU = {"gpu": "G", "read_gbps": 1.0, "bf16_gemm_tflops": 1.0}


@pytest.fixture
def no_gpu_needed(monkeypatch):
    for name in ("dense_decode", "sparse", "sparse_indexer"):
        module = importlib.import_module(name)
        for part in ("need_gpu", "Timer"):
            monkeypatch.setattr(module, part, MagicMock())
        monkeypatch.setattr(module, "describe_gpu", lambda: dict(GPU))


@pytest.mark.parametrize("name", ["dense_decode", "sparse", "sparse_indexer"])
def test_results_stay_where_no_case_matches(name, no_gpu_needed, tmp_path):
    (tmp_path / f"{name}.json").write_text("old")
    with pytest.raises(SystemExit, match="nothing matches --cases b9999; expected"):
        importlib.import_module(name).main(["--cases", "b9999", "--results", str(tmp_path)])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_results_stay_where_nothing_that_was_chosen_runs(tmp_path):
    """As of a kernel that this GPU lacks."""
    import re

    from partial import gather

    args = Namespace(results=tmp_path, cases=re.compile("b1"), impls=re.compile("hopper"))
    written = []
    with pytest.raises(SystemExit, match="nothing matches --cases b1 and --impls hopper"):
        gather("x", {}, ["b1"], lambda _: [], lambda *_: written.append(1), args, some=True)
    assert not written


@pytest.mark.parametrize(
    ("name", "words", "nearest"),
    [
        ("dense_decode", "--cases b1_h16_q1_k4096$", "b1_h128_q1_k4096"),
        ("dense_decode", "--impls hopper/pow3", "mla_kernels/hopper/pow2"),
        ("sparse", "--cases ^b1_h16_q1_8k_fp8_ds_mla", "b1_h16_q1_32k_fp8_ds_mla"),
        ("sparse", "--impls flashmla_decode", "peer/flashmla"),
        ("sparse_indexer", "--cases b64x32768_q8", "b64x32768_q4"),
    ],
)
def test_a_pattern_that_is_in_no_name_is_told_the_nearest(name, words, nearest, tmp_path):
    """At once, also where there is no GPU: before anything is measured."""
    with pytest.raises(SystemExit) as left:
        importlib.import_module(name).main([*words.split(), "--results", str(tmp_path)])
    assert str(left.value).startswith(f"nothing matches {words}; expected a regular expression")
    assert nearest in str(left.value).partition("the nearest: ")[2].split(", ")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def three_cases(no_gpu_needed, monkeypatch):
    """`three_cases(name)`: the benchmark with cases a1, a2 and b, and a stand-in for measuring one,
    whose side effect a test may set."""

    def prepare(name):
        module = importlib.import_module(name)
        shapes = [SimpleNamespace(name=case, floor_us=lambda roofs: 1.0) for case in CASES]
        row = {"op": "decode", "impl": "i", "us": 1.0, "floor_us": 1.0}
        measure = MagicMock(
            side_effect=lambda *args: [
                {**row, "case": next(a.name for a in args if isinstance(a, SimpleNamespace))}
            ]
        )
        monkeypatch.setattr(module, "SHAPES", shapes)
        monkeypatch.setattr(module, "bench", measure)
        return module, measure

    monkeypatch.setattr(importlib.import_module("dense_report"), "plot", lambda *_: None)
    monkeypatch.setattr(importlib.import_module("sparse_report"), "taken", lambda case: "")
    return prepare


CASES = ("a1", "a2", "b")


def files_of(name, ending=""):
    """Of a run in an empty folder: the page of the indexer is that of sparse.py, unless partial."""
    page = "sparse" if (name, ending) == ("sparse_indexer", "") else name
    return sorted([f"{name}{ending}.json", f"{page}{ending}.md"])


BENCHES = ["dense_decode", "sparse", "sparse_indexer"]


def cases_in(path):
    return [row["case"] for row in json.loads(path.read_text())["rows"]]


@pytest.mark.parametrize("name", BENCHES)
def test_some_cases_do_not_replace_the_results_of_all(name, three_cases, tmp_path):
    module, _ = three_cases(name)
    assert module.main(["--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == files_of(name)
    assert cases_in(tmp_path / f"{name}.json") == list(CASES)
    assert module.main(["--cases", "^a", "--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == sorted(files_of(name) + files_of(name, "_partial"))
    assert cases_in(tmp_path / f"{name}.json") == list(CASES)
    assert cases_in(tmp_path / f"{name}_partial.json") == ["a1", "a2"]
    assert "Not whole" not in (tmp_path / f"{name}_partial.json").read_text()
    assert module.main(["--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == files_of(name)


@pytest.mark.parametrize("name", ["dense_decode", "sparse"])
def test_some_implementations_do_not_replace_the_results_of_all(name, three_cases, tmp_path):
    module, _ = three_cases(name)
    assert module.main(["--impls", "hopper", "--results", str(tmp_path)]) == 0
    assert names_in(tmp_path) == files_of(name, "_partial")


@pytest.mark.parametrize("name", BENCHES)
def test_a_run_that_is_cut_off_leaves_its_rows_and_says_so(name, three_cases, tmp_path):
    module, measure = three_cases(name)
    assert module.main(["--results", str(tmp_path)]) == 0
    whole, rows = [path.read_bytes() for path in sorted(tmp_path.iterdir())], measure.side_effect

    def cut(*args):
        if measure.call_count == len(CASES) + 3:
            raise KeyboardInterrupt
        return rows(*args)

    measure.side_effect = cut
    with pytest.raises(KeyboardInterrupt):
        module.main(["--results", str(tmp_path)])
    assert cases_in(tmp_path / f"{name}_partial.json") == ["a1", "a2"]
    for file in files_of(name, "_partial"):
        text = (tmp_path / file).read_text()
        assert "Not whole: 2 of 3 cases, then the run was cut off." in text
    assert [(tmp_path / file).read_bytes() for file in files_of(name)] == whole


def test_a_layer_of_other_lengths_does_not_replace_all(no_gpu_needed, monkeypatch, tmp_path):
    import mla_layer

    for part in ("need_gpu", "make_naive", "make_case"):
        monkeypatch.setattr(mla_layer, part, MagicMock())
    monkeypatch.setattr(mla_layer, "describe_gpu", lambda: {"gpu": "G", "commit": "c"})
    row = {"case": "c", "impl": "i", "floor_us": 1.0, "roof": "memory", "us": 2.0, "note": ""}
    monkeypatch.setattr(mla_layer, "run_case", lambda *_: [dict(row)])
    files = ["mla_layer.json", "mla_layer.md"]
    for words in ("--prefill 512", "--batch 8", "--impl triton"):
        folder = tmp_path / words
        argv = ["mla_layer.py", *words.split(), "--results", str(folder)]
        monkeypatch.setattr(sys, "argv", argv)
        assert mla_layer.main() == 0
        assert names_in(folder) == ["mla_layer_partial.json", "mla_layer_partial.md"]
    monkeypatch.setattr(sys, "argv", ["mla_layer.py", "--results", str(folder)])
    assert mla_layer.main() == 0
    assert names_in(folder) == files
    calls = iter([[dict(row)], [dict(row)]])
    monkeypatch.setattr(mla_layer, "run_case", lambda *_: next(calls))
    with pytest.raises(StopIteration):
        mla_layer.main()
    said = "Not whole: 2 of 4 cases, then the run was cut off."
    assert said in (folder / "mla_layer_partial.md").read_text()
    assert len(json.loads((folder / "mla_layer.json").read_text())["rows"]) == 4


def test_a_dense_result_names_all_of_its_command(no_gpu_needed, monkeypatch, tmp_path):
    import dense_decode

    written = []
    monkeypatch.setattr(dense_decode, "bench", lambda *_: [{"case": "c", "impl": "i", "us": 1.0}])
    monkeypatch.setattr(dense_decode, "sustained_roofs", lambda seconds: {})
    monkeypatch.setattr(dense_decode, "write_report", lambda report, *_: written.append(report))
    words = ["--sustained", "--seconds", "9", "--cases", "^b1_"]
    assert dense_decode.main([*words, "--results", str(tmp_path)]) == 0
    said = "python benchmarks/dense_decode.py --sustained --seconds 9 --cases '^b1_'"
    assert {report["command"] for report in written} == {said}
