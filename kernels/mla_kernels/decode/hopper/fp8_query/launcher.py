# SPDX-License-Identifier: Apache-2.0
"""Launching the fp8-query Hopper kernel. Arguments are checked by its callers."""

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.decode.hopper.fp8_query import operands
from mla_kernels.decode.hopper.fp8_query.kernel import hopper_fp8_query_kernel
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.plan import DevicePlan
from mla_kernels.triton_common.launch import launch

CONFIG = {"SLOTS": 4, "SLOTS_P": 2, "VALUE_REGS": 208}


def launch_fp8_query(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DevicePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    q_scale: float | torch.Tensor | None,
    kv_scale: float | torch.Tensor | None,
    causal: bool,
) -> None:
    """One CTA a tile of 64 query rows and part of the plan; split requests are left to the merge.

    q [B, s_q, H, 576] and kv_cache [num_blocks, 64, 576] are contiguous e4m3, out is contiguous
    bf16 that starts at a multiple of 4 bytes. A scale that is a tensor is read on the device.
    """
    B, s_q, H, width = q.shape
    rows = s_q * H
    queries = q.view(B, rows, width).view(torch.bfloat16)
    units = kv_cache.view(-1, width).view(torch.bfloat16)
    from_tensor = TensorDescriptor.from_tensor
    launch(
        hopper_fp8_query_kernel,
        (triton.cdiv(rows, BLOCK.value), plan.parts.shape[0]),
        from_tensor(queries, [1, 64, 256], operands.QUERY_LATENT.value),
        from_tensor(queries, [1, 64, 32], operands.QUERY_ROPE.value),
        from_tensor(units, [64, 128], operands.LATENT_UNITS.value),
        from_tensor(units, [64, 32], operands.ROPE_UNITS.value),
        1.0 if q_scale is None else q_scale,
        1.0 if kv_scale is None else kv_scale,
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
        LOAD_Q_SCALE=isinstance(q_scale, torch.Tensor),
        LOAD_SCALE=isinstance(kv_scale, torch.Tensor),
        CAUSAL=causal and s_q > 1,
        CHUNKED=plan.chunk > 0,
        num_warps=4,
    )
