# SPDX-License-Identifier: Apache-2.0
"""Warpgroups 1 and 2 with a bf16 cache and a token in several ranges (else: values_stream.py): each
owns 256 latent columns of O and gathers the same columns of the rows straight into its ring
(warpgroup 2 the rope columns too)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels.decode.hopper.layouts import BLOCK, HALF, OUTPUT
from mla_kernels.decode.hopper.rings import ring_next, ring_step
from mla_kernels.sparse.hopper.gather import (
    gather,
    load_slots,
    program_rows,
    program_token,
    slot_rows,
    store_offsets,
)
from mla_kernels.sparse.hopper.layouts import GATHER_BF16
from mla_kernels.sparse.hopper.scales import load_scalar
from mla_kernels.sparse.hopper.values import LATENT, add_values, store_range
from mla_kernels.triton_common.gluon_compat import cta_barrier


@gluon.jit
def gather_tile(
    rows, slot, kv, ring, ring_r, offsets, full, full_v, iv, COL: gl.constexpr
):  # fmt: skip
    """Start filling ring slot `iv`; `full` hears of it from the copies themselves."""
    row, ok = slot_rows(rows, slot)
    if COL > 0:
        store_offsets(offsets.index(iv), ok)
        gather(ring_r.index(iv), kv, row, ok, LATENT, GATHER_BF16)
    gather(ring.index(iv), kv, row, ok, COL, GATHER_BF16)
    async_copy.mbarrier_arrive(full.index(iv), increment_count=False)
    if COL > 0:
        cta_barrier()
        mbarrier.arrive(full_v.index(iv), count=1)


@gluon.jit
def values_warpgroup(
    part_acc, kv, slots, slots_stride, lengths, K, span, num_slots, page_stride, num_heads,
    ring, full, ring_r, offsets, full_v, num_tiles, full_q, p_ring, full_p, empty_p, factors,
    COL: gl.constexpr, SLOTS: gl.constexpr, SLOTS_P: gl.constexpr,
    PAGE: gl.constexpr, ROW: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    token, first_head = program_token(num_heads)
    rows = program_rows(
        slots, slots_stride, lengths, K, span, token, num_slots, page_stride, PAGE, ROW, HAS_LENGTHS
    )
    for i in gl.static_range(SLOTS - 1):
        slot = load_slots(rows, i, GATHER_BF16)
        gather_tile(rows, slot, kv, ring, ring_r, offsets, full, full_v, i, COL)
    slot = load_slots(rows, SLOTS - 1, GATHER_BF16)
    mbarrier.wait(full_q, 0)
    tiles = load_scalar(num_tiles)
    gather_tile(rows, slot, kv, ring, ring_r, offsets, full, full_v, SLOTS - 1, COL)
    iv = gl.to_tensor(0)
    ip = gl.to_tensor(0)
    pp = gl.to_tensor(0)
    acc = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
    for n in range(tiles):
        slot = load_slots(rows, n + SLOTS, GATHER_BF16)
        mbarrier.wait(full_p.index(ip), pp)
        acc = add_values(acc, p_ring, ring.index(iv), factors, empty_p, ip)
        gather_tile(rows, slot, kv, ring, ring_r, offsets, full, full_v, iv, COL)
        iv = ring_step(iv, SLOTS)
        ip, pp = ring_next(ip, pp, SLOTS_P)
    async_copy.commit_group()  # a wait is for groups, and no copy before was in one
    async_copy.wait_group(0)
    store_range(acc, part_acc, token, first_head, num_heads, COL)
