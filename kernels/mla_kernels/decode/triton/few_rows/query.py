# SPDX-License-Identifier: Apache-2.0
"""The query tile as operands of q K^T, kept in registers for a whole segment."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.triton.few_rows.copies import indices
from mla_kernels.decode.triton.few_rows.operands import query_pairs, staged
from mla_kernels.triton_common.fp16_query import powers_of_two


@gluon.jit
def load_latent(
    q_at, first, q_stride_s, q_stride_h, num_rows, num_heads,
    GROUPS: gl.constexpr, BM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The latent part [GROUPS, BM, 128] of rows first .. first + BM - 1 of a request; those past
    num_rows are 0."""
    LATENT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, WARPS, 1], [2, 1, 0])
    group, row, column = indices(LATENT, GROUPS, BM, 128)
    row += first
    at = q_at + (row // num_heads) * q_stride_s + (row % num_heads) * q_stride_h
    return gl.load(at + (group * 128 + column), mask=row < num_rows, other=0.0)


@gluon.jit
def load_rope(
    q_at, first, q_stride_s, q_stride_h, num_rows, num_heads,
    COL: gl.constexpr, BM: gl.constexpr, DR: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The rope part [BM, DR] of the same rows, from column COL on."""
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DR, DR // 8], [WARPS, 1], [1, 0])
    row = first + gl.arange(0, BM, gl.SliceLayout(1, ROPE))[:, None]
    column = COL + gl.arange(0, DR, gl.SliceLayout(0, ROPE))[None, :]
    at = q_at + (row // num_heads) * q_stride_s + (row % num_heads) * q_stride_h
    return gl.load(at + column, mask=row < num_rows, other=0.0)


@gluon.jit
def largest_number(x):
    """The largest size in fp32 x, of what is no infinity and no NaN: one row's must not take the
    others' digits."""
    size = gl.abs(x)
    return gl.max(gl.reshape(gl.where(size < float("inf"), size, 0.0), [x.numel]), 0)


@gluon.jit
def query_operands(
    q, rope, latent_stage, rope_shared, LATENT: gl.constexpr, FORMAT: gl.constexpr, b_stage=None
):
    """(a, b, up): the latent part in the layout LATENT; the rope part goes to rope_shared [1 or 2].
    a and b pass through latent_stage; given b_stage, b through that, and both stay there.

    With codes the latent is fp16 below 4 in size, `up` the power of two that this took away, and a
    and b are columns as in operands.py; "fp8" treats the rope part likewise. Else a is all and b
    is unused.
    """
    if FORMAT == "float":
        up = 1.0
        a = staged(q, latent_stage, LATENT)
        b = a
    else:
        x = q.to(gl.float32)
        top = largest_number(x)
        if FORMAT == "fp8":
            y = rope.to(gl.float32)
            top = gl.maximum(top, largest_number(y))
        down, up = powers_of_two(top)
        a, b = query_pairs((x * down).to(gl.float16))
        a = staged(a, latent_stage, LATENT)
        b = staged(b, latent_stage if b_stage is None else b_stage, LATENT)
    if FORMAT == "fp8":
        rope_a, rope_b = query_pairs((y * down).to(gl.float16))
        rope_shared.index(0).store(rope_a)
        rope_shared.index(1).store(rope_b)
    else:
        rope_shared.index(0).store(rope)
    return a, b, up
