# SPDX-License-Identifier: Apache-2.0
"""Launching the fp8-query Hopper kernel. Arguments are checked by its callers."""

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.hopper.fp8_query import operands
from mla_kernels.decode.hopper.fp8_query.kernel import hopper_fp8_query_kernel
from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.decode.query import joined
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.triton_common.formats import scale_argument
from mla_kernels.triton_common.launch import launch

CONFIG = {"SLOTS": 4, "SLOTS_P": 2, "VALUE_REGS": 208}


def launch_fp8_query(call: DecodeCall) -> None:
    """One CTA a tile of 64 query rows and part of the plan; split requests are left to the merge.

    q [B, s_q, H, 576] and kv_cache [num_blocks, 64, 576] are contiguous e4m3, out is contiguous
    bf16 that starts at a multiple of 4 bytes. A scale that is a tensor is read on the device.
    """
    queries = joined(call.q).flatten(1, 2).view(torch.bfloat16)
    units = call.kv_cache.flatten(0, 1).view(torch.bfloat16)
    from_tensor = TensorDescriptor.from_tensor
    launch(
        hopper_fp8_query_kernel,
        (triton.cdiv(call.rows, BLOCK.value), call.plan.parts.shape[0]),
        from_tensor(queries, [1, 64, 256], operands.QUERY_LATENT.value),
        from_tensor(queries, [1, 64, 32], operands.QUERY_ROPE.value),
        from_tensor(units, [64, 128], operands.LATENT_UNITS.value),
        from_tensor(units, [64, 32], operands.ROPE_UNITS.value),
        scale_argument(call.q_scale),
        scale_argument(call.kv_scale),
        *call.tables(),
        *call.results(),
        scale_to_log2(call.scale),
        *call.sizes(),
        **CONFIG,
        **call.modes(),
        LOAD_Q_SCALE=isinstance(call.q_scale, torch.Tensor),
        LOAD_SCALE=isinstance(call.kv_scale, torch.Tensor),
        num_warps=4,
    )
