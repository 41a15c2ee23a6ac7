# SPDX-License-Identifier: Apache-2.0
"""One cache tile of the decode kernel: scores, weights, values, as Triton device functions.

ORDER says what is on the M side of the dots. "rows": tiles of scores are [rows, tokens] and O is
[rows, DV]. "tokens": [tokens, rows] and [DV, rows], so that tokens fill wgmma's M of 64 where rows
are few.
"""

import triton
import triton.language as tl

from mla_kernels.decode.triton.softmax import (
    integer_reference,
    pow2_weights,
    scaled_scores,
    softmax_step,
    token_max,
)


@triton.jit
def dot(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b in fp32; the interpreter would multiply the raw bits of bf16."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc)
    else:
        return tl.dot(a, b, acc=acc)


@triton.jit
def scores(q, keys, acc, ORDER: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + q K^T."""
    if ORDER == "tokens":
        return dot(keys, tl.trans(q), acc, INTERPRET)
    else:
        return dot(q, tl.trans(keys), acc, INTERPRET)


@triton.jit
def add_values(p, values, acc, ORDER: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + P V."""
    if ORDER == "tokens":
        return dot(tl.trans(values), p, acc, INTERPRET)
    else:
        return dot(p, values, acc, INTERPRET)


@triton.jit
def masked_scores(
    qk,
    row_scale,
    left,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    ORDER: tl.constexpr,
    RESCALE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Raw products -> scores in log2 units (softmax.py), -inf at and past `left` tokens."""
    t = scaled_scores(qk, row_scale, RESCALE, INTERPRET)
    token = tl.arange(0, BN)
    if ORDER == "tokens":
        seen = token[:, None] < (left[None, :] if CAUSAL else left)
    else:
        seen = token[None, :] < (left[:, None] if CAUSAL else left)
    return tl.where(seen, t, -float("inf"))


@triton.jit
def weights_of_scores(
    t,
    k,
    l,
    new_reference,
    ORDER: tl.constexpr,
    RESCALE: tl.constexpr,
    REFERENCE: tl.constexpr,
    DTYPE: tl.constexpr,
    WGMMA: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(P, k', l'). REFERENCE "first": only a tile with new_reference moves k, and l stays."""
    if REFERENCE == "first":
        if new_reference:
            k = tl.maximum(k, integer_reference(token_max(t, ORDER)))
        return pow2_weights(t, k, DTYPE, ORDER, WGMMA and not INTERPRET), k, l
    else:
        return softmax_step(t, k, l, DTYPE, RESCALE, ORDER)


@triton.jit
def tile_scores(
    q,
    q_rope,
    latent,
    rope,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ORDER: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Raw products q K^T of one tile."""
    T0: tl.constexpr = BN if ORDER == "tokens" else BM
    T1: tl.constexpr = BM if ORDER == "tokens" else BN
    qk = scores(q, latent, tl.zeros([T0, T1], tl.float32), ORDER, INTERPRET)
    if SPLIT:
        rope_qk = scores(q_rope, rope, tl.zeros([T0, T1], tl.float32), ORDER, INTERPRET)
        return tl.fma(rope_qk, 1.0, qk)
    else:
        return scores(q_rope, rope, qk, ORDER, INTERPRET)


@triton.jit
def tile_weights(
    qk,
    q_ptr,
    row_scale,
    k,
    l,
    left,
    new_reference,
    num_heads,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    ORDER: tl.constexpr,
    RESCALE: tl.constexpr,
    REFERENCE: tl.constexpr,
    DTYPE: tl.constexpr,
    WGMMA: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(P, k', l') of one tile's products.

    SPLIT: Triton lets all warps of a dot share its rows when the result reaches another dot: two
    warpgroups would compute the same scores. A sum that is no dot(acc=) and a branch (always
    taken) hide the chain. The load in the other branch keeps Triton from computing P twice, in the
    layouts of both dots.
    """
    if SPLIT:
        T0: tl.constexpr = BN if ORDER == "tokens" else BM
        T1: tl.constexpr = BM if ORDER == "tokens" else BN
        if num_heads > 0:
            t = masked_scores(qk, row_scale, left, BN, CAUSAL, ORDER, RESCALE, INTERPRET)
            p, k, l = weights_of_scores(
                t, k, l, new_reference, ORDER, RESCALE, REFERENCE, DTYPE, WGMMA, INTERPRET
            )
        else:
            at = q_ptr + tl.arange(0, T0)[:, None] * T1 + tl.arange(0, T1)[None, :]
            p = tl.load(at).to(DTYPE)
    else:
        t = masked_scores(qk, row_scale, left, BN, CAUSAL, ORDER, RESCALE, INTERPRET)
        p, k, l = weights_of_scores(
            t, k, l, new_reference, ORDER, RESCALE, REFERENCE, DTYPE, WGMMA, INTERPRET
        )
    return p, k, l
