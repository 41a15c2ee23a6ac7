# SPDX-License-Identifier: Apache-2.0
"""`rescale="flash"` on a CPU: which requests share a call, and requests cut into parts."""

from fractions import Fraction

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.decode import torch_scratch, torch_sdpa
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.decoded import assert_decoded

# q 1, alike or not; several tokens a request, of which the first may see none.
CASES = [
    ([300], {}),
    ([300, 300], {}),
    ([900, 130, 64, 1, 0], {}),
    ([65, 700, 2, 0], {"s_q": 4}),
    ([130, 2], {"s_q": 4}),
    ([200, 3], {"s_q": 4}),
    ([200, 3], {"s_q": 4, "num_heads": 33}),
    ([500, 129], {"s_q": 2, "causal": False}),
    ([200, 3], {"cache_dtype": torch.float8_e4m3fn, "kv_scale": 2.0**-6}),
    ([200, 3], {"cache_dtype": torch.uint8}),
    ([200, 3], {"dtype": torch.float16}),
    ([200, 3], {"dtype": torch.float32}),
]


def decode(case, **options):
    out = case.poisoned_out()
    return mla_decode(*case.args, **case.options, rescale="flash", out=out, **options)


def make(lengths, options):
    options = dict(options)
    causal = options.pop("causal", True)
    return decode_case(lengths, **{"num_heads": 5} | options), causal


@pytest.mark.parametrize(("lengths", "options"), CASES)
def test_whole_requests(lengths, options):
    case, causal = make(lengths, options)
    assert_decoded(case, *decode(case, causal=causal), causal=causal)


@pytest.mark.parametrize(("lengths", "options"), CASES)
def test_requests_in_parts(monkeypatch, lengths, options):
    """As on many cores: parts of some 40 tokens, some of which a request does not reach."""
    cut, attend = [], torch_sdpa._attend_in_parts

    def counted(*args):
        cut.append(args[-1])
        return attend(*args)

    monkeypatch.setattr(torch_sdpa, "_attend_in_parts", counted)
    monkeypatch.setattr(torch_sdpa, "LEAST_PART", 40)
    monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: 64)
    case, causal = make(lengths, options)
    torch_scratch.scratch("keys", (2**21,), torch.float32).fill_(torch.nan)
    out, lse = decode(case, causal=causal)
    assert cut and min(cut) > 2
    assert_decoded(case, out, lse, causal=causal)


@pytest.mark.parametrize("lengths", [[70, 300], [1, 9], [15, 15], [3, 16]])
def test_a_nan_in_a_query_shows_in_its_row_alone(monkeypatch, lengths):
    for threads in (1, 4):
        monkeypatch.setattr(torch_sdpa, "LEAST_PART", 40)
        monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: threads)  # noqa: B023
        case = decode_case(lengths, num_heads=4)
        case.q[0, 0, 1, 3] = torch.nan
        out, lse = decode(case)
        assert lse.isnan().nonzero().tolist() == [[0, 0, 1]]
        assert torch.equal(out.isnan(), lse.isnan()[..., None].expand_as(out))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize(
    "lengths",
    [[], [0, 0], [1], [5000], [280] * 300, [900, 300], list(range(1024, 0, -31)), [2**17, 7, 0]],
)
def test_calls_hold_every_request_once_and_little_padding(monkeypatch, lengths, hidden, threads):
    monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: threads)
    tiles = list(torch_sdpa.calls(lengths, hidden))
    edges = [0, *(t.stop for t in tiles)]
    assert [t.start for t in tiles] == edges[:-1] and edges[-1] == sum(n > 0 for n in lengths)
    for t in tiles:
        own = lengths[t.start : t.stop]
        assert (t.first, t.end) == (0, own[0])
        assert [n - hidden >= t.end for n in own] == [i < t.whole for i in range(t.start, t.stop)]
        assert len(own) == 1 or len(own) * own[0] <= torch_sdpa.MOST_ROWS
        assert 2 * own[-1] >= own[0] or own[0] - own[-1] <= torch_sdpa.MOST_PADDING
        last_round = own[(len(own) - 1) // threads * threads]
        assert own[0] - last_round <= torch_sdpa.MOST_PADDING


def test_requests_of_other_lengths_are_attended_to_side_by_side(monkeypatch):
    lengths = [3560, 3080, 2600, 2120, 900, 300]
    for threads, stops in ((1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 5, 6]), (4, [4, 5, 6])):
        monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: threads)  # noqa: B023
        assert [t.stop for t in torch_sdpa.calls(lengths, 0)] == stops
        assert (torch_sdpa.one_call([600, 900], 0) is None) == (threads == 1)


def test_requests_of_one_length_share_a_call():
    most = torch_sdpa.MOST_ROWS // 280
    for requests, number in ((most, 1), (most + 1, 2)):
        assert len(list(torch_sdpa.calls([280] * requests, 0))) == number


def test_what_a_request_may_be_shorter_in_a_call(monkeypatch):
    monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: 1)
    for shorter, number in ((torch_sdpa.MOST_PADDING, 1), (torch_sdpa.MOST_PADDING + 1, 2)):
        lengths = [300, 300 - shorter]
        assert len(list(torch_sdpa.calls(lengths, 0))) == number
        assert (torch_sdpa.one_call(lengths, 0) is None) == (number == 2)


def test_requests_are_cut_for_threads_that_would_be_idle(monkeypatch):
    monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: 8)
    cases = [(1, 1, 32), (1, 1, 33), (1, 2, 32), (2, 1, 32), (3, 1, 32)]
    parts = [torch_sdpa.parts_of(torch.Size([*case, 576]), 2**14) for case in cases]
    assert parts == [8, 4, 4, 4, 1]
    least = torch_sdpa.LEAST_PARTS * torch_sdpa.LEAST_PART
    parts = [torch_sdpa.parts_of(torch.Size([1, 1, 16, 576]), least + n) for n in (-1, 0)]
    assert parts == [1, torch_sdpa.LEAST_PARTS]


@pytest.mark.parametrize("lengths", [[3, 300, 290, 0, 301], [280] * 3, [64], [0], [900, 3, 900]])
def test_one_call_needs_no_order(lengths):
    for hidden in (0, 2):
        tile, ordered = (
            torch_sdpa.one_call(lengths, hidden),
            list(torch_sdpa.calls(sorted(lengths, reverse=True), hidden)),
        )
        assert tile is None or len(ordered) == 1
        if tile is not None:
            assert (tile.start, tile.stop, tile.first) == (0, len(lengths), 0)
            assert tile.end == max(lengths)
            assert tile.whole == (len(lengths) if {*lengths} == {tile.end} and not hidden else 0)


def test_queries_of_any_strides():
    case = decode_case([300, 299])
    strided = case.q.mT.contiguous().mT
    want = decode(case)
    got = mla_decode(strided, *case.args[1:], **case.options, rescale="flash")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(("lengths", "s_q"), [([300, 0], 1), ([300, 2], 4), ([300, 0, 9, 9], 1)])
@pytest.mark.parametrize("heads", [3, 40])
def test_a_row_that_sees_nothing_gives_zeros_whatever_its_query_holds(lengths, s_q, heads):
    case = decode_case(lengths, num_heads=heads, s_q=s_q)
    case.q[1] = torch.nan
    out, lse = decode(case)
    blind = lse == -torch.inf
    assert blind[1, : max(s_q - lengths[1], 0)].all() and (out[blind] == 0).all()


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(default):
    case = decode_case([300, 290])
    want = decode(case)
    torch.set_default_dtype(default)
    try:
        got = decode(case)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("lengths", [[300, 70], [700]])
def test_many_groups_of_long_requests_take_turns(monkeypatch, lengths):
    taken, attend = [], torch_sdpa._attend

    def counted(q, *args):
        taken.append(q.shape[1])
        return attend(q, *args)

    monkeypatch.setattr(torch_sdpa, "_attend", counted)
    monkeypatch.setattr(torch_sdpa, "MOST_ROWS", 512)
    case = decode_case(lengths, num_heads=40, s_q=3)
    assert_decoded(case, *decode(case))
    assert 1 in taken


def test_large_memory_is_not_kept():
    size = torch_scratch.KEPT_BYTES // 4
    kept = torch_scratch.scratch("large", (size,), torch.float32)
    assert torch_scratch.scratch("large", (size,), torch.float32).data_ptr() == kept.data_ptr()
    larger = torch_scratch.scratch("large", (size + 1,), torch.float32)
    assert larger.data_ptr() != kept.data_ptr()
    assert torch_scratch.scratch("large", (size,), torch.float32).data_ptr() == kept.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [3, 100])
def test_a_score_of_infinity_shows_in_its_row_alone(dtype, length):
    """Torch's operator says 0, from some number of keys on."""
    case = decode_case([length, 90], num_heads=2, dtype=dtype)
    case.q[0, 0, 1], case.q[0, 0, 1, 0] = 0.0, 1.0
    case.q[0, 0, 0, 0] = case.q[1] = 0.0  # of the other rows no score is infinite
    case.kv_cache[int(case.block_table[0, 0]), 2, 0] = torch.inf
    out, lse = mla_decode(*case.args, **case.options, rescale="flash")
    assert lse[0, 0, 1].isnan() and out[0, 0, 1].isnan().all()
    assert lse[1].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("parts", [False, True])
def test_keys_of_no_weight_count_for_nothing(monkeypatch, parts):
    """Whose scores are all -inf: finite inputs of which a product overflows. Torch's operator says
    that their lse is 0."""
    if parts:
        monkeypatch.setattr(torch_sdpa, "LEAST_PART", 64)
        monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: 64)
    case = decode_case([640, 200, 130], num_heads=1)
    case.q.fill_(0.02)
    case.q[..., 0] = 1e20
    for b, length in enumerate(case.seq_lens.tolist()):
        rows = case.kv_cache[case.block_table[b, : -(-length // 64)].long()]
        rows[..., 0] = -3e-19
        rows[:4, :, 0] = -1e20  # the first 256 tokens
        case.kv_cache[case.block_table[b, : len(rows)].long()] = rows
    expected, expected_lse = mla_decode(*case.args, **case.options, impl="torch", rescale="pow2")
    out, lse = mla_decode(*case.args, **case.options, rescale="flash")
    assert lse.flatten()[1:].tolist() == [-torch.inf] * 2 and not out[1:].any()
    assert lse[0].isfinite().all() and (lse - expected_lse)[0].abs().max() < 1e-3
    assert (out.float() - expected.float()).abs().max() < 1e-2


def test_rows_that_see_nothing_cost_no_look_at_scores(monkeypatch):
    """Parts behind the end of a shorter request, in every step."""
    looked = []
    monkeypatch.setattr(torch_sdpa, "LEAST_PART", 40)
    monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: 64)
    weightless = torch_sdpa._weightless

    def look(*args):
        looked.append(weightless(*args))
        return looked[-1]

    monkeypatch.setattr(torch_sdpa, "_weightless", look)
    case = decode_case([300, 150], num_heads=2)
    assert_decoded(case, *decode(case))
    assert looked and all(found is None for found in looked)


def test_a_cache_of_zeros_weighs_something():
    """Its lse is that of torch's operator for nothing where it is of one token: 0."""
    case = decode_case([1, 1, 5], num_heads=2)
    case.kv_cache.zero_()
    out, lse = mla_decode(*case.args, **case.options, rescale="flash")
    assert not out.any()
    assert torch.allclose(lse[:, 0, 0], torch.tensor([1.0, 1.0, 5.0]).log(), atol=1e-6)


def test_a_scale_may_be_any_number_of_pythons():
    case = decode_case([1], num_heads=2)
    case.kv_cache.zero_()  # whose scores are looked at once more
    want = decode(case)
    case.options["scale"] = Fraction(1, 24)
    assert all(torch.equal(*pair) for pair in zip(decode(case), want, strict=True))
