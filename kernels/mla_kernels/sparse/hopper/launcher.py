# SPDX-License-Identifier: Apache-2.0
"""Launching the Hopper sparse kernel. Arguments are checked by `mla_kernels.sparse.api`."""

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.arch import device_arch
from mla_kernels.decode.hopper.layouts import BLOCK, HALF, QUERY_TILE, ROPE
from mla_kernels.decode.query import Query, token_parts
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.sparse.hopper.kernel import hopper_sparse_kernel
from mla_kernels.sparse.hopper.support import FORMATS, choose_split
from mla_kernels.sparse.triton.results import launch_merge
from mla_kernels.sparse.triton.tiles import (
    FIXED_WORKSPACE,
    Split,
    fixed_split,
    partial_bytes,
    tokens_at_once,
)
from mla_kernels.triton_common.launch import launch

# Tiles of each ring: 210 KB of shared memory, 220 with codes. The query tile comes in the last slot
# of each. 160 registers as in decode/hopper/launcher.py.
CONFIGS = {
    "bf16": {"SLOTS_A": 3, "SLOTS_B": 2, "SLOTS_R": 2, "SLOTS_P": 2, "WORKER_REGS": 160},
    "fp8_ds_mla": {"SLOTS_A": 2, "SLOTS_B": 2, "SLOTS_R": 3, "SLOTS_P": 2, "WORKER_REGS": 160},
}


def mla_sparse_attention_hopper(
    q: Query,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    split: Split | None = None,
) -> None:
    """`mla_sparse_attention` into contiguous out and lse. Allocates nothing with a workspace, but
    for parts of q with strides that TMA does not take."""
    T, H = lse.shape
    K = slots.shape[1]
    if T == 0:
        return
    latent, rope = token_parts(q, out.shape[2])
    if split is None and deterministic:
        split = fixed_split(K)
        room = FIXED_WORKSPACE if workspace is None else workspace.numel()
        turn = tokens_at_once(H, split.splits, out.shape[2], room) if split.splits > 1 else T
        if 0 < turn < T:
            for part in (slice(t, t + turn) for t in range(0, T, turn)):
                mla_sparse_attention_hopper(
                    (latent[part], rope[part]),
                    kv_cache,
                    slots[part],
                    scale=scale,
                    lengths=None if lengths is None else lengths[part],
                    sink=sink,
                    out=out[part],
                    lse=lse[part],
                    workspace=workspace,
                    split=split,
                )
            return
    split = split or choose_split(T, H, K, lse.device)
    kv_format = FORMATS[kv_cache.dtype]
    acc, sums = lse, lse
    if split.splits > 1:
        needed = partial_bytes(T, H, split.splits, out.shape[2])
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=lse.device)
        if workspace.numel() < needed:
            raise ValueError(f"Expected workspace of {needed} bytes, got {workspace.numel()}")
        floats = workspace[:needed].view(torch.float32)
        acc, sums = floats.split([T * split.splits * H * n for n in (out.shape[2], 2)])
    scale_view, rope_view = kv_cache, kv_cache
    if kv_format == "fp8_ds_mla":
        scale_view, rope_view = kv_cache.view(torch.float32), kv_cache.view(torch.bfloat16)
    block = BLOCK.value
    launch(
        hopper_sparse_kernel,
        (T * triton.cdiv(H, block), split.splits),
        TensorDescriptor.from_tensor(latent, [1, block, HALF.value], QUERY_TILE.value),
        TensorDescriptor.from_tensor(rope, [1, block, ROPE.value], QUERY_TILE.value),
        kv_cache,
        scale_view,
        rope_view,
        slots,
        slots if lengths is None else lengths,
        lse if sink is None else sink,
        out,
        lse,
        acc,
        sums,
        scale_to_log2(scale),
        kv_cache.stride(0),
        slots.stride(0),
        kv_cache.shape[0] * kv_cache.shape[1],
        K,
        split.span,
        H,
        **CONFIGS[kv_format],
        FORMAT=kv_format,
        PAGE=kv_cache.shape[1],
        ROW=kv_cache.stride(1),
        HAS_LENGTHS=lengths is not None,
        HAS_SINK=sink is not None,
        SPLIT=split.splits > 1,
        num_warps=4,
    )
    if split.splits > 1:
        launch_merge(acc, sums, sink, out, lse, split.splits, device_arch(lse.device))
