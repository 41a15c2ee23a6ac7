# SPDX-License-Identifier: Apache-2.0
"""The fused rotation and cache append of `mla_layer` against its torch form."""

import math

import pytest
import torch
from mla_kernels.layer import MlaLayerBuffers, MlaLayerConfig, rope_table
from mla_kernels.layer.rope import rotate
from mla_kernels.layer.torch_impl import rotate_and_append_torch
from mla_kernels.layer.triton.launcher import launch_rotate_and_append

PAGE = 16
CONFIGS = [
    MlaLayerConfig(dim=64, q_lora_rank=48, num_heads=16, nope_dim=24, v_dim=16),
    MlaLayerConfig(
        dim=64, q_lora_rank=40, kv_lora_rank=256, num_heads=21, nope_dim=8, rope_dim=32, v_dim=8
    ),
    MlaLayerConfig(
        dim=64, q_lora_rank=40, kv_lora_rank=384, num_heads=1, nope_dim=8, rope_dim=24, v_dim=8
    ),
]
CACHES = [
    (torch.bfloat16, None),
    (torch.float32, None),
    (torch.float8_e4m3fn, 0.03),
    (torch.uint8, None),
]


def make_case(config, cache_dtype, dtype, device):
    """Lengths at page ends, 0 and a full table; shuffled pages; junk everywhere else."""
    torch.manual_seed(0)
    lens = torch.tensor([1, 16, 0, 17, 64], dtype=torch.int32)
    B, blocks = len(lens), 4
    width = config.kv_lora_rank + config.rope_dim
    if cache_dtype == torch.uint8:
        width = config.kv_lora_rank // 128 * 4 + config.kv_lora_rank + 2 * config.rope_dim
    cache = torch.empty(B * blocks + 1, PAGE, width, dtype=cache_dtype)
    cache.view(torch.uint8).fill_(0xA5)
    table = torch.randperm(B * blocks + 1)[: B * blocks].view(B, blocks).int()
    table[2] = 10**9  # never read: its request is empty
    buffers = MlaLayerBuffers.allocate(config, B, dtype=dtype, device=device)
    buffers.q_up.normal_()
    buffers.down.normal_()
    buffers.q.fill_(7.0)
    angles = rope_table(config, 64, device)
    return buffers, cache.to(device), table.to(device), lens.to(device), angles


@pytest.mark.parametrize("config", CONFIGS, ids=["512+64", "256+32", "384+24"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("cache_dtype", "kv_scale"), CACHES)
def test_fused_kernel_equals_torch(device, config, dtype, cache_dtype, kv_scale):
    buffers, cache, *rest = make_case(config, cache_dtype, dtype, device)
    want_q, want_cache = buffers.q.clone(), cache.clone()
    launch_rotate_and_append(config, buffers, cache, *rest, kv_scale=kv_scale)
    got_q = buffers.q.clone()
    buffers.q.copy_(want_q)
    rotate_and_append_torch(config, buffers, want_cache, *rest, kv_scale=kv_scale)
    if device == "cpu":
        assert torch.equal(got_q, buffers.q)
        assert torch.equal(cache.view(torch.uint8), want_cache.view(torch.uint8))
    else:  # a GPU contracts to fma: one rounding less
        torch.testing.assert_close(got_q, buffers.q, rtol=2**-7, atol=1e-5)
        changed = cache.view(torch.uint8) != want_cache.view(torch.uint8)
        assert changed.float().mean() < 1e-3


@pytest.mark.parametrize("scales", [(0.03,), (2.0, 2)])  # one whose quotients are rounded, an int
def test_device_scale_equals_host_scale(scales, device):
    caches = []
    for scale in (*scales, torch.full((1,), scales[0], device=device)):
        case = make_case(CONFIGS[1], torch.float8_e4m3fn, torch.bfloat16, device)
        launch_rotate_and_append(CONFIGS[1], *case, kv_scale=scale)
        caches.append(case[1].view(torch.uint8))
    assert all(torch.equal(cache, caches[0]) for cache in caches)


def test_angles_far_along():
    """Frequencies in fp32 are off by 1e-2 here."""
    config, position = CONFIGS[0], 131071
    row = rope_table(config, position + 1)[position]
    angles = [position * 10000.0 ** (-2 * i / config.rope_dim) for i in range(32)]
    want = [f(angle) for f in (math.cos, math.sin) for angle in angles]
    torch.testing.assert_close(row, torch.tensor(want), rtol=0, atol=1e-6)


def test_rotation_keeps_lengths_and_relative_angles():
    """q at position m times k at position n depends on m - n only, and position 0 turns nothing."""
    config = CONFIGS[0]
    table = rope_table(config, 131072)
    q, k = torch.randn(2, config.rope_dim, dtype=torch.float64).float()
    torch.testing.assert_close(rotate(q, table[0]), q)
    near = rotate(q, table[17]) @ rotate(k, table[5])
    far = rotate(q, table[131071]) @ rotate(k, table[131059])
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate(q, table[99]).norm(), q.norm())
    # Rotate-half: element i is paired with i + rope_dim / 2, not with its neighbour.
    one = torch.zeros(config.rope_dim)
    one[0] = 1.0
    assert rotate(one, table[1]).nonzero().flatten().tolist() == [0, config.rope_dim // 2]
