# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 on two GPUs that share its heads and the context of each request (DCP).

vLLM has no sparse backend that serves this on sm_90: the bars are its engine and ours on one GPU,
as in test_sparse_parity; "v3.2 all" reads every token, so that engines may part only at near-ties.
"""

import pytest
import torch
from oracle import NOISE, distance, divergences
from test_features import done, our_kernels, scenario
from test_parity import outputs_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RANKS = "tp 2 dcp 2"
ALL = [f"CUSTOM v3.2 all {RANKS}{mode}" for mode in ("", " compiled", " pages")]
SOME = f"CUSTOM v3.2 {RANKS}"


@pytest.fixture(autouse=True)
def served():
    from mla_backend import compat

    if not compat.serves_sparse_dcp():
        pytest.skip("refused in this vLLM")


@pytest.mark.parametrize("name", ALL)
def test_ranks_read_all_tokens_as_one(name, engines, checkpoint, ranks_table):
    path = checkpoint("v3.2 all")
    outputs, alone, theirs = (
        outputs_of(engines(n)) for n in (name, "CUSTOM v3.2 all", "FLASHMLA_SPARSE v3.2 all")
    )
    d, one, stock = (distance(path, o) for o in (outputs, alone, theirs))
    gaps = divergences(path, outputs, alone)
    ranks_table(name, d, gaps, len(outputs))
    assert all(gap <= 2 * max(one.max, stock.max) for gap in gaps), (gaps, one, stock)
    assert d.mean <= NOISE * max(one.mean, stock.mean)
    assert d.p99 <= NOISE * max(one.p99, stock.p99)


def test_ranks_choose_tokens_as_well_as_one(engines, checkpoint, ranks_table):
    """512 of up to 2600. Engines whose rounding differs choose others: only the distances to the
    oracle are compared."""
    path = checkpoint("v3.2")
    outputs, alone, theirs = (
        outputs_of(engines(n)) for n in (SOME, "CUSTOM v3.2", "FLASHMLA_SPARSE v3.2")
    )
    d, one, stock = (distance(path, o) for o in (outputs, alone, theirs))
    ranks_table(SOME, d, divergences(path, outputs, alone), len(outputs))
    assert d.mean <= NOISE * max(one.mean, stock.mean)
    assert d.p99 <= NOISE * max(one.p99, stock.p99)


@pytest.mark.parametrize("name", [SOME, *ALL])
def test_every_rank_computes_with_the_kernel_expected(name, engines):
    result = engines(name)
    ranks = result["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["sparse"]["impl"] == "hopper"
        assert rank["sparse_steps"] > 90 and rank["forward_mha_calls"] == 0
    assert not our_kernels() & set(result["compiled_late"])
    # In blocks of 128 tokens, 64 of each rank.
    assert [o["cached"] for o in scenario(result, "prefix")["outputs"]] == [1024] * 4


def test_graphs_of_ranks_replay_without_calls(engines):
    calls = done(engines(SOME), "plain")
    assert calls["indexer_calls"] < calls["sparse_steps"]


def test_steps_of_ranks_are_checked(engines):
    counted = done(engines(ALL[2]), "plain")
    assert counted["checked_steps"] == counted["sparse_steps"] > 90
