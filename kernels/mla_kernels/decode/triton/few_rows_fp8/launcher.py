# SPDX-License-Identifier: Apache-2.0
"""Launching the few-rows kernel with a warp that loads. Arguments are checked by
`mla_kernels.decode.api`."""

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_kernels.arch import Arch
from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.hopper import layouts
from mla_kernels.decode.hopper.fp8.operands import rows_of
from mla_kernels.decode.query import joined
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.decode.triton.few_rows.tiles import FewRowsTile
from mla_kernels.decode.triton.few_rows_fp8.kernel import few_rows_fp8_kernel
from mla_kernels.triton_common.formats import scale_argument
from mla_kernels.triton_common.launch import launch

# By rows of a program, one of which fills an SM. 16: twenty warps have 96 registers a thread at
# launch; of those of the loader's four all but 24 go to the others: 112. 32: twelve, 240. SLOTS
# are a team's places in the ring.
CONFIGS = {
    16: {"BM": 16, "SLOTS": 2, "TEAMS": 2, "TEAM_REGS": 112, "LOADER_REGS": 24},
    32: {"BM": 32, "SLOTS": 4, "TEAMS": 1, "TEAM_REGS": 0, "LOADER_REGS": 24},
}
OPTIONS = {16: {"num_warps": 8, "maxnreg": 96}, 32: {"num_warps": 8, "maxnreg": 168}}


def takes_few_rows_fp8(kv_cache: torch.Tensor, tile: FewRowsTile, arch: Arch) -> bool:
    """Whether this kernel serves a batch that the few-rows kernel would take with this tile."""
    return (
        arch.sm == 90
        and tile.rows in CONFIGS
        and kv_cache.dtype == torch.float8_e4m3fn
        and kv_cache.shape[1:] == (layouts.BLOCK.value, 576)
        and kv_cache.is_contiguous()
        and kv_cache.data_ptr() % 16 == 0
    )


def launch_few_rows_fp8(call: DecodeCall, tile: FewRowsTile) -> None:
    """One program a tile of query rows and part of the plan; splits are left to the merge."""
    q, block = joined(call.q), layouts.BLOCK.value
    units = call.kv_cache.view(-1, call.kv_cache.shape[-1]).view(torch.bfloat16)
    launch(
        few_rows_fp8_kernel,
        (triton.cdiv(call.rows, tile.rows), call.plan.parts.shape[0]),
        q,
        TensorDescriptor.from_tensor(units, [block, 256], rows_of(256)),
        TensorDescriptor.from_tensor(units, [block, 32], rows_of(32)),
        scale_argument(call.kv_scale),
        *call.tables(),
        *call.results(),
        scale_to_log2(call.scale),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        *call.sizes(),
        **call.modes(),
        **CONFIGS[tile.rows],
        LOAD_SCALE=isinstance(call.kv_scale, torch.Tensor),
        **OPTIONS[tile.rows],
    )
