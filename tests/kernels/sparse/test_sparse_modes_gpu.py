# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on a GPU: the deterministic mode and the largest logits."""

import pytest
import torch
from mla_kernels import mla_sparse_attention
from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.testing.cases import scales_to_powers_of_two

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

K = 2048
SCALE = 576**-0.5
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs sm_90",
)


def make_case(T, heads, cache="bf16"):
    """(q, kv_cache, slots): of every third token only some slots, of the second none."""
    g = torch.Generator("cuda").manual_seed(T)
    rows = torch.randn(128 * 64, 576, generator=g, device="cuda").bfloat16()
    if cache == "fp8_ds_mla":
        rows = encode_rows(rows[:, :512], rows[:, 512:], torch.uint8, None)
    q = torch.randn(T, heads, 576, generator=g, device="cuda").bfloat16()
    slots = torch.randint(0, 128 * 64, (T, K), generator=g, device="cuda").int()
    slots[::3, 700:] = -1
    slots[1:2] = -1
    return q, rows.view(128, 64, -1), slots


@pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("cache", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 128])
def test_bits_of_a_token_alone_and_in_any_batch(impl, cache, heads):
    q, kv, slots = make_case(300, heads, cache)
    together = mla_sparse_attention(q, kv, slots, scale=SCALE, impl=impl, deterministic=True)
    for part in (slice(0, 1), slice(7, 8), slice(40, 57), slice(150, 300)):
        some = mla_sparse_attention(
            q[part], kv, slots[part], scale=SCALE, impl=impl, deterministic=True
        )
        for a, b in zip(some, together, strict=True):
            assert torch.equal(a, b[part])
    assert not together[0][1].any() and bool((together[1][1] == -torch.inf).all())


@pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("cache", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [8, 32, 128])
@pytest.mark.parametrize("T", [1, 9, 40, 300])
def test_largest_logits(impl, cache, heads, T):
    """In one range of slots and in several, where the largest is that of all of them. The first
    token has two slots, in the first range and in the last: of some heads both are negative. Scales
    are powers of two: the reference rounds values to bf16, the Hopper kernel does not."""
    q, kv, slots = make_case(T, heads, cache)
    if cache == "fp8_ds_mla":
        scales_to_powers_of_two(kv)
    slots[0, 1:-1] = -1
    slots[0, -1] = 77
    got = torch.full((T, heads), torch.nan, device="cuda")
    mla_sparse_attention(q, kv, slots, scale=SCALE, max_logits=got, impl=impl)
    some = sorted({0, T // 2, T - 1, min(1, T - 1)})
    want = torch.empty(len(some), heads, device="cuda")
    mla_sparse_attention_reference(
        q[some], kv, slots[some], scale=SCALE, kv_lora_rank=512, kv_scale=None,
        lengths=None, sink=None, max_logits=want,
    )  # fmt: skip
    torch.testing.assert_close(got[some], want, atol=2e-5, rtol=2e-5)
    assert not got.isnan().any()
    assert heads < 32 or bool((want[0] < 0).any())
