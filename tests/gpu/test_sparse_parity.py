# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 beside vLLM's own sparse backend, judged as in test_parity.

512 tokens are read of up to 2600. Both engines round keys and queries of the indexer to fp8, the
oracle does not, so both are further from it than dense engines are.
"""

from oracle import distance, divergences
from test_parity import NOISE, outputs_of


def test_sparse_model_is_as_good_as_stock(engines, checkpoint, parity_table):
    path = checkpoint("v3.2")
    ours, theirs = (outputs_of(engines(f"{b} v3.2")) for b in ("CUSTOM", "FLASHMLA_SPARSE"))
    mine, stock = distance(path, ours), distance(path, theirs)
    gaps = divergences(path, ours, theirs)
    parity_table("CUSTOM v3.2", mine)
    parity_table("FLASHMLA_SPARSE v3.2", stock, gaps, len(ours))
    assert all(gap <= 2 * stock.max for gap in gaps), (gaps, stock)
    assert mine.mean <= NOISE * stock.mean
    assert mine.p99 <= NOISE * stock.p99


def test_modes_of_a_sparse_model_are_as_good_as_graphs(engines, checkpoint, parity_table):
    path = checkpoint("v3.2")
    plain = outputs_of(engines("CUSTOM v3.2"))
    bar = distance(path, plain)
    for mode in ("eager", "compiled", "mtp", "fp8_ds_mla"):
        outputs = outputs_of(engines(f"CUSTOM v3.2 {mode}"))
        d, gaps = distance(path, outputs), divergences(path, outputs, plain)
        parity_table(f"CUSTOM v3.2 {mode}", d, gaps, len(outputs))
        if mode != "fp8_ds_mla":
            assert d.mean <= NOISE * bar.mean, mode
