# SPDX-License-Identifier: Apache-2.0
"""What the Hopper score kernels read and write, without a GPU (mla_kernels.testing.gluon_numpy)."""

import types

import pytest
import torch
from mla_kernels import indexer_lengths
from mla_kernels.indexer.hopper import launcher
from mla_kernels.indexer.reference import indexer_scores_reference
from mla_kernels.testing.gluon_numpy import run
from mla_kernels.testing.indexer_case import make_indexer_case
from mla_kernels.topk.triton.keys import GROUP

LENGTHS = [300, 0, 1, 64, 130]


@pytest.fixture
def hopper(monkeypatch):
    """`hopper(case, sms)`: (scores, level1, how often a kernel was launched)."""

    def call(case, sms=1):
        launched = []

        def launch(kernel, grid, *args, **named):
            launched.append(kernel)
            run(kernel, grid, *args, **named)

        device = types.SimpleNamespace(multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        monkeypatch.setattr(launcher, "launch", launch)
        T, width = len(case.q), case.block_table.shape[1] * 64
        scores = torch.full((T, width), float("nan"))
        level1 = torch.full((T, width // GROUP), 7, dtype=torch.int32)
        launcher.launch_hopper_scores(
            case.q, case.k_cache, case.weights, case.block_table, lengths_of(case), scores,
            request_ids=case.request_ids, level1=level1,
        )  # fmt: skip
        return scores, level1, launched

    return call


def lengths_of(case):
    return indexer_lengths(case.seq_lens, len(case.q), **case.rows)


def check(case, scores, level1):
    lengths = lengths_of(case)
    args = (case.q, case.k_cache, case.weights, case.block_table, lengths)
    want = indexer_scores_reference(*args, request_ids=case.request_ids)
    for row, length in enumerate(lengths.tolist()):
        end = -(-length // 64) * 64  # as far as it must be written
        got, best = scores[row, :end], level1[row, : end // GROUP]
        assert torch.equal(torch.isneginf(got), torch.isneginf(want[row, :end]))
        seen = ~torch.isneginf(got)
        assert torch.allclose(got.double()[seen], want[row, :end][seen], rtol=1e-4, atol=1e-4)
        bits = (got + 0.0).view(torch.int32)
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(-1, GROUP)
        assert torch.equal(best, keys.amax(1))
        rest = scores[row, end:]
        assert (rest.isnan() | rest.isneginf()).all()


@pytest.mark.parametrize("sms", [1, 3, 40])
@pytest.mark.parametrize("heads, s_q", [(64, 1), (64, 2), (24, 3), (8, 4), (8, 5), (5, 8)])
def test_rows_of_requests(heads, s_q, sms, hopper):
    case = make_indexer_case(LENGTHS, s_q=s_q, heads=heads)
    scores, level1, _ = hopper(case, sms)
    check(case, scores, level1)


# A row a tile, and four, which belong to up to three requests.
@pytest.mark.parametrize("chunks", [[1, 0, 1, 1, 2], [41, 0, 1, 2, 30]])
@pytest.mark.parametrize("sms", [1, 3])
def test_rows_that_name_their_request(chunks, sms, hopper):
    case = make_indexer_case(LENGTHS, chunks=chunks, heads=8)
    assert (len(case.q) > 4 * len(LENGTHS)) == (sum(chunks) > 20)
    scores, level1, _ = hopper(case, sms)
    check(case, scores, level1)


@pytest.mark.parametrize("options", [{"s_q": 3}, {"s_q": 6}, {"chunks": [20, 0, 1, 10, 30]}])
def test_more_rows_than_a_launch_takes(options, hopper, monkeypatch):
    monkeypatch.setattr(launcher, "MAX_TILES", 4)
    case = make_indexer_case(LENGTHS, heads=8, **options)
    scores, level1, launched = hopper(case)
    assert len(launched) > 1
    check(case, scores, level1)


@pytest.mark.parametrize("s_q", [1, 2])
def test_no_more_keys_than_the_block_table_has(s_q, hopper):
    case = make_indexer_case([128], s_q=s_q, heads=8, spare_blocks=0)
    case.seq_lens.add_(1000)
    scores, _, _ = hopper(case)
    case.seq_lens[:] = 128 + s_q - 1  # every row sees all 128
    lengths = lengths_of(case).clamp(max=128)
    args = (case.q, case.k_cache, case.weights, case.block_table, lengths)
    assert torch.allclose(scores.double(), indexer_scores_reference(*args), rtol=1e-4, atol=1e-4)
