# SPDX-License-Identifier: Apache-2.0
"""One model on two GPUs: heads shared out (TP), and the context of each request too (DCP).

Judged as in test_parity: beside a stock backend that shares the GPUs in the same way, and token by
token beside our own engine on one GPU.
"""

import functools

import pytest
import torch
from engines import RANKS, RANKS_STOCK, SPARSE_STOCK
from oracle import NOISE, distance, divergences
from test_features import done
from test_parity import outputs_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SPARSE = "v3.2 all"
DENSE_BARS = [f"{RANKS_STOCK} {ranks}" for ranks in ("128", *RANKS)]
SPARSE_BARS = [f"{SPARSE_STOCK} {SPARSE}", f"{SPARSE_STOCK} {SPARSE} tp 2"]


@pytest.fixture(scope="module")
def bars(engines, checkpoint):
    """`bars(heads)`: distances of stock engines, on one GPU and on two however they are shared."""

    @functools.cache
    def of(heads):
        names = SPARSE_BARS if heads == SPARSE else DENSE_BARS
        return {name: distance(checkpoint(heads), outputs_of(engines(name))) for name in names}

    return of


OF_SPARSE = [f"{SPARSE} {ranks}" for ranks in RANKS]
DEALT_DRAFTS = ["dcp 2 mtp", "dcp 2 pairs mtp", "dcp 2 other runner mtp"]
DEALT_DRAFTS += [f"{SPARSE} {ranks}" for ranks in DEALT_DRAFTS]
OTHERS = ["tp 2 mtp", "dcp 2 other runner", *DEALT_DRAFTS, *OF_SPARSE]


@pytest.mark.parametrize("ranks", [*RANKS, *OTHERS])
def test_two_ranks_answer_as_one(ranks, engines, checkpoint, bars, ranks_table):
    heads, stock = (SPARSE, SPARSE_STOCK) if SPARSE in ranks else (128, RANKS_STOCK)
    path, bars = checkpoint(heads), bars(heads)
    name, stock = f"CUSTOM {ranks}", f"{stock} {ranks}"
    outputs, alone = outputs_of(engines(name)), outputs_of(engines(f"CUSTOM {heads}"))
    d, gaps = distance(path, outputs), divergences(path, outputs, alone)
    ranks_table(name, d, gaps, len(outputs))
    if stock in bars:
        others = divergences(path, outputs_of(engines(stock)), alone)
        ranks_table(stock, bars[stock], others, len(outputs))
    assert all(gap <= 2 * max(bar.max for bar in bars.values()) for gap in gaps), gaps
    assert d.mean <= NOISE * max(bar.mean for bar in bars.values())
    assert d.p99 <= NOISE * max(bar.p99 for bar in bars.values())


def test_ranks_choose_tokens_as_well_as_one(engines, checkpoint, ranks_table):
    """512 of up to 2600. Engines whose rounding differs choose others: only the distances to the
    oracle are compared."""
    path, name = checkpoint("v3.2"), "CUSTOM v3.2 dcp 2"
    outputs, *ones = (outputs_of(engines(n)) for n in (name, "CUSTOM v3.2", f"{SPARSE_STOCK} v3.2"))
    d, bars = distance(path, outputs), [distance(path, one) for one in ones]
    ranks_table(name, d, divergences(path, outputs, ones[0]), len(outputs))
    assert d.mean <= NOISE * max(bar.mean for bar in bars)
    assert d.p99 <= NOISE * max(bar.p99 for bar in bars)


@pytest.mark.parametrize("ranks", [*RANKS, *OF_SPARSE, "v3.2 dcp 2"])
def test_the_kernel_of_every_rank_is_the_one_expected(ranks, engines):
    stats = engines(f"CUSTOM {ranks}")["ranks"]
    kind = "sparse" if "v3.2" in ranks else "decode"
    assert [rank["rank"] for rank in stats] == [0, 1]
    assert [rank[kind]["impl"] for rank in stats] == ["hopper", "hopper"]
    assert all(rank[f"{kind}_steps"] > 90 for rank in stats)


@pytest.mark.parametrize("ranks", DEALT_DRAFTS)
def test_steps_of_dealt_drafts_are_checked_and_found_sound(ranks, engines):
    """The slots of every step of a rank, its drafter's too: an engine ends at the first fault."""
    result = engines(f"CUSTOM {ranks}")
    counted, kind = done(result, "plain"), "sparse" if SPARSE in ranks else "decode"
    assert counted["checked_steps"] >= counted[f"{kind}_steps"] > 20
    assert all(rank["checked_steps"] > 20 for rank in result["ranks"])
