# SPDX-License-Identifier: Apache-2.0
"""Queries of sparse attention in two parts, with the strides that a layer's products leave."""

import pytest
import torch
from mla_kernels import mla_sparse_attention
from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.decode import query
from mla_kernels.decode.query import token_parts
from mla_kernels.sparse import api
from mla_kernels.sparse.hopper import launcher as hopper
from mla_kernels.triton_common.record import Recordings
from mla_kernels.triton_common.runtime import INTERPRET

NOPE, K = 128, 200
SCALE = 576**-0.5
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def parts_of(q, *, by_head):
    """The same numbers as a layer has them: out of a product over heads, or written in place by
    it; the rope part is the end of each head's query."""
    T, H, _ = q.shape
    latent = q[..., :512]
    latent = latent.transpose(0, 1).contiguous().transpose(0, 1) if by_head else latent.contiguous()
    whole = torch.full((T, H, NOPE + 64), torch.nan, dtype=q.dtype, device=q.device)
    whole[..., NOPE:] = q[..., 512:]
    return latent, whole[..., NOPE:]


def make_case(T, heads, cache="bf16", device="cpu", dtype=torch.bfloat16):
    """(q, kv_cache, slots): a third of the slots is none, and so are all of token 1."""
    g = torch.Generator().manual_seed(T)
    rows = torch.randn(8 * 64, 576, generator=g).to(dtype)
    if cache == "fp8_ds_mla":
        rows = encode_rows(rows[:, :512], rows[:, 512:], torch.uint8, None)
    q = (torch.randn(T, heads, 576, generator=g) * 0.5).to(dtype)
    slots = torch.randint(0, 8 * 64, (T, K), generator=g).int()
    slots[:, 1::3] = -1
    slots[1:2] = -1
    return q.to(device), rows.view(8, 64, -1).to(device), slots.to(device)


def attend(q, case, **options):
    first = q if isinstance(q, torch.Tensor) else q[0]
    out = first.new_full((*first.shape[:2], 512), torch.nan)
    lse = out.new_full(out.shape[:2], torch.nan, dtype=torch.float32)
    return mla_sparse_attention(q, *case, scale=SCALE, out=out, lse=lse, **options)


@pytest.mark.parametrize(
    "impl", ["torch", "reference", *(["triton"] if INTERPRET or torch.cuda.is_available() else [])]
)
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_parts_give_what_the_whole_gives(impl, by_head, deterministic, device):
    q, *case = make_case(3, 4, device=device)
    whole, parts = (
        attend(x, case, impl=impl, deterministic=deterministic)
        for x in (q, parts_of(q, by_head=by_head))
    )
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("rescale", ["pow2", "flash"])
def test_parts_of_no_tokens(impl, rescale):
    parts = torch.zeros(0, 3, 512).bfloat16(), torch.zeros(0, 3, 64).bfloat16()
    case = torch.zeros(2, 64, 576).bfloat16(), torch.zeros(0, 4, dtype=torch.int32)
    out, lse = mla_sparse_attention(parts, *case, scale=SCALE, impl=impl, rescale=rescale)
    assert out.shape == (0, 3, 512) and lse.shape == (0, 3)


@pytest.mark.parametrize("heads", [1, 6, 16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("by_head", [False, True])
def test_tma_reads_parts_where_they_lie(heads, tokens, by_head):
    q = torch.randn(tokens, heads, 576).bfloat16()
    parts = parts_of(q, by_head=by_head)
    seen = token_parts(parts, 512)
    for view, part, want in zip(seen, parts, (q[..., :512], q[..., 512:]), strict=True):
        assert torch.equal(view, want)
        assert view.data_ptr() == part.data_ptr()
        assert view.stride(2) == 1 and not any(s * 2 % 16 for s in view.stride()[:2])
    some = token_parts(tuple(view[1:] for view in seen), 512)
    assert torch.equal(torch.cat(some, -1), q[1:])


def test_parts_that_tma_cannot_read_are_copied():
    q = torch.randn(3, 16, 577).bfloat16()[..., 1:]
    latent, rope = token_parts((q[..., :512], q[..., 512:]), 512)
    assert torch.equal(torch.cat((latent, rope), -1), q)
    assert not latent.data_ptr() % 16
    assert latent.stride(1) == 576


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((torch.zeros(3, 4, 512),), "its two parts, got a tuple of 1"),
        ([torch.zeros(3, 4, 512)] * 2, "two parts, got list"),
        ((torch.zeros(3, 1, 4, 512), torch.zeros(3, 1, 4, 64)), r"q\[0\]"),
        ((torch.zeros(3, 4, 256), torch.zeros(3, 4, 64)), r"q\[0\]"),
        ((torch.zeros(3, 4, 512), torch.zeros(3, 3, 64)), r"q\[1\]"),
        ((torch.zeros(3, 4, 512), torch.zeros(2, 4, 64)), r"q\[1\]"),
        ((torch.zeros(3, 4, 512), torch.zeros(3, 4, 64).bfloat16()), r"q\[1\]"),
        ((torch.zeros(3, 4, 512), torch.zeros(3, 64, 4).mT), r"q\[1\]"),
        ((torch.zeros(3, 4, 512), torch.zeros(3, 4, 32)), "kv_cache"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    _, *case = make_case(3, 4, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        mla_sparse_attention(parts, *case, scale=SCALE)


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("impl", ["hopper", "triton"])
    @pytest.mark.parametrize("cache", ["bf16", "fp8_ds_mla"])
    @pytest.mark.parametrize("heads", [1, 6, 16, 64, 65, 128])
    @pytest.mark.parametrize("tokens", [1, 3, 300])
    @pytest.mark.parametrize("by_head", [False, True])
    def test_parts_give_the_bits_of_the_whole(self, impl, cache, heads, tokens, by_head):
        if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs sm_90")
        q, *case = make_case(tokens, heads, cache, "cuda")
        for deterministic in (False, True):
            whole, parts = (
                attend(x, case, impl=impl, deterministic=deterministic)
                for x in (q, parts_of(q, by_head=by_head))
            )
            assert torch.equal(parts[0], whole[0])
            assert torch.equal(parts[1], whole[1])

    @pytest.mark.parametrize("heads", [5, 16, 128])
    def test_kernels_read_parts_where_they_lie(self, monkeypatch, heads):
        q, *case = make_case(40, heads, "fp8_ds_mla", "cuda")
        want = attend(q, case)
        monkeypatch.setattr(query, "join_query", None)
        monkeypatch.setattr(api, "_RECORDINGS", Recordings())  # a replay passes `joined`
        for by_head in (False, True):
            assert torch.equal(attend(parts_of(q, by_head=by_head), case)[0], want[0])

    def test_parts_that_tma_cannot_read(self, monkeypatch):
        q, *case = make_case(9, 40, device="cuda")
        want = attend(q, case, impl="hopper")
        odd = q.new_zeros(9, 40, 577)
        odd[..., 1:] = q
        taken = []
        monkeypatch.setattr(api, "_RECORDINGS", Recordings())  # a replay passes the launcher
        monkeypatch.setattr(
            hopper, "token_parts", lambda *args: taken.append(token_parts(*args)) or taken[-1]
        )
        got = attend((odd[..., 1:513], odd[..., 513:]), case, impl="hopper")
        assert torch.equal(got[0], want[0])
        assert taken[0][0].stride(1) == 576
