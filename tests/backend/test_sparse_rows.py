# SPDX-License-Identifier: Apache-2.0
"""Which rows the tokens of a step are, and what of a step graphs may hold."""

import pytest
import torch
from sparse_parts import build_rows, common_metadata, fake_config


def expected_rows(query_lens, seq_lens, tokens):
    ids, lengths = [], []
    for r, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        ids += [r] * new
        lengths += range(total - new + 1, total + 1)
    padding = tokens - len(ids)
    return ids + [-1] * padding, lengths + [0] * padding


@pytest.mark.parametrize(
    "query_lens, seq_lens, tokens",
    [
        ([1, 5, 1, 17], [70, 5, 1, 200], 24),
        ([3, 0, 2], [3, 9, 300], 5),
        ([2, 1, 0], [65, 64, 0], 8),
        ([3, 1, 2], [70, 5, 9], 9),  # as many tokens as equal runs of 3 would have
        ([1], [1], 1),
    ],
)
def test_rows_of_a_mixed_step(query_lens, seq_lens, tokens):
    rows = build_rows(query_lens, seq_lens, tokens=tokens)
    ids, lengths = expected_rows(query_lens, seq_lens, tokens)
    assert rows.lengths.tolist() == lengths
    if rows.request_ids is None:  # then they must follow from the order alone
        runs = tokens // len(seq_lens)
        assert [t // runs for t in range(tokens)] == ids
    else:
        assert rows.request_ids.tolist() == ids


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize("padded", [0, 2])
def test_rows_of_a_decode_step_need_no_ids(run, padded):
    """Padding requests of a captured graph have no tokens; their rows see nothing."""
    query_lens, seq_lens = [run, run, run, *[0] * padded], [70, 5, 64, *[0] * padded]
    rows = build_rows(query_lens, seq_lens, tokens=run * len(seq_lens))
    assert rows.request_ids is None
    assert rows.lengths.tolist() == expected_rows(query_lens, seq_lens, run * len(seq_lens))[1]


def test_rows_keep_their_addresses():
    """What a captured graph has read must be where the next step writes."""
    from mla_backend.attention.sparse.rows import RowsBuilder

    builder = RowsBuilder(64, torch.device("cpu"))
    first = builder.build(common_metadata([1, 3], [9, 3]))
    second = builder.build(common_metadata([3, 1], [4, 8]))
    assert first.lengths.data_ptr() == second.lengths.data_ptr()
    assert first.request_ids.data_ptr() == second.request_ids.data_ptr()
    for buffer in (builder._request_ids, builder._lengths):
        buffer.fill_(-7)  # sleep mode discards what they hold
    after_sleep = builder.build(common_metadata([3, 1], [4, 8]))
    assert after_sleep.lengths.tolist() == [2, 3, 4, 8]
    assert after_sleep.request_ids.tolist() == [0, 0, 0, 1]
    assert len(builder.build(common_metadata([60, 4], [70, 8])).lengths) == 64
    with pytest.raises(ValueError, match="at most 64 tokens in a step, got 65"):
        builder.build(common_metadata([65], [65]))


@pytest.mark.parametrize("asked, support", [("auto", "UNIFORM_BATCH"), ("torch", "NEVER")])
def test_graphs_are_claimed_for_kernels_only(monkeypatch, asked, support):
    from mla_backend.attention.sparse import metadata

    monkeypatch.setenv("MLA_BACKEND_IMPL", asked)
    for builder in (metadata.SparseMetadataBuilder, metadata.IndexerMetadataBuilder):
        assert builder.get_cudagraph_support(None, None).name == support


@pytest.mark.parametrize("batched, drafts, most", [(64, 0, 64), (3, 0, 4), (3, 2, 12)])
def test_most_tokens_of_a_step(batched, drafts, most):
    from mla_backend.attention.sparse.rows import max_tokens

    assert max_tokens(fake_config(topk_rows=batched, drafts=drafts)) == most
