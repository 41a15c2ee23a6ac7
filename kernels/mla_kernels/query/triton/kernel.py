# SPDX-License-Identifier: Apache-2.0
"""Joining the latent and the rope part of queries, rows of whole heads at a time."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def join_query_kernel(
    latent_ptr,
    rope_ptr,
    out_ptr,  # [num_rows, LATENT + ROPE]
    num_rows,  # T * H
    num_heads,
    latent_stride_t,
    latent_stride_h,
    rope_stride_t,
    rope_stride_h,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_POW2: tl.constexpr,
    ROPE_POW2: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = (row < num_rows)[:, None]
    token = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    out = out_ptr + row.to(tl.int64)[:, None] * (LATENT + ROPE)

    c = tl.arange(0, LATENT_POW2)[None, :]
    at = token * latent_stride_t + head * latent_stride_h
    part = ok & (c < LATENT)
    tl.store(out + c, tl.load(latent_ptr + at[:, None] + c, mask=part), mask=part)

    c = tl.arange(0, ROPE_POW2)[None, :]
    at = token * rope_stride_t + head * rope_stride_h
    part = ok & (c < ROPE)
    tl.store(out + LATENT + c, tl.load(rope_ptr + at[:, None] + c, mask=part), mask=part)
