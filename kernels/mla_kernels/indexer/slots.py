# SPDX-License-Identifier: Apache-2.0
"""The public function `positions_to_slots`: where selected tokens lie in the cache."""

import functools

import torch

from mla_kernels import checks
from mla_kernels.dispatch import choose_impl
from mla_kernels.indexer.rows import check_request_ids
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import Recordings, kind

_RECORDINGS = Recordings(512)

AVAILABLE = ("triton", "torch", "reference")


@untraced
def positions_to_slots(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    request_ids: torch.Tensor | None = None,
    block_size: int = BLOCK_SIZE,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Physical slots of token positions, as `mla_sparse_attention` takes them.

    positions    [T, K] int32 within the row's request, as `indexer_topk` returns; negative = none
    block_table  [B, max_blocks] int32
    request_ids  [T] int32, -1 = padding row; default: T / B rows a request, in order
    out          [T, K] int32, contiguous, to write into; not part of positions

    Returns [T, K] int32: block_table[request, p // block_size] * block_size + p % block_size, and
    -1 for none, for padding rows and for positions past the table. Slots wrap at 2^31: a cache of
    more rows, whose size is not known here, is what `mla_sparse_attention` refuses. ValueError for
    arguments that do not fit.
    """
    key = *map(kind, (positions, block_table, request_ids, block_size, out)), impl
    replay = _RECORDINGS.find(key)
    operands = [positions, block_table]
    if request_ids is not None:
        operands.append(request_ids)
    if replay is not None:
        slots = _slots(positions, out)
        replay([*operands, slots])
        return slots
    checks.check_shape("positions", positions, ("T", "K"))
    checks.check_range("K (positions.shape[1])", positions.shape[1], 0, checks.MAX_SLOTS)
    checks.check_shape("block_table", block_table, ("B", "max_blocks"))
    T, B = positions.shape[0], block_table.shape[0]
    for name, x in (("positions", positions), ("block_table", block_table)):
        checks.check_dtype(name, x, (torch.int32,))
        checks.check_last_contiguous(name, x)
    checks.check_device("block_table", block_table, positions.device)
    if request_ids is not None:
        checks.check_shape("request_ids", request_ids, (T,))
        checks.check_dtype("request_ids", request_ids, (torch.int32,))
        checks.check_last_contiguous("request_ids", request_ids)
        checks.check_device("request_ids", request_ids, positions.device)
    elif T % B if B else T:
        rows = f"a multiple of {B} rows" if B else "no rows, as block_table is of no request,"
        raise ValueError(f"Expected {rows} without request_ids, got {T}")
    if positions.device.type == "cpu":
        check_request_ids(request_ids, B)
    checks.check_range("block_size", block_size, 1, 2**31 - 1)
    if out is not None:
        checks.check_shape("out", out, tuple(positions.shape))
        checks.check_dtype("out", out, (torch.int32,))
        checks.check_device("out", out, positions.device)
        checks.check_contiguous("out", out)
    block_size = int(block_size)  # NumPy's integers are none to Triton
    choice = choose_impl("positions_to_slots", impl, positions.device, available=AVAILABLE)
    if choice.impl == "triton":
        from mla_kernels.indexer.triton.row_launchers import launch_positions_to_slots

        slots = _slots(positions, out)
        args = (positions, block_table, request_ids, block_size, slots)
        launch = functools.partial(launch_positions_to_slots, *args)
        _RECORDINGS.record(key, [*operands, slots], launch)
        return slots
    # The torch form is its own definition.
    if block_table.shape[1] == 0 or B == 0:
        return _slots(positions, out).fill_(-1)
    if request_ids is None:
        request_ids = torch.arange(T, device=positions.device) // max(T // max(B, 1), 1)
    block = positions.clamp(min=0) // block_size
    inside = (positions >= 0) & (block < block_table.shape[1]) & (request_ids >= 0)[:, None]
    row = request_ids.clamp(min=0).long()[:, None]
    slot = block_table[row, torch.where(inside, block, 0).long()] * block_size
    slots = torch.where(inside, slot + positions.clamp(min=0) % block_size, -1)
    return slots if out is None else out.copy_(slots)


def _slots(positions: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is not None:
        return out
    return torch.empty_like(positions, memory_format=torch.contiguous_format)
