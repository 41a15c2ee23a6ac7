# SPDX-License-Identifier: Apache-2.0
"""The fused cache write kernel, byte for byte against the layouts spelled out in torch."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from mla_kernels import write_kv_cache
from mla_kernels.cache.triton.launcher import launch_write_kv_cache
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims

DIMS = [MlaDims(), MlaDims(256, 32)]
SOURCES = [torch.bfloat16, torch.float16, torch.float32]
PAGE = 16
JUNK = 0xA5


def make_rows(tokens, dims, dtype, device, seed=0):
    """Rows whose groups of 128 span 12 orders of magnitude, with a zero group and outliers."""
    g = torch.Generator().manual_seed(seed)
    kv_c = torch.randn(tokens, dims.kv_lora_rank, generator=g)
    group = torch.arange(dims.kv_lora_rank) // 128
    kv_c *= 10.0 ** torch.linspace(-6, 3, tokens)[:, None] * (1.0 + 7.0 * group)
    kv_c[tokens // 2, :128] = 0.0
    kv_c[tokens - 1, 5] = 6e4
    k_pe = torch.randn(tokens, dims.rope_dim, generator=g) * 3
    # Slices of wider tensors: rows are not contiguous in a model either.
    wide = torch.cat([kv_c, k_pe, torch.full((tokens, 7), torch.nan)], 1).to(device, dtype)
    return wide[:, : dims.kv_lora_rank], wide[:, dims.kv_lora_rank : dims.head_dim]


def slots_for(tokens, blocks, device, dtype=torch.int64):
    slots = torch.randperm(blocks * PAGE, generator=torch.Generator().manual_seed(1))[:tokens]
    slots[slots == 0] = slots[0]
    slots[0] = 0  # the first row is no padding
    slots[[1, tokens - 2]] = -1
    return slots.to(device, dtype)


def fp8_bytes(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def row_bytes(kv_c, k_pe, dtype, kv_scale):
    """[T, bytes] uint8: what the layouts in layouts.py say each row must hold.

    Computed on the CPU: on a GPU torch divides by a number through its rounded reciprocal.
    """
    kv_c, k_pe = kv_c.cpu(), k_pe.cpu()
    joined = torch.cat([kv_c, k_pe], 1).float()
    if dtype == torch.float8_e4m3fn:
        return fp8_bytes(joined / torch.tensor(kv_scale, dtype=torch.float32))
    if dtype != torch.uint8:
        return joined.to(dtype).view(torch.uint8)
    groups = kv_c.float().unflatten(1, (-1, 128))
    scales = (groups.abs().amax(-1) / 448).clamp(min=2.0**-126)
    latent = fp8_bytes(groups / scales[..., None]).flatten(1)
    rope = k_pe.float().to(torch.bfloat16)
    return torch.cat([latent, scales.view(torch.uint8), rope.view(torch.uint8)], 1)


def empty_cache(blocks, dims, dtype, device):
    width = Fp8DsMlaLayout(dims).row_bytes if dtype == torch.uint8 else dims.head_dim
    cache = torch.empty(blocks, PAGE, width, dtype=dtype, device=device)
    cache.view(torch.uint8).fill_(JUNK)
    return cache


def expected_cache(cache, rows, slots):
    want = cache.view(torch.uint8).clone().flatten(0, 1)
    keep = slots >= 0
    want[slots[keep].long()] = rows.to(want.device)[keep]
    return want.view(cache.view(torch.uint8).shape)


CACHES = [
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, None),
    (torch.float8_e4m3fn, 0.37),
    (torch.uint8, None),
]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("dtype", "kv_scale"), CACHES)
def test_every_byte_of_the_cache_is_as_documented(device, dims, source, dtype, kv_scale):
    kv_c, k_pe = make_rows(24, dims, source, device)
    cache = empty_cache(4, dims, dtype, device)
    slots = slots_for(24, 4, device)
    want = expected_cache(cache, row_bytes(kv_c, k_pe, dtype, kv_scale), slots)
    launch_write_kv_cache(kv_c, k_pe, cache, slots, kv_scale=kv_scale)
    assert torch.equal(cache.view(torch.uint8), want)


@pytest.mark.parametrize(("dtype", "kv_scale"), CACHES)
def test_both_implementations_write_the_same_bytes(device, dtype, kv_scale):
    kv_c, k_pe = make_rows(24, DIMS[0], torch.bfloat16, device, seed=2)
    slots = slots_for(20, 4, device)  # 4 rows more than slots: padding of a CUDA graph
    caches = [empty_cache(4, DIMS[0], dtype, device) for _ in range(2)]
    for cache, impl in zip(caches, ("triton", "torch"), strict=True):
        write_kv_cache(kv_c, k_pe, cache, slots, kv_scale=kv_scale, impl=impl)
    assert torch.equal(*(cache.view(torch.uint8) for cache in caches))


def test_scale_may_live_on_the_device_and_slots_may_be_int32(device):
    kv_c, k_pe = make_rows(8, DIMS[0], torch.bfloat16, device)
    caches = [empty_cache(2, DIMS[0], torch.float8_e4m3fn, device) for _ in range(2)]
    slots = slots_for(8, 2, device)
    launch_write_kv_cache(kv_c, k_pe, caches[0], slots, kv_scale=0.11)
    scale = torch.full((1,), 0.11, device=device)
    launch_write_kv_cache(kv_c, k_pe, caches[1], slots.int(), kv_scale=scale)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("scale", [1, 2, Fraction(1, 2), np.float32(0.5), torch.full((1, 1, 1), 2)])
def test_scales_of_other_types_and_shapes(device, impl, scale):
    """An int is no float to Triton; the kernel would not compile."""
    kv_c, k_pe = make_rows(8, DIMS[0], torch.bfloat16, device)
    slots = slots_for(8, 2, device)
    cache = empty_cache(2, DIMS[0], torch.float8_e4m3fn, device)
    want = expected_cache(cache, row_bytes(kv_c, k_pe, cache.dtype, float(scale)), slots)
    given = scale.float().to(device) if isinstance(scale, torch.Tensor) else scale
    write_kv_cache(kv_c, k_pe, cache, slots, kv_scale=given, impl=impl)
    assert torch.equal(cache.view(torch.uint8), want)


def test_ranks_that_are_no_power_of_two(device):
    dims = MlaDims(384, 48)
    for dtype in (torch.bfloat16, torch.uint8):
        kv_c, k_pe = make_rows(8, dims, torch.bfloat16, device)
        cache = empty_cache(2, dims, dtype, device)
        slots = slots_for(8, 2, device)
        want = expected_cache(cache, row_bytes(kv_c, k_pe, dtype, None), slots)
        launch_write_kv_cache(kv_c, k_pe, cache, slots)
        assert torch.equal(cache.view(torch.uint8), want)


def test_pages_may_lie_apart(device):
    """vLLM interleaves layers: pages of one layer are not adjacent."""
    kv_c, k_pe = make_rows(8, DIMS[0], torch.bfloat16, device)
    both = empty_cache(8, DIMS[0], torch.bfloat16, device).view(4, 2, PAGE, 576)
    layer, other = both[:, 1], both[:, 0].clone()
    slots = slots_for(8, 4, device)
    rows = row_bytes(kv_c, k_pe, torch.bfloat16, None)
    want = expected_cache(layer.contiguous(), rows, slots)
    launch_write_kv_cache(kv_c, k_pe, layer, slots)
    assert torch.equal(layer.contiguous().view(torch.uint8), want)
    assert torch.equal(both[:, 0].view(torch.uint8), other.view(torch.uint8))


def test_addresses_beyond_2_31_elements(device):
    """A view of few bytes whose last page starts past 2^32: only its row may be touched."""
    if device == "cpu":
        pytest.skip("needs 9 GB; the GPU run covers it")
    kv_c, k_pe = make_rows(4, DIMS[0], torch.bfloat16, device)
    cache = torch.zeros(2**32 // (64 * 576) + 2, 64, 576, dtype=torch.bfloat16, device=device)
    last = cache.shape[0] * 64 - 1
    slots = torch.tensor([last, last - 1, 0, -1], device=device)
    launch_write_kv_cache(kv_c, k_pe, cache, slots)
    rows = torch.cat([kv_c, k_pe], 1)
    assert torch.equal(cache[-1, -1], rows[0])
    assert torch.equal(cache[-1, -2], rows[1])
    assert torch.equal(cache[0, 0], rows[2])
    assert cache.count_nonzero() == rows[:3].count_nonzero()


def test_no_tokens_is_no_work(device):
    kv_c, k_pe = make_rows(4, DIMS[0], torch.bfloat16, device)
    cache = empty_cache(1, DIMS[0], torch.bfloat16, device)
    launch_write_kv_cache(kv_c[:0], k_pe[:0], cache, torch.zeros(0, dtype=torch.int64))
    assert (cache.view(torch.uint8) == JUNK).all()


def test_both_implementations_write_the_same_bytes_beside_nan(device):
    """A NaN is left out of its group's scale; the sign of a NaN is nobody's."""
    kv_c, k_pe = make_rows(8, DIMS[0], torch.bfloat16, device)
    kv_c[::2, ::100] = torch.nan
    slots = slots_for(8, 2, device)
    caches = [empty_cache(2, DIMS[0], torch.uint8, device) for _ in range(2)]
    launch_write_kv_cache(kv_c, k_pe, caches[0], slots)
    write_kv_cache(kv_c, k_pe, caches[1], slots, impl="torch")
    nan = [cache & 0x7F == 0x7F for cache in caches]
    assert torch.equal(nan[0], nan[1]) and nan[0].any()
    assert torch.equal(
        *(cache.masked_fill(is_nan, 0) for cache, is_nan in zip(caches, nan, strict=True))
    )
