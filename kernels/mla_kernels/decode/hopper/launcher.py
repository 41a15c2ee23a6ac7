# SPDX-License-Identifier: Apache-2.0
"""Launching the Hopper kernel. Arguments are checked by `mla_kernels.decode.api`."""

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.arch import device_arch
from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.kernel import hopper_decode_kernel
from mla_kernels.decode.plan import MlaDecodePlan
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.merge import launch_merge
from mla_kernels.decode.triton.plan import DevicePlan, build_plan
from mla_kernels.layouts import MlaDims

# Tiles of each ring: 209 KB of shared memory. 160 is the only register share of the two value
# warpgroups that compiles without spills or serialised wgmma.
CONFIG = {"SLOTS_A": 3, "SLOTS_B": 2, "SLOTS_R": 2, "SLOTS_P": 2, "WORKER_REGS": 160}


def mla_decode_hopper(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    plan: MlaDecodePlan | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    deterministic: bool,
) -> None:
    """`mla_decode` into contiguous out and lse. Allocates nothing when given a plan."""
    _, s_q, H, _ = q.shape
    device_plan = None if plan is None else plan.device_plan
    if device_plan is None:
        device_plan = build_plan(
            seq_lens,
            num_heads=H,
            s_q=s_q,
            deterministic=deterministic,
            max_seq_len=block_table.shape[1] * kv_cache.shape[1],
            num_parts=parts_for(s_q * H, q.device),
        )
    launch_decode(
        q, kv_cache, block_table, seq_lens, device_plan, out, lse, scale=scale, causal=causal
    )
    launch_merge(device_plan, out, lse, device_arch(q.device))


def launch_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DevicePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> None:
    """One CTA a tile of 64 query rows and part of the plan; split requests are left to the merge.

    q [B, s_q, H, 576], kv_cache [num_blocks, 64, 576] and out are contiguous bf16.
    """
    _, s_q, H, Dk = q.shape
    rows = s_q * H
    block, half, rope = layouts.BLOCK.value, layouts.HALF.value, layouts.ROPE.value
    grid = (triton.cdiv(rows, block), plan.parts.shape[0])
    q_rows, kv_rows = q.view(-1, Dk), kv_cache.view(-1, Dk)
    tile = layouts.TILE.value
    hopper_decode_kernel[grid](
        TensorDescriptor.from_tensor(q_rows, [block, half], tile),
        TensorDescriptor.from_tensor(q_rows, [block, rope], tile),
        TensorDescriptor.from_tensor(kv_rows, [block, half], tile),
        TensorDescriptor.from_tensor(kv_rows, [block, rope], tile),
        block_table,
        seq_lens,
        plan.parts,
        plan.requests,
        out,
        lse,
        plan.acc,
        plan.sums,
        scale_to_log2(scale),
        block_table.stride(0),
        rows,
        H,
        s_q,
        **CONFIG,
        CAUSAL=causal and s_q > 1,
        CHUNKED=plan.chunk > 0,
        num_warps=4,
    )


def refusal(
    dims: MlaDims, dtype: torch.dtype, kv_cache_dtype: torch.dtype, block_size: int, rescale: str
) -> str | None:
    """Why this kernel cannot serve such a batch; None if it can."""
    if dims != MlaDims(512, 64):
        return f"it needs kv_lora_rank 512 and rope 64, got {dims.kv_lora_rank} and {dims.rope_dim}"
    if dtype != torch.bfloat16 or kv_cache_dtype != torch.bfloat16:
        return f"it needs bf16 q and cache, got {dtype} and {kv_cache_dtype}"
    if block_size != layouts.BLOCK.value:
        return f"it needs blocks of {layouts.BLOCK.value} tokens, got {block_size}"
    if rescale != "pow2":
        return f"it rescales by pow2 only, got {rescale!r}"
    return None


def parts_for(rows: int, device: torch.device) -> int:
    """Parts for which parts x row tiles fill the device, one CTA an SM."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, sms // triton.cdiv(rows, layouts.BLOCK.value))
