# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with rescale "flash" on a CPU: torch's operator, tokens of a prompt together."""

from fractions import Fraction

import pytest
import torch
from mla_kernels import mla_sparse_attention
from mla_kernels.decode import torch_scratch
from mla_kernels.decode.torch_sdpa import LEAST_PART, LEAST_PARTS, MOST_ROWS
from mla_kernels.sparse import torch_sdpa
from mla_kernels.sparse.choice import choose_sparse_impl
from mla_kernels.sparse.torch_sdpa import Run, runs_of, together, used_first
from mla_kernels.testing.metrics import MIRROR_BAR, SHORT_BAR, measure

from tests.kernels.sparse.test_sparse_attention import FORMATS, assert_close, attend, sparse_case


def flash(*args, **more):
    return attend(*args, rescale="flash", **more)


def prompt_case(lengths, cache="bf16", heads=16, **options):
    """As `sparse_case`, of one request: the slots of a token are the first ones of a longer one."""
    q, kv, slots, kwargs = sparse_case([max(lengths)], max(lengths), heads=heads, cache=cache)
    g = torch.Generator().manual_seed(3)
    q = torch.randn(len(lengths), heads, q.shape[2], generator=g).to(q.dtype)
    column = torch.arange(slots.shape[1])
    return q, kv, slots.masked_fill(column >= torch.tensor(lengths)[:, None], -1), kwargs


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("heads", [1, 8, 128])
@pytest.mark.parametrize("make", [sparse_case, prompt_case])
def test_matches_the_definition(cache, heads, make):
    q, kv, slots, options = make([300, 64, 1, 0, 200, 200], cache=cache, heads=heads)
    want = mla_sparse_attention(q, kv, slots, impl="reference", **options)
    assert_close(flash(q, kv, slots, options), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    q, kv, slots, options = sparse_case(dtype=dtype)
    want = mla_sparse_attention(q, kv, slots, impl="reference", **options)
    bar = SHORT_BAR if dtype == torch.float16 else MIRROR_BAR
    assert bar.failures(measure(flash(q, kv, slots, options)[0], want[0])) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_slots_that_several_threads_share(dtype, monkeypatch):
    """In parts, whose results are merged in fp32."""
    monkeypatch.setattr(torch_sdpa.torch, "get_num_threads", lambda: 8)
    tokens = LEAST_PARTS * LEAST_PART
    q, kv, slots, options = sparse_case([tokens], tokens, dtype=dtype)
    want = mla_sparse_attention(q, kv, slots, impl="reference", **options)
    bar = MIRROR_BAR if dtype == torch.float32 else SHORT_BAR
    assert bar.failures(measure(flash(q, kv, slots, options)[0], want[0])) == []


def test_slots_in_any_place_and_lengths_and_a_sink():
    q, kv, slots, options = sparse_case([300, 64, 1, 90], K=96)
    g = torch.Generator().manual_seed(1)
    for row in slots:
        row.copy_(row[torch.randperm(96, generator=g)])
    slots[0, 3], slots[1, 5] = kv.shape[0] * kv.shape[1], -7
    more = {"lengths": torch.tensor([50, 96, 0, 200], dtype=torch.int32)}
    more["sink"] = torch.linspace(-2, 3, 16)
    got = flash(q, kv, slots, options, **more)
    want = mla_sparse_attention(q, kv, slots, impl="reference", **options, **more)
    assert_close(got, want)
    assert (got[0][2] == 0).all() and (got[1][2] == -torch.inf).all()


@pytest.mark.parametrize("last_stride", [1, 2])
def test_strided_operands(last_stride):
    q, kv, slots, options = sparse_case()
    want = flash(q, kv, slots, options)
    wide = torch.full((*kv.shape[:1], kv.shape[1] + 1, kv.shape[2] + 8), torch.nan, dtype=kv.dtype)
    wide[:, :-1, :-8] = kv
    strided = torch.full((*q.shape[:2], q.shape[2] * last_stride), torch.nan, dtype=q.dtype)
    strided = strided[..., ::last_stride].copy_(q)
    torch_scratch.scratch("rows", (2**21,), torch.int64).fill_(-1)  # rows of `want` are left there
    got = flash(strided, wide[:, :-1, :-8], slots, options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("lengths", [[64, 65, 66], [1, 300, 17]])
def test_a_nan_is_for_the_tokens_that_see_it(lengths):
    """Though tokens of a prompt share their keys, and one of them may be among those."""
    q, kv, slots, options = prompt_case(lengths)
    sees = torch.tensor(lengths) == max(lengths)
    clean = flash(q, kv, slots, options)
    slot = int(slots[sees][0, max(lengths) - 1])
    kv[slot // kv.shape[1], slot % kv.shape[1], 5] = torch.nan
    out, lse = flash(q, kv, slots, options)
    assert out[sees].isnan().any()
    assert bool(out[~sees].isfinite().all()) and bool(lse[~sees].isfinite().all())
    torch.testing.assert_close(out[~sees].float(), clean[0][~sees].float(), atol=4e-3, rtol=0)


def test_a_score_of_inf_is_for_the_tokens_that_see_it():
    """The operator adds the mask to it: inf - inf."""
    q, kv = torch.zeros(2, 1, 576).bfloat16(), torch.zeros(1, 64, 576).bfloat16()
    q[..., 0], kv[0, :2, 1], kv[0, 1, 0] = 2.0**64, 1.0, 2.0**64
    slots = torch.tensor([[0, -1], [0, 1]], dtype=torch.int32)
    out, lse = mla_sparse_attention(q, kv, slots, scale=2.0**-20, rescale="flash")
    assert out[0, 0, 1] == 1.0 and lse[0, 0] == 0.0


@pytest.mark.parametrize("column", [5, 570])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_nan_in_the_only_key_of_a_token_shows(column, tokens):
    """Torch's operator loses it; in the rope part of a key it is in no value."""
    q, kv, slots, options = prompt_case([1, 2][:tokens])
    slot = int(slots[0, 0])
    kv[slot // kv.shape[1], slot % kv.shape[1], column] = torch.nan
    out, lse = flash(q, kv, slots, options)
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_nan_in_a_query_shows_in_its_row_alone(length, dtype):
    """With any number of keys: of fewer than 16 torch's operator loses it."""
    q, kv, slots, options = sparse_case([length, length], K=length, dtype=dtype)
    clean = flash(q, kv, slots, options)
    q[1, 3, 7] = torch.nan
    out, lse = flash(q, kv, slots, options)
    assert bool(out[1, 3].isnan().all()) and bool(lse[1, 3].isnan())
    out[1, 3], lse[1, 3] = clean[0][1, 3], clean[1][1, 3]
    assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("make", [sparse_case, prompt_case])
def test_deterministic_tokens_do_not_know_of_each_other(make, threads):
    q, kv, slots, options = make([64, 65, 66, 1, 300, 300, 2])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, lse = flash(q, kv, slots, options, deterministic=True)
        for t in range(len(q)):
            one, one_lse = flash(q[t : t + 1], kv, slots[t : t + 1], options, deterministic=True)
            assert torch.equal(out[t], one[0]) and torch.equal(lse[t], one_lse[0])
    finally:
        torch.set_num_threads(before)


def test_queries_that_want_gradients():
    q, kv, slots, options = sparse_case()
    want = flash(q, kv, slots, options)
    got = mla_sparse_attention(q.requires_grad_(), kv, slots, rescale="flash", **options)
    assert not got[0].requires_grad and not got[1].requires_grad
    assert all(map(torch.equal, got, want))


def test_a_prompt_is_a_few_products(monkeypatch):
    calls, whole = [], torch_sdpa.attend_in_call

    def count(q, *args):
        calls.append(tuple(q.shape[:3]))
        return whole(q, *args)

    monkeypatch.setattr(torch_sdpa, "attend_in_call", count)
    q, kv, slots, options = prompt_case(list(range(10, 80)))
    flash(q, kv, slots, options)
    assert sorted(calls) == [(1, 1, 6 * 16), (2, 1, 32 * 16)]


def used(*rows):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int32)


def test_used_slots_come_first():
    slots = torch.tensor([[-1, 5, 100, 7], [1, 2, 3, 4], [9, 9, -1, 0]], dtype=torch.int32)
    lengths = torch.tensor([4, 2, -1], dtype=torch.int32)
    front, counts = used_first(slots, 100, None)
    assert front.tolist() == [[5, 7, -1, -1], [1, 2, 3, 4], [9, 9, 0, -1]]
    assert counts.tolist() == [2, 4, 3]
    front, counts = used_first(slots, 100, lengths)
    assert front.tolist() == [[5, 7], [1, 2], [-1, -1]] and counts.tolist() == [2, 2, 0]
    assert used_first(slots, 0, None)[0].shape == (3, 0)
    assert used_first(slots[:0], 100, None)[0].shape == (0, 0)


def test_runs():
    slots = used([3], [3, 4], [3, 4], [3, 4, 5], [3, 5], [], [], [7], [8, 7])
    counts = (slots >= 0).sum(1)
    assert runs_of(slots, counts, 8) == [Run(0, 4, 3), Run(4, 1, 2), Run(5, 3, 1), Run(8, 1, 2)]
    assert runs_of(slots, counts, 3) == [
        *(Run(0, 3, 2), Run(3, 1, 3), Run(4, 1, 2)),
        *(Run(5, 3, 1), Run(8, 1, 2)),
    ]
    assert runs_of(slots, counts, 1) == [Run(t, 1, n) for t, n in enumerate(counts.tolist()) if n]
    assert runs_of(slots[5:7], counts[5:7], 8) == []
    assert runs_of(slots[:0], counts[:0], 8) == []


def test_calls_hold_runs_of_as_many_tokens_and_of_like_length():
    runs = [Run(0, 1, 9), Run(1, 2, 300), Run(3, 1, 5000), Run(4, 1, 10), Run(5, 2, 2)]
    runs.append(Run(7, 2, 290))
    assert list(together(runs)) == [
        *([runs[2]], [runs[3], runs[0]]),
        *([runs[1], runs[5]], [runs[4]]),
    ]


def test_the_rows_of_a_call_are_kept_for_the_next():
    """Fresh memory for each call costs more than the attention. A row is up to 576 fp32 numbers."""
    assert MOST_ROWS * 576 * 4 <= torch_scratch.KEPT_BYTES


def test_what_flash_is_not_for():
    q, kv, slots, options = sparse_case()
    with pytest.raises(ValueError, match="no max_logits with rescale 'flash'"):
        flash(q, kv, slots, options, max_logits=torch.empty(3, 16))
    with pytest.raises(ValueError, match=r"Expected rescale in \['pow2', 'flash'\], got 'amla'"):
        attend(q, kv, slots, options, rescale="amla")
    with pytest.raises(ValueError, match="rescale 'pow2' with impl 'triton' on cpu, got 'flash'"):
        flash(q, kv, slots, options, impl="triton")
    with pytest.raises(ValueError, match="rescale 'pow2' with impl 'auto' on cuda, got 'flash'"):
        choose_sparse_impl("auto", torch.device("cuda"), rescale="flash")


@pytest.mark.parametrize("more", [{"rescale": "flash"}, {"max_logits": torch.empty(6, 16)}])
def test_a_scale_may_be_any_number_of_pythons(more):
    q, kv, slots, options = prompt_case([300, 64, 1, 0, 200, 200])
    kv.zero_()  # the only score of a token is looked at once more
    want = attend(q, kv, slots, options | {"scale": 0.125}, **more)
    got = attend(q, kv, slots, options | {"scale": Fraction(1, 8)}, **more)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("rescale", ["pow2", "flash"])
def test_a_cache_of_as_many_rows_as_slots_can_name(rescale):
    """All of its blocks are one."""
    kv = torch.randn(1, 64, 576).bfloat16().expand(2**25, 64, 576)
    slots = torch.tensor([[0, 5, 2**31 - 1]], dtype=torch.int32)
    q, call = torch.randn(1, 2, 576).bfloat16(), {"scale": 0.04}
    want = mla_sparse_attention(q, kv, slots, impl="reference", **call)
    assert_close(mla_sparse_attention(q, kv, slots, rescale=rescale, **call), want)
