# SPDX-License-Identifier: Apache-2.0
"""Launching the rotate-and-append kernel. Arguments are checked by `mla_kernels.layer.api`."""

import torch
import triton

from mla_kernels.arch import device_arch
from mla_kernels.cache.triton.launcher import row_constants
from mla_kernels.layer.buffers import MlaLayerBuffers
from mla_kernels.layer.config import MlaLayerConfig
from mla_kernels.layer.triton.kernel import rotate_and_append_kernel
from mla_kernels.triton_common.formats import byte_view, cache_format, scale_argument
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.runtime import INTERPRET

HEADS = 16  # a program; 16 x 64 elements are 8 a lane
NUM_WARPS = 4


def launch_rotate_and_append(
    config: MlaLayerConfig,
    buffers: MlaLayerBuffers,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
) -> None:
    """Fill buffers.q[..., kv_lora_rank:] with the rotated query and append the cache rows.

    Request i is at position seq_lens[i] - 1; one of length 0 is padding and writes no row.
    """
    B, c = seq_lens.shape[0], config
    launch(
        rotate_and_append_kernel,
        (B, 1 + triton.cdiv(c.num_heads, HEADS)),
        buffers.q_up,
        buffers.q,
        buffers.down,
        table,
        byte_view(kv_cache),
        block_table,
        seq_lens,
        scale_argument(kv_scale),
        c.num_heads,
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        HEADS=HEADS,
        NOPE=c.nope_dim,
        Q_LORA=c.q_lora_rank,
        PAGE=kv_cache.shape[1],
        LOAD_SCALE=isinstance(kv_scale, torch.Tensor),
        **row_constants(c.cache, cache_format(kv_cache.dtype)),
        HW_FP8=not INTERPRET and device_arch(kv_cache.device).e4m3_convert,
        num_warps=NUM_WARPS,
    )
