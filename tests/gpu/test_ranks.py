# SPDX-License-Identifier: Apache-2.0
"""One model on two GPUs: heads shared out (TP), and the context of each request too (DCP).

Judged as in test_parity: beside a stock backend that shares the GPUs in the same way, and token by
token beside our own engine on one GPU.
"""

import pytest
import torch
from engines import RANKS, RANKS_STOCK
from oracle import NOISE, distance, divergences
from test_parity import outputs_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ALONE = ["CUSTOM 128", f"{RANKS_STOCK} 128"]


@pytest.fixture(scope="module")
def bars(engines, checkpoint):
    """Distances of stock engines: on one GPU, and on two however they are shared."""
    names = [ALONE[1], *(f"{RANKS_STOCK} {ranks}" for ranks in RANKS)]
    return {name: distance(checkpoint(128), outputs_of(engines(name))) for name in names}


@pytest.mark.parametrize("ranks", [*RANKS, "tp 2 mtp"])
def test_two_ranks_answer_as_one(ranks, engines, checkpoint, bars, ranks_table):
    path = checkpoint(128)
    name, stock = f"CUSTOM {ranks}", f"{RANKS_STOCK} {ranks}"
    outputs, alone = outputs_of(engines(name)), outputs_of(engines(ALONE[0]))
    d, gaps = distance(path, outputs), divergences(path, outputs, alone)
    ranks_table(name, d, gaps, len(outputs))
    if stock in bars:
        others = divergences(path, outputs_of(engines(stock)), alone)
        ranks_table(stock, bars[stock], others, len(outputs))
    assert all(gap <= 2 * max(bar.max for bar in bars.values()) for gap in gaps), gaps
    assert d.mean <= NOISE * max(bar.mean for bar in bars.values())
    assert d.p99 <= NOISE * max(bar.p99 for bar in bars.values())


@pytest.mark.parametrize("ranks", RANKS)
def test_the_kernel_of_every_rank_is_the_one_expected(ranks, engines):
    stats = engines(f"CUSTOM {ranks}")["ranks"]
    assert [rank["rank"] for rank in stats] == [0, 1]
    assert [rank["decode"]["impl"] for rank in stats] == ["hopper", "hopper"]
    assert all(rank["decode_steps"] > 90 for rank in stats)
