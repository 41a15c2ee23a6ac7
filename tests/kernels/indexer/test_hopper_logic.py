# SPDX-License-Identifier: Apache-2.0
"""What the Hopper score kernel reads and writes, without a GPU: mla_kernels.testing.gluon_numpy."""

import types

import pytest
import torch
from mla_kernels import indexer_lengths
from mla_kernels.indexer.hopper import launcher
from mla_kernels.indexer.reference import indexer_scores_reference
from mla_kernels.testing import gluon_numpy
from mla_kernels.testing.gluon_numpy import run
from mla_kernels.testing.indexer_case import make_indexer_case

LENGTHS = [300, 0, 1, 64, 130]


@pytest.fixture
def hopper(monkeypatch):
    """`hopper(case, sms, fp8_products)`: scores."""

    def call(case, sms=1, fp8_products=False):
        device = types.SimpleNamespace(multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        monkeypatch.setattr(launcher, "launch", run)
        T, width = len(case.q), case.block_table.shape[1] * 64
        scores = torch.full((T, width), float("nan"))
        launcher.launch_hopper_scores(
            case.q, case.k_cache, case.weights, case.block_table, lengths_of(case), scores,
            request_ids=case.request_ids, fp8_products=fp8_products,
        )  # fmt: skip
        return scores

    return call


def lengths_of(case):
    return indexer_lengths(case.seq_lens, len(case.q), **case.rows)


def check(case, scores):
    lengths = lengths_of(case)
    args = (case.q, case.k_cache, case.weights, case.block_table, lengths)
    want = indexer_scores_reference(*args, request_ids=case.request_ids)
    for row, length in enumerate(lengths.tolist()):
        end = -(-length // 64) * 64  # as far as it must be written
        got = scores[row, :end]
        assert torch.equal(torch.isneginf(got), torch.isneginf(want[row, :end]))
        seen = ~torch.isneginf(got)
        assert torch.allclose(got.double()[seen], want[row, :end][seen], rtol=1e-4, atol=1e-4)
        rest = scores[row, end:]
        assert (rest.isnan() | rest.isneginf()).all()


@pytest.mark.parametrize("fp8_products", [False, True])
@pytest.mark.parametrize("sms", [1, 3, 40])
@pytest.mark.parametrize("heads, s_q", [(64, 1), (64, 2), (24, 3), (8, 4), (5, 8)])
def test_rows_of_requests(heads, s_q, sms, fp8_products, hopper):
    case = make_indexer_case(LENGTHS, s_q=s_q, heads=heads)
    check(case, hopper(case, sms, fp8_products))


# A row a tile, and two, which belong to up to two requests.
@pytest.mark.parametrize("fp8_products", [False, True])
@pytest.mark.parametrize("chunks", [[1, 0, 1, 1, 2], [41, 0, 1, 2, 30]])
@pytest.mark.parametrize("sms", [1, 3])
def test_rows_that_name_their_request(chunks, sms, fp8_products, hopper):
    case = make_indexer_case(LENGTHS, chunks=chunks, heads=8)
    assert (len(case.q) > 4 * len(LENGTHS)) == (sum(chunks) > 20)
    check(case, hopper(case, sms, fp8_products))


@pytest.mark.parametrize("options", [{"s_q": 3}, {"s_q": 1}, {"chunks": [20, 0, 1, 10, 30]}])
def test_tiles_are_counted_through_in_turns(options, hopper, monkeypatch):
    monkeypatch.setattr(launcher, "TILE_COUNTS", (1, 2, 4))
    case = make_indexer_case(LENGTHS, heads=8, **options)
    check(case, hopper(case, 3))


def test_rows_without_keys_cost_nothing(hopper):
    """Padding before, between and behind the others, and nothing but padding."""
    for lengths in ([0, 0, 0, 300, 0, 0, 70, 0, 0], [0, 0]):
        case = make_indexer_case(lengths, heads=8)
        check(case, hopper(case, 2))


def test_short_tiles_are_shared_out_by_what_starting_them_costs(hopper, monkeypatch):
    """Of tiles of one page, none of ten programs gets twice as many as another; the long ones are
    cut."""
    read = [0] * 8
    inner = gluon_numpy.tma_load

    def tma_load(desc, at, barrier, into):
        if into.data.shape[0] == 64:
            read[program[0]] += 1
        inner(desc, at, barrier, into)

    program = [0]
    language = gluon_numpy.language

    def of_program(programs, number):
        program[0] = number
        return language(programs, number)

    monkeypatch.setitem(gluon_numpy.HARDWARE, "tma_load", tma_load)
    monkeypatch.setattr(gluon_numpy, "language", of_program)
    case = make_indexer_case([64] * 40 + [64 * 40], heads=8)
    check(case, hopper(case, 2))
    assert sum(read) == 80
    # 244 costs, 31 a program: six or seven short ones, or 27 to 31 pages of the long one.
    assert max(read[:6]) <= 8 and max(read) <= 31


@pytest.mark.parametrize("s_q", [1, 2])
def test_no_more_keys_than_the_block_table_has(s_q, hopper):
    case = make_indexer_case([128], s_q=s_q, heads=8, spare_blocks=0)
    case.seq_lens.add_(1000)
    scores = hopper(case)
    case.seq_lens[:] = 128 + s_q - 1  # every row sees all 128
    lengths = lengths_of(case).clamp(max=128)
    args = (case.q, case.k_cache, case.weights, case.block_table, lengths)
    assert torch.allclose(scores.double(), indexer_scores_reference(*args), rtol=1e-4, atol=1e-4)
