# SPDX-License-Identifier: Apache-2.0
"""The device side of `plan_mla_decode`: buffers of a fixed size, filled by the plan kernel."""

import math
from dataclasses import dataclass, field

import torch
import triton

from mla_kernels import checks
from mla_kernels.decode.plan.kernel import PART_FIELDS, PLAN_TILE, REQUEST_FIELDS, plan_kernel
from mla_kernels.decode.triton.parts import parts_for, row_tiles
from mla_kernels.triton_common.launch import launch

# What starting on a request costs a program, in tiles: filling the pipeline, writing the result.
OVERHEAD = 2
# Tiles that are worth a split's partial result and its merge.
MIN_PAY = 4
# Tiles that a part may do more to save cuts.
SLACK = 2
# Where memory is the limit and not what a program does, a part may have 1 / SPARE more.
SPARE = 32
# Deterministic mode: tiles a chunk (`chunk_tiles`), and chunks of a request at most.
CHUNK = 16
MAX_CHUNKS = 64
# The merge has a request an element of its grid's third axis, of which CUDA takes so many.
MAX_REQUESTS = 65535


@dataclass(frozen=True)
class DevicePlan:
    """What the layers of one decode step share. All sizes are fixed, so that a CUDA graph holds.

    spare     a part may do 1 / spare more work to save cuts; 0: no more than SLACK
    outgrown  [num_parts, row tiles] int32, zeros between launches: scratch of the decode kernel
    parts     [num_parts, 8] int32, requests [B, 4] int32: kernel.py
    acc       [slots, rows, kv_lora_rank] fp32, sums [slots, rows, 2] fp32: the partials (O; l, k)
              of split requests
    buffers   all of these; `updated` those that `update` writes
    """

    rows: int
    kv_lora_rank: int
    chunk: int
    max_chunks: int
    spare: int
    parts: torch.Tensor
    requests: torch.Tensor
    acc: torch.Tensor
    sums: torch.Tensor
    outgrown: torch.Tensor
    buffers: tuple[torch.Tensor, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = {id(x): x for x in vars(self).values() if isinstance(x, torch.Tensor)}
        object.__setattr__(self, "buffers", tuple(tensors.values()))

    @property
    def updated(self) -> tuple[torch.Tensor, ...]:
        return self.parts, self.requests, self.outgrown

    def update(self, seq_lens: torch.Tensor) -> None:
        """Plan for new lengths in place: one small kernel, no allocation, no sync."""
        num_parts, row_tiles = self.outgrown.shape
        launch(
            plan_kernel,
            (1,),
            seq_lens,
            *self.updated,
            seq_lens.shape[0],
            TILE=PLAN_TILE,
            PARTS=num_parts,
            PARTS_POW2=triton.next_power_of_2(num_parts),
            ROW_TILES=row_tiles,
            OVERHEAD=OVERHEAD,
            MIN_PAY=MIN_PAY,
            SLACK=SLACK,
            SPARE=self.spare,
            CHUNK=self.chunk,
            MAX_CHUNKS=MAX_CHUNKS,
            ROOM=self.max_chunks,
            BLOCK=min(1024, max(32, triton.next_power_of_2(seq_lens.shape[0]))),
            num_warps=4,
        )


def build_plan(
    seq_lens: torch.Tensor,
    *,
    num_heads: int,
    s_q: int,
    kv_lora_rank: int = 512,
    deterministic: bool = False,
    max_seq_len: int | None = None,
    num_parts: int | None = None,
    spare: int = 0,
    lender: DevicePlan | None = None,
) -> DevicePlan:
    """Allocate a plan for batches of seq_lens.shape[0] requests and fill it from seq_lens.

    max_seq_len bounds the workspace of deterministic mode (MAX_CHUNKS a request without it); it
    does not change the chunks of requests up to that length, and longer ones get fewer. num_parts:
    default, what fills the device. spare: as in DevicePlan; deterministic mode has none. lender: a
    plan that is never in use at the same time; the partials go where its do, if they fit.
    """
    B = seq_lens.shape[0]
    checks.check_range("number of requests", B, 0, MAX_REQUESTS)
    rows = num_heads * s_q
    device = seq_lens.device
    parts = num_parts or parts_for(rows, device)
    max_chunks = MAX_CHUNKS
    if deterministic:
        if max_seq_len is not None:
            tiles = max(1, triton.cdiv(max_seq_len, PLAN_TILE))
            chunk = CHUNK if tiles >= 8 * CHUNK else 2 * CHUNK
            max_chunks = min(MAX_CHUNKS, triton.cdiv(tiles, chunk))
        slots = B * max_chunks
    else:
        slots = max(1, parts - 1 + min(B, parts - 1))  # TMA takes no memory of 0 rows

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    plan = DevicePlan(
        rows=rows,
        kv_lora_rank=kv_lora_rank,
        chunk=CHUNK if deterministic else 0,
        max_chunks=max_chunks,
        spare=0 if deterministic else spare,
        parts=new(parts, PART_FIELDS),
        requests=new(B, REQUEST_FIELDS),
        acc=_partials((slots, rows, kv_lora_rank), device, lender.acc if lender else None),
        sums=_partials((slots, rows, 2), device, lender.sums if lender else None),
        outgrown=new(parts, row_tiles(rows, device)),
    )
    plan.update(seq_lens)
    return plan


def _partials(
    shape: tuple[int, ...], device: torch.device, lent: torch.Tensor | None
) -> torch.Tensor:
    """fp32 of `shape`, in the memory of `lent` if that is large enough."""
    size = math.prod(shape)
    if lent is not None and lent.numel() >= size:
        return lent.view(-1)[:size].view(shape)
    return torch.empty(shape, dtype=torch.float32, device=device)
