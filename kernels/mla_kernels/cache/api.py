# SPDX-License-Identifier: Apache-2.0
"""The public function `write_kv_cache`."""

import functools

import torch

from mla_kernels import checks
from mla_kernels.cache.torch_impl import write_kv_cache_torch
from mla_kernels.dispatch import choose_impl
from mla_kernels.layouts import MlaDims
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import Recordings, kind, rows_kind

AVAILABLE = ("triton", "torch", "reference")

_RECORDINGS = Recordings(256)


@untraced
def write_kv_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write the cache rows of new tokens, joined and quantised, in place.

    kv_c          [T, kv_lora_rank] bf16, fp16 or fp32
    k_pe          [T, rope dim], the same dtype, RoPE already applied
    kv_cache      [num_blocks, block_size, row] in any layout of layouts.py
    slot_mapping  [N] int32 or int64, N <= T: block * block_size + offset, negative = skip. Rows of
                  kv_c past N (padding) are not read. In torch on a CPU a slot past the cache is an
                  error; the kernel writes where it points
    kv_scale      float8_e4m3fn caches only: value = e4m3 * kv_scale; a number, or fp32 with one
                  element on the device

    ValueError for arguments that do not fit, before anything is written.
    """
    key = (
        rows_kind(kv_c), rows_kind(k_pe), kind(kv_cache), rows_kind(slot_mapping), kind(kv_scale),
        impl,
    )  # fmt: skip
    operands = [kv_c, k_pe, kv_cache, slot_mapping]
    if isinstance(kv_scale, torch.Tensor):
        operands.append(kv_scale)
    replay = _RECORDINGS.find(key)
    if replay is not None:
        tokens = slot_mapping.shape[0]
        fit = kv_c.shape[0] == k_pe.shape[0] >= tokens > 0
        if fit and slot_mapping.is_contiguous():  # a single slot may have any stride
            replay(operands, (tokens, 1, 1))
            return
    checks.check_shape("kv_c", kv_c, ("T", "kv_lora_rank"))
    checks.check_dtype("kv_c", kv_c, checks.FLOAT_DTYPES)
    T = kv_c.shape[0]
    checks.check_shape("k_pe", k_pe, (T, "rope"))
    checks.check_dtype("k_pe", k_pe, (kv_c.dtype,))
    checks.check_range("kv_lora_rank (kv_c.shape[1])", kv_c.shape[1], 1, 2**15)
    checks.check_range("rope dim (k_pe.shape[1])", k_pe.shape[1], 1, 2**15)
    checks.check_kv_cache(kv_cache, MlaDims(kv_c.shape[1], k_pe.shape[1]), kv_scale)
    checks.check_distinct("kv_cache", kv_cache)
    checks.check_shape("slot_mapping", slot_mapping, ("T",))
    checks.check_dtype("slot_mapping", slot_mapping, (torch.int32, torch.int64))
    checks.check_range("length of slot_mapping", slot_mapping.shape[0], 0, T)
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe), ("slot_mapping", slot_mapping)):
        checks.check_last_contiguous(name, x)
    for name, x in (("k_pe", k_pe), ("kv_cache", kv_cache), ("slot_mapping", slot_mapping)):
        checks.check_device(name, x, kv_c.device)
    choice = choose_impl("write_kv_cache", impl, kv_c.device, available=AVAILABLE)
    if choice.impl != "triton":  # the torch form is its own definition
        write_kv_cache_torch(kv_c, k_pe, kv_cache, slot_mapping, kv_scale=kv_scale)
    elif len(slot_mapping):
        from mla_kernels.cache.triton.launcher import launch_write_kv_cache

        launch = functools.partial(launch_write_kv_cache, *operands[:4], kv_scale=kv_scale)
        _RECORDINGS.record(key, operands, launch)
