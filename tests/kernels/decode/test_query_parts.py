# SPDX-License-Identifier: Apache-2.0
"""Queries that come in two parts, with the strides that a layer's products leave them in."""

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.decode.query import row_parts
from mla_kernels.testing.cases import decode_case

NOPE = 128


def parts_of(q, *, by_head):
    """The same numbers as a layer has them: out of a product over heads, or written in place by
    it; the rope part is the end of each head's query."""
    B, s_q, H, _ = q.shape
    flat = q.flatten(0, 1)
    latent = flat[..., :512]
    latent = latent.transpose(0, 1).contiguous().transpose(0, 1) if by_head else latent.contiguous()
    whole = torch.full((B * s_q, H, NOPE + 64), torch.nan, dtype=q.dtype, device=q.device)
    whole[..., NOPE:] = flat[..., 512:]
    return latent.unflatten(0, (B, s_q)), whole[..., NOPE:].unflatten(0, (B, s_q))


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("by_head", [False, True])
def test_parts_give_what_the_whole_gives(impl, by_head):
    case = decode_case([0, 70, 5], num_heads=4, s_q=2)
    q, *rest = case.args
    whole, whole_lse = mla_decode(q, *rest, **case.options, impl=impl)
    parts, parts_lse = mla_decode(parts_of(q, by_head=by_head), *rest, **case.options, impl=impl)
    assert torch.equal(parts, whole)
    assert torch.equal(parts_lse, whole_lse)


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 6, 16])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("by_head", [False, True])
def test_rows_of_a_request_are_one_stride_apart(s_q, heads, requests, by_head):
    q = torch.randn(requests, s_q, heads, 576).bfloat16()
    parts = parts_of(q, by_head=by_head)
    rows = row_parts(parts, 512)
    want = q.flatten(1, 2)
    assert torch.equal(rows[0], want[..., :512])
    assert torch.equal(rows[1], want[..., 512:])
    for row in rows:
        assert row.stride(2) == 1
        assert not row.data_ptr() % 16
        assert not any(stride * 2 % 16 for stride in row.stride()[:2])
    shared = rows[1].data_ptr() == parts[1].data_ptr()
    assert shared == (not by_head or s_q == 1 or heads == 1 or requests * s_q == 1)


@pytest.mark.parametrize("start", [1, 4])
def test_parts_that_tma_cannot_read_are_copied(start):
    q = torch.randn(2, 1, 16, start + 576).bfloat16()[..., start:]
    latent, rope = row_parts((q[..., :512], q[..., 512:]), 512)
    assert torch.equal(torch.cat((latent, rope), -1), q.flatten(1, 2))
    assert not latent.data_ptr() % 16
    assert latent.stride(1) == 576


@pytest.mark.parametrize(
    ("shape", "strides", "first", "copied"),
    [
        ((2, 1, 16), (16 * 512, 16 * 512, 512), 0, False),
        ((2, 1, 16), (16 * 512, 16 * 512, 512), 4, True),  # the start alone
        ((2, 1, 16), (16 * 516, 16 * 516, 516), 0, True),  # rows alone
        ((2, 1, 16), (16 * 512 + 4, 16 * 512, 512), 0, True),  # requests alone
        ((2, 3, 4), (3 * 2048, 2056, 512), 0, True),  # rows of a request in two strides
        ((2, 1, 16), (16 * 512, 7, 512), 0, False),  # of one there is no next
        ((2, 3, 1), (3 * 512, 512, 7), 0, False),
        ((2, 1, 1), (512, 7, 7), 0, False),
        ((1, 3, 4), (7, 2048, 512), 0, False),
        ((2, 1, 16), (16 * 512, 16 * 512, 0), 0, True),  # one head for all
        ((2, 1, 16), (0, 16 * 512, 512), 0, True),  # one request for all
    ],
)
def test_places_that_tma_cannot_reach(shape, strides, first, copied):
    memory = torch.randn(2 * 17 * 516).bfloat16()
    latent = memory.as_strided((*shape, 512), (*strides, 1), first)
    rope = torch.randn(*shape, 64).bfloat16()
    rows = row_parts((latent, rope), 512)
    assert torch.equal(rows[0], latent.flatten(1, 2)) and torch.equal(rows[1], rope.flatten(1, 2))
    assert (rows[0].data_ptr() != latent.data_ptr()) is copied
    assert not any(2 * stride % 16 for row in rows for stride in row.stride()[:2])


@pytest.mark.parametrize("unaligned", [0, 1])
def test_one_part_that_tma_cannot_read_is_enough(unaligned):
    q = torch.randn(2, 1, 16, 576).bfloat16()
    parts = list(parts_of(q, by_head=False))
    part = parts[unaligned]
    parts[unaligned] = torch.nn.functional.pad(part, (1, 0))[..., 1:]
    rows = row_parts(tuple(parts), 512)
    assert torch.equal(torch.cat(rows, -1), q.flatten(1, 2))
    assert not any(row.data_ptr() % 16 for row in rows)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            (torch.zeros(1, 1, 4, 512),),
            "its two parts, got a tuple of 1",
        ),
        ([torch.zeros(1, 1, 4, 512)] * 2, "two parts, got list"),
        ((torch.zeros(1, 1, 4, 256), torch.zeros(1, 1, 4, 64)), r"q\[0\]"),
        ((torch.zeros(1, 1, 4, 512), torch.zeros(1, 1, 3, 64)), r"q\[1\]"),
        ((torch.zeros(1, 1, 4, 512), torch.zeros(1, 1, 4, 64).bfloat16()), r"q\[1\]"),
        ((torch.zeros(1, 1, 4, 512), torch.zeros(1, 1, 64, 4).mT), r"q\[1\]"),
        (
            (torch.zeros(1, 1, 4, 512), torch.zeros(1, 1, 4, 64, device="meta")),
            r"q\[1\] on cpu, .*got meta",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    case = decode_case([5], num_heads=4, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        mla_decode(parts, *case.args[1:], **case.options)


def test_parts_of_no_request_have_any_strides():
    """torch calls them contiguous, so nobody could mend them."""
    case = decode_case([5], num_heads=4, dtype=torch.float32)
    none = [torch.zeros(0, 1, width, 4).mT for width in (512, 64)]
    assert all(part.stride(-1) != 1 and part.is_contiguous() for part in none)
    kv_cache, table, lengths = case.args[1:]
    out, lse = mla_decode(tuple(none), kv_cache, table[:0], lengths[:0], **case.options)
    assert out.shape == (0, 1, 4, 512) and lse.shape[0] == 0


@pytest.mark.parametrize("rank", ["512", None, 512.0, True])
def test_a_rank_that_is_no_integer_is_named(rank):
    case = decode_case([5], num_heads=4)
    options = case.options | {"kv_lora_rank": rank}
    parts = parts_of(case.q, by_head=False)
    with pytest.raises(ValueError, match=rf"kv_lora_rank in 1\.\.\d+, got {rank!r}"):
        mla_decode(parts, *case.args[1:], **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("impl", ["hopper", "triton"])
@pytest.mark.parametrize("cache_dtype", [None, torch.uint8])
@pytest.mark.parametrize("heads", [1, 6, 16, 64, 128])
@pytest.mark.parametrize("s_q", [1, 2, 5])
@pytest.mark.parametrize("by_head", [False, True])
def test_parts_on_a_gpu(impl, cache_dtype, heads, s_q, by_head):
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    case = decode_case(
        [0, 1, 65, 1000, 0, 33], num_heads=heads, s_q=s_q, device="cuda", cache_dtype=cache_dtype
    )
    q, *rest = case.args
    whole, whole_lse = mla_decode(q, *rest, **case.options, impl=impl)
    parts, parts_lse = mla_decode(
        parts_of(q, by_head=by_head), *rest, **case.options, impl=impl, out=case.poisoned_out()
    )
    assert torch.equal(parts, whole)
    assert torch.equal(parts_lse, whole_lse)
