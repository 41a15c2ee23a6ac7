# SPDX-License-Identifier: Apache-2.0
"""Online softmax in the three forms of `decode/rescale.py`, as Triton device functions.

Per row: a reference `k` (log2 units), a sum `l` and an accumulator O, both relative to 2^k. ORDER
is that of the axes of a tile of scores: "rows" [rows, tokens], "tokens" [tokens, rows].

pow2 has two ways to choose k, with the same bits in O (numerics.py: k is only an exponent):

    first   k is the maximum of the first tile; O is never rescaled. P, O and l have room for
            scores far above it: only rows of which one ends with l >= OUTGROWN are done again,
            with the true maxima. Needs the exponent range of a bf16 P.
    lazy    k follows when the maximum is more than 2^TAU above it; O is multiplied by an exact 2^-n
"""

import triton
import triton.language as tl

from mla_kernels import numerics
from mla_kernels.triton_common.rounding import round_to

GRID_OFFSET = tl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = tl.constexpr(numerics.EXPONENT_FLOOR)
TAU = tl.constexpr(numerics.TAU)
OUTGROWN = tl.constexpr(2.0**64)
# Adding and subtracting 1.5 * 2^23 rounds an fp32 |x| < 2^22 to the nearest (even) integer.
ROUND_MAGIC = tl.constexpr(12582912.0)

# Marked as impure: Triton would otherwise compute the weights twice, in the scores' layout and in
# the operand layout of P V, and exchange fp32 scores between warpgroups, not bf16 weights.
EXP2_BF16 = tl.constexpr(
    """{
    .reg .f32 a, b;
    ex2.approx.ftz.f32 a, $1;
    ex2.approx.ftz.f32 b, $2;
    cvt.rn.bf16x2.f32 $0, b, a;
    }"""
)


@triton.jit
def along_rows(x, ORDER: tl.constexpr):
    """A value per row, ready to broadcast over a tile or over O."""
    return x[None, :] if ORDER == "tokens" else x[:, None]


@triton.jit
def token_max(t, ORDER: tl.constexpr):
    return tl.max(t, 0 if ORDER == "tokens" else 1)


@triton.jit
def token_sum(p, ORDER: tl.constexpr):
    return tl.sum(p, 0 if ORDER == "tokens" else 1)


@triton.jit
def pow2_int(e):
    """2^e for integer-valued e <= 0, exactly; 0 for e < -126."""
    bits = (tl.maximum(e, -127.0).to(tl.int32) + 127) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled_scores(qk, scale_log2, RESCALE: tl.constexpr, INTERPRET: tl.constexpr):
    """Scores in log2 units; for pow2 with GRID_OFFSET added, which snaps them to 2^-12."""
    if RESCALE == "pow2":
        if INTERPRET:  # the interpreter's fma rounds twice
            t = qk.to(tl.float64) * scale_log2.to(tl.float64) + GRID_OFFSET
            return t.to(tl.float32)
        return tl.fma(qk, scale_log2, GRID_OFFSET)
    return qk * scale_log2


@triton.jit
def integer_reference(t_max):
    """The pow2 reference of a row maximum that still holds GRID_OFFSET."""
    return tl.maximum(tl.ceil(t_max - GRID_OFFSET), EXPONENT_FLOOR)


@triton.jit
def pow2_weights(t, k, P_DTYPE: tl.constexpr, ORDER: tl.constexpr, WGMMA: tl.constexpr):
    """P = 2^(t - k), rounded. The subtraction is exact."""
    e = t - along_rows(k + GRID_OFFSET, ORDER)
    if WGMMA and P_DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            EXP2_BF16, "=r,r,r", [e], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return round_to(tl.exp2(e), P_DTYPE)


@triton.jit
def softmax_step(t, k, l, P_DTYPE: tl.constexpr, RESCALE: tl.constexpr, ORDER: tl.constexpr):
    """(P, k', l') for a tile of scores t (-inf where masked); l' is relative to k'."""
    if RESCALE == "pow2":
        row_max = integer_reference(token_max(t, ORDER))
        k_new = tl.where(row_max > k + TAU, row_max, k)
        p = pow2_weights(t, k_new, P_DTYPE, ORDER, False)
        # The sum of the ROUNDED P: numerator and denominator see the same weights.
        l = l * pow2_int(k - k_new) + token_sum(p.to(tl.float32), ORDER)
    else:
        k_new = tl.maximum(token_max(t, ORDER), k)
        p32 = tl.exp2(t - along_rows(k_new, ORDER))
        l = l * tl.exp2(k - k_new) + token_sum(p32, ORDER)
        if RESCALE == "amla":
            s16, _n, _c = amla_factor(k_new, P_DTYPE)
            p32 = p32 * along_rows(s16, ORDER)
        p = round_to(p32, P_DTYPE)
    return p, k_new, l


@triton.jit
def amla_factor(k, P_DTYPE: tl.constexpr):
    """(S16, n, c) of a reference k: 2^k = 2^-n S32, S16 = S32 rounded to P's dtype, c = S16/S32."""
    n = (-k + ROUND_MAGIC) - ROUND_MAGIC
    s32 = tl.exp2(k + n)
    s16 = round_to(s32, P_DTYPE).to(tl.float32)
    return s16, n, s16 / s32


@triton.jit
def rescale(acc, k, k_new, P_DTYPE: tl.constexpr, RESCALE: tl.constexpr, ORDER: tl.constexpr):
    """The accumulator moved from reference k to k_new."""
    if RESCALE == "pow2":
        return acc * along_rows(pow2_int(k - k_new), ORDER)
    elif RESCALE == "flash":
        return acc * along_rows(tl.exp2(k - k_new), ORDER)
    else:
        _s, n, c = amla_factor(k, P_DTYPE)
        _s, n_new, c_new = amla_factor(k_new, P_DTYPE)
        down = tl.minimum(n - n_new, 30.0).to(tl.int32)
        mantissa = (1.5 * (c_new / c - 1.0)) * 8388608.0
        mantissa = (mantissa + ROUND_MAGIC) - ROUND_MAGIC
        step = tl.where(k_new > k, mantissa.to(tl.int32) - (down << 23), 0)
        bits = acc.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        # Without the guard the add turns zeros and small numbers into huge ones.
        moved = (bits + along_rows(step, ORDER)).to(tl.float32, bitcast=True)
        return tl.where(exponent >= along_rows(down + 2, ORDER), moved, 0.0)


@triton.jit
def finish(acc, k, P_DTYPE: tl.constexpr, RESCALE: tl.constexpr, ORDER: tl.constexpr):
    """The accumulator relative to exactly 2^k (removes amla's S16)."""
    if RESCALE == "amla":
        s16, _n, _c = amla_factor(k, P_DTYPE)
        return acc / along_rows(s16, ORDER)
    return acc
