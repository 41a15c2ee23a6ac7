# SPDX-License-Identifier: Apache-2.0
"""Launching the Hopper sparse kernel. Arguments are checked by `mla_kernels.sparse.api`."""

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels import checks
from mla_kernels.arch import device_arch
from mla_kernels.decode.hopper.layouts import BLOCK, HALF, QUERY_TILE, ROPE
from mla_kernels.decode.query import token_parts
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.sparse.call import SparseCall
from mla_kernels.sparse.hopper.kernel import hopper_sparse_kernel
from mla_kernels.sparse.hopper.support import FORMATS, choose_grid, choose_turns
from mla_kernels.sparse.triton.results import launch_merge
from mla_kernels.sparse.triton.tiles import Split, fixed_split
from mla_kernels.triton_common.formats import cache_views
from mla_kernels.triton_common.launch import launch

# Tiles of each ring: up to 214 KB of shared memory, 226 with codes. The query tile comes in the
# last slot of each, with bf16 and one range as an item like others. 160 registers as in
# decode/hopper/bf16/launcher.py.
CONFIGS = {
    "bf16": {"SLOTS_A": 3, "SLOTS_B": 2, "SLOTS_R": 2, "SLOTS_P": 2, "WORKER_REGS": 160},
    "fp8_ds_mla": {"SLOTS_A": 2, "SLOTS_B": 2, "SLOTS_R": 3, "SLOTS_P": 2, "WORKER_REGS": 160},
}


def mla_sparse_attention_hopper(call: SparseCall, *, deterministic: bool = False) -> None:
    """`mla_sparse_attention`. Allocates nothing with a workspace, but for parts of q with strides
    that TMA does not take."""
    T, H, K = call.shape
    checks.check_rows_near(call.kv_cache)
    if T == 0:
        return
    if not deterministic:
        for part, split in call.parts(choose_turns(T, H, K, call.lse.device)):
            launch_sparse(part, split)
        return
    split = fixed_split(K)
    for part in call.turns(split):
        launch_sparse(part, split)


def launch_sparse(call: SparseCall, split: Split) -> None:
    """The kernel, and the merge of several ranges."""
    T, H, K = call.shape
    kv_cache, out, lse = call.kv_cache, call.out, call.lse
    kv_format, block = FORMATS[kv_cache.dtype], BLOCK.value
    latent, rope = token_parts(call.q, out.shape[2])
    acc, sums = call.partials(split)
    launch(
        hopper_sparse_kernel,
        choose_grid(T, H, K, kv_format, split, lse.device),
        TensorDescriptor.from_tensor(latent, [1, block, HALF.value], QUERY_TILE.value),
        TensorDescriptor.from_tensor(rope, [1, block, ROPE.value], QUERY_TILE.value),
        *cache_views(kv_cache),
        *call.inputs(),
        out,
        lse,
        call.largest(split),
        acc,
        sums,
        scale_to_log2(call.scale),
        kv_cache.stride(0),
        call.slots.stride(0),
        kv_cache.shape[0] * kv_cache.shape[1],
        K,
        split.span,
        split.splits,
        H,
        T,
        **CONFIGS[kv_format],
        **call.modes(split),
        SHARES=split.shares,
        MAX_LOGITS=call.max_logits is not None,
        FORMAT=kv_format,
        PAGE=kv_cache.shape[1],
        ROW=kv_cache.stride(1),
        num_warps=4,
    )
    if split.splits > 1:
        launch_merge(acc, sums, call.sink, out, lse, split, K, device_arch(lse.device))
