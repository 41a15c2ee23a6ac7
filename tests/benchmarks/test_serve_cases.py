# SPDX-License-Identifier: Apache-2.0
"""benchmarks/serve.py: its cases, models, depths and options."""

import json

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


@pytest.mark.parametrize("text", ["1024", "1024/", "a/b", "0/5", "1/2/3", "-1/4"])
def test_bad_shapes_are_refused(text):
    from serve_cases import Shape

    with pytest.raises(ValueError, match="expected PROMPT/ANSWER"):
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
    assert sparse.backends == ["CUSTOM", *stock] and sparse.heads == [128]
    assert len(dense.backends) == 4 and dense.heads == [128, 16] and dense.batches is None
    report = Report("steps", "", {}, vars(sparse) | {"model": "m"})
    assert report.stem == "sparse_steps" and "and the indexer" in markdown(report)
    assert "their share of the MLP" not in markdown(report)
    few = parse_arguments(["--family", "v3.2", "--heads", "16", "--kv-cache-dtype", "fp8_ds_mla"])
    report = Report("steps", "", {}, vars(few) | {"model": "m"})
    assert report.stem == "sparse_steps_fp8_ds_mla"
    assert "KV cache dtype fp8_ds_mla; fewer than 128 heads with their share" in markdown(report)


@pytest.mark.parametrize(
    ("given", "taken"), [(" ", ""), (" tpot:50  ttft:2000\n", "tpot:50 ttft:2000")]
)
def test_objectives_are_words(given, taken):
    """Of spaces alone vLLM's load generator would say that it expects an argument, late."""
    from serve import parse_arguments

    assert parse_arguments(["--slo", given]).slo == taken
