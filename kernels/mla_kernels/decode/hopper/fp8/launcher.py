# SPDX-License-Identifier: Apache-2.0
"""Launching the fp8 Hopper kernel. Arguments are checked by `mla_kernels.decode.api`."""

from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.hopper.fp8.kernel import hopper_fp8_kernel
from mla_kernels.decode.hopper.fp8.operands import rows_of
from mla_kernels.decode.hopper.fp8.query import query_box
from mla_kernels.decode.hopper.layouts import QUERY_TILE, SCALES
from mla_kernels.decode.hopper.support import FORMATS
from mla_kernels.decode.query import row_parts
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.triton_common.formats import scale_argument
from mla_kernels.triton_common.launch import launch


def launch_fp8(call: DecodeCall, config: dict[str, Any]) -> None:
    """One CTA a tile of config["N"] query rows and part of the plan; split requests are left to the
    merge. out is contiguous bf16, kv_cache [num_blocks, 64, width] is contiguous."""
    kv_cache = call.kv_cache
    tile = config["N"]
    latent, rope = row_parts(call.q, call.out.shape[-1])
    units = kv_cache.view(-1, kv_cache.shape[-1]).view(torch.bfloat16)
    kv_format = FORMATS[kv_cache.dtype]
    rope_width = 64 if kv_format == "fp8_ds_mla" else 32
    kv_desc = TensorDescriptor.from_tensor(units, [64, 128], rows_of(128))
    scale_desc = kv_desc
    if kv_format == "fp8_ds_mla":
        scale_desc = TensorDescriptor.from_tensor(units.view(torch.float32), [64, 4], SCALES.value)
    launch(
        hopper_fp8_kernel,
        (triton.cdiv(call.rows, tile), call.plan.parts.shape[0]),
        TensorDescriptor.from_tensor(latent, [1, tile, query_box(tile)], QUERY_TILE.value),
        TensorDescriptor.from_tensor(rope, [1, tile, 64], QUERY_TILE.value),
        kv_desc,
        TensorDescriptor.from_tensor(units, [64, rope_width], rows_of(rope_width)),
        scale_desc,
        scale_argument(call.kv_scale),
        *call.tables(),
        *call.results(),
        scale_to_log2(call.scale),
        *call.sizes(),
        **config,
        **call.modes(),
        LOAD_SCALE=isinstance(call.kv_scale, torch.Tensor),
        num_warps=4,
    )
