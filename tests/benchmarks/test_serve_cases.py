# SPDX-License-Identifier: Apache-2.0
"""benchmarks/serve.py: its cases, models, depths and options."""

import importlib
import json
from argparse import ArgumentTypeError
from unittest.mock import MagicMock

import pytest


def test_cases_come_in_the_order_of_the_list():
    from serve_cases import STEPS, step_cases

    assert step_cases(None, None) == list(STEPS)
    assert len(set(STEPS)) == 20
    asked = step_cases([1, 96, 7], [16384])
    assert asked == [(96, 16384), (1, 16384), (7, 16384)]
    assert len(step_cases(None, [1024, 4096])) == 10


def test_loads_come_in_the_order_of_what_they_take():
    from serve_cases import REDUCED, SHARES, Load, Shape, loads

    a, b = Shape(8, 8), Shape(90, 1)
    assert loads([a, b], [96, 4], [0.5], reduced=False) == [
        Load(a, 4), Load(b, 4), Load(a, rate=0.5), Load(a, 96), Load(b, rate=0.5), Load(b, 96),
    ]  # fmt: skip
    assert [load.share for load in loads([a], [4, 1], None, reduced=False)[2:]] == list(SHARES)
    assert loads([a], [4], None, reduced=True) == list(REDUCED)
    closed = [load.shape for load in REDUCED if load.concurrency]
    assert all(load.shape in closed for load in REDUCED if load.share)


@pytest.mark.parametrize("clients", [[1, 8, 32, 96, 128], [128], [4, 200, 1], [1]])
def test_shares_are_behind_all_closed_loops_of_their_shape(clients):
    """So that any of these may be the fullest."""
    from serve_cases import REDUCED, SHAPES, loads

    asked = loads([*SHAPES, SHAPES[0]], clients, None, reduced=False)
    assert len(asked) == 4 * (len(clients) + 2)
    for order in (asked, REDUCED):
        for at, load in enumerate(order):
            if load.share:
                assert not [one for one in order[at:] if one.shape == load.shape and not one.share]


@pytest.mark.parametrize("text", ["1024", "1024/", "a/b", "0/5", "1/2/3", "-1/4"])
def test_bad_shapes_are_refused(text):
    from serve_cases import Shape

    with pytest.raises(ArgumentTypeError, match="expected PROMPT/ANSWER"):
        Shape.parse(text)


def test_overrides_are_a_rank_of_v3():
    from serve_cases import dense_overrides

    assert dense_overrides(6, 16) == {
        "num_hidden_layers": 6,
        "first_k_dense_replace": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2304,
    }
    assert dense_overrides(6, 128)["intermediate_size"] == 18432


def test_large_caches_go_to_shallow_engines():
    from serve import parse_arguments
    from serve_steps import depths, engine_options, run

    words = "--mode steps --batches 8 128 --contexts 1024 65536 --steps 60 --cache-gib 19"
    args = parse_arguments(words.split())
    cases = [(8, 1024), (128, 1024), (8, 65536), (128, 16384), (128, 65536)]
    assert depths(args, 128, cases) == {12: cases[:3], 6: cases[3:4], 1: cases[4:]}
    assert depths(args, 16, cases) == {30: cases[:3], 8: cases[3:4], 2: cases[4:]}
    options = engine_options(args, 16, 1, cases[4:])
    assert options["hf_overrides"]["num_hidden_layers"] == 1
    few = engine_options(args, 16, 1, [(1, 64)])  # the gate's prompts find room
    assert few["max_model_len"] > 716 and few["kv_cache_memory_bytes"] > 1293 * 576 * 2
    assert 9 * 2**30 < options["kv_cache_memory_bytes"] < 10 * 2**30
    args.layers = [2, 12]
    assert depths(args, 16, cases) == {12: cases[:3], 2: cases[3:]}
    args.cache_gib = 1
    with pytest.raises(
        ValueError,
        match=r"\(128, 65536\) does not fit a cache of 1 GiB with 2 layers\. Mend: fewer --lay",
    ):
        depths(args, 16, cases[4:])
    with pytest.raises(SystemExit, match="does not fit a cache of 1 GiB with 2 layers"):
        run(args, None)


def test_a_server_has_the_layers_of_its_heads():
    from serve import parse_arguments

    assert parse_arguments([]).layers == [12]
    assert parse_arguments(["--heads", "16"]).layers == [30]
    assert parse_arguments(["--heads", "16", "--layers", "4"]).layers == [4]


def test_family_names_model_backends_and_results():
    from serve import parse_arguments
    from serve_report import Report
    from serve_results import markdown

    sparse, dense = (parse_arguments(["--family", name]) for name in ("v3.2", "v3"))
    assert "index_topk" in json.loads((sparse.model / "config.json").read_text())
    stock = ["FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"]
    assert sparse.backends == ["CUSTOM", *stock] and sparse.heads == [128, 16]
    assert len(dense.backends) == 4 and dense.heads == [128, 16] and dense.batches is None
    report = Report("steps", "", {}, vars(sparse) | {"model": "m"})
    assert report.stem == "sparse_steps" and "and the indexer" in markdown(report)
    assert "their share of the MLP" in markdown(report)
    whole = Report("steps", "", {}, vars(sparse) | {"model": "m", "heads": [128]})
    assert "their share of the MLP" not in markdown(whole)
    few = parse_arguments(["--family", "v3.2", "--heads", "16", "--kv-cache-dtype", "fp8_ds_mla"])
    report = Report("steps", "", {}, vars(few) | {"model": "m"})
    assert report.stem == "sparse_steps_fp8_ds_mla"
    assert "KV cache dtype fp8_ds_mla; fewer than 128 heads with their share" in markdown(report)


@pytest.mark.parametrize("heads", ["256", "48", "100", "0"])
@pytest.mark.parametrize("name", ["serve", "extends"])
def test_heads_that_no_rank_has_are_refused(name, heads, capsys):
    """With what is allowed: of 48 the MLP's share would be that of 64."""
    with pytest.raises(SystemExit):
        importlib.import_module(name).parse_arguments(["--heads", "16", heads])
    said = capsys.readouterr().err
    allowed = "expected one of 1, 2, 4, 8, 16, 32, 64, 128"
    assert f"{'expected 1 or more' if heads == '0' else allowed}, got {heads}" in said


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("mode", ["steps", "serve"])
def test_a_sparse_cache_of_two_layouts_is_refused(mode, dtype, capsys):
    """vLLM makes fp8_ds_mla of it for FLASHMLA_SPARSE alone."""
    from serve import parse_arguments

    words = ["--mode", mode, "--kv-cache-dtype"]
    with pytest.raises(SystemExit):
        parse_arguments([*words, dtype, "--family", "v3.2"])
    said = capsys.readouterr().err
    assert f"--kv-cache-dtype {dtype} of --family v3.2" in said and "say fp8_ds_mla" in said
    assert parse_arguments([*words, dtype]).kv_cache_dtype == dtype
    sparse = parse_arguments([*words, "fp8_ds_mla", "--family", "v3.2"])
    assert sparse.backends == ["CUSTOM", "FLASHMLA_SPARSE"]


def test_a_model_as_it_is_has_its_own_layers_and_heads(monkeypatch):
    import serve_steps
    from serve import parse_arguments
    from serve_cases import MODEL

    words = "--mode steps --as-is --batches 8 --contexts 4096 --model"
    args = parse_arguments([*words.split(), str(MODEL.with_name("deepseek-v2-lite"))])
    groups = []
    monkeypatch.setattr(serve_steps, "Engine", MagicMock())
    monkeypatch.setattr(serve_steps, "measure", lambda *_, group, **how: groups.append(group))
    serve_steps.run(args, None)
    assert groups == [{"heads": 16, "layers": 27}]
    args.cache_gib = 1
    said = r"does not fit a cache of 1 GiB with 27 layers\. Mend: a larger --cache-gib"
    with pytest.raises(SystemExit, match=said):
        serve_steps.run(args, None)


@pytest.mark.parametrize(
    ("given", "taken"), [(" ", ""), (" tpot:50  ttft:2000\n", "tpot:50 ttft:2000")]
)
def test_objectives_are_words(given, taken):
    """Of spaces alone vLLM's load generator would say that it expects an argument, late."""
    from serve import parse_arguments

    assert parse_arguments(["--slo", given]).slo == taken
