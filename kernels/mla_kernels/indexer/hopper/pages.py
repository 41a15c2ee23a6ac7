# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="assignment"
"""The scores of a request's pages for the rows of a tile: the loop that takes the time.

Pages come by TMA into a ring. The other CTAs of the SM multiply while this one weighs and sums:
issuing the next product before that takes registers which are better spent on the weights.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_kernels.indexer.hopper.layouts import (
    BYTES,
    KEYS,
    LINES,
    PAGE,
    PAGE_BYTES,
    VECTOR,
    D,
    operand,
)
from mla_kernels.triton_common.gluon_compat import cta_barrier, reinterpret, tma_load

PROPAGATE_NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def load_page(keys_desc, scales_desc, page, keys, scales, full, slot):
    mbarrier.expect(full.index(slot), PAGE_BYTES)
    tma_load(keys_desc, [page * LINES, 0], full.index(slot), keys.index(slot))
    tma_load(scales_desc, [page * LINES + PAGE, 0], full.index(slot), scales.index(slot))


@gluon.jit
def load_first_pages(
    keys_desc, scales_desc, table, first, stop, keys, scales, full, slot, STAGES: gl.constexpr
):
    for i in gl.static_range(STAGES):
        if first + i < stop:
            page = gl.load(table + first + i)
            load_page(keys_desc, scales_desc, page, keys, scales, full, slot)
            slot = gl.where(slot + 1 == STAGES, 0, slot + 1)


@gluon.jit
def score_pages(
    keys_desc, scales_desc, table, first, stop, keys, scales, full, slot, phase, q_shared, weights,
    limits, row, scores_ptr, stride_scores,
    DOTS: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Scores of pages [first, stop), of which `load_first_pages` has asked for STAGES, for the rows
    from `row` on: of each the keys below its limit. A product is a page times the heads of G rows;
    with FP8 of the codes themselves, from shared memory, else of fp16, in registers for all rows.
    Returns the ring's next slot and phase.
    """
    KEY_OPERAND: gl.constexpr = gl.DotOperandLayout(0, DOTS, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(1, DOTS)
    HEAD: gl.constexpr = gl.SliceLayout(0, DOTS)
    PRODUCTS: gl.constexpr = ROWS // G
    held = ()
    for j in gl.static_range(PRODUCTS):
        held = held + (weights.index(j).load(HEAD),)  # noqa: RUF005 (Triton knows no stars)
    token = gl.arange(0, PAGE, TOKEN)
    page = gl.load(table + gl.minimum(first + STAGES, stop - 1))
    for n in range(first, stop):
        mbarrier.wait(full.index(slot), phase)
        scale = reinterpret(scales.index(slot), gl.float32, [PAGE], VECTOR).load(TOKEN)
        if FP8:
            k = reinterpret(keys.index(slot), gl.float8e4nv, [PAGE, D], KEYS)
        else:
            codes = keys.index(slot).load(BYTES)
            k = gl.convert_layout(operand(codes, FP8), KEY_OPERAND, assert_trivial=True)
        for j in gl.static_range(PRODUCTS):
            dots = product(k, q_shared.index(j), DOTS, G * HEADS)
            if FP8:
                dots = warpgroup_mma_wait(0, deps=(dots,))
            else:
                dots, k = warpgroup_mma_wait(0, deps=(dots, k))  # its registers are read till now
            if j == (PRODUCTS - 1 if FP8 else 0):  # the keys have been read
                cta_barrier()
                if n + STAGES < stop:
                    load_page(keys_desc, scales_desc, page, keys, scales, full, slot)
                page = gl.load(table + gl.minimum(n + STAGES + 1, stop - 1))
            # NaN passes through the ReLU as it does in torch.
            relu = gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN)
            weighed = relu * held[j][None, :]
            if G == 1:
                sums = (gl.sum(weighed, 1),)
            else:
                sums = gl.split(gl.sum(gl.reshape(weighed, [PAGE, G, HEADS]), 2))
            for g in gl.static_range(G):
                score = gl.convert_layout(sums[g], TOKEN, assert_trivial=True) * scale
                limit = limits[j * G + g]
                score = gl.where(n * PAGE + token < limit, score, float("-inf"))
                at = (
                    scores_ptr
                    + (row * stride_scores + n * PAGE)
                    + (j * G + g) * stride_scores
                    + token
                )
                gl.store(at, score, mask=(token < PAGE) & (n * PAGE < limit))
        wrap = slot + 1 == STAGES
        slot = gl.where(wrap, 0, slot + 1)
        phase = gl.where(wrap, phase ^ 1, phase)
    return slot, phase


@gluon.jit
def product(k, q, DOTS: gl.constexpr, N: gl.constexpr):
    """k [PAGE, D] times q [N, D], not waited for."""
    zeros = gl.zeros([PAGE, N], gl.float32, DOTS)
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
