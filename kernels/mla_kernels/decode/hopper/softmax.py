# SPDX-License-Identifier: Apache-2.0
"""Online softmax of one tile of scores, and moving O to a new reference, in the two forms that
`decode/rescale.py` defines: pow2 (exact, on a fixed grid, lazy) and amla (the paper's integer add).

What warpgroup 0 hands to the value warpgroups for each row is, as fp32: with pow2 the power of two
that O is multiplied by (1: nothing to do), with amla the number that is added to O's bits (0).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import BLOCK, FACTORS, OUTPUT_ROW, SUMS, SUMS_ROW

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
TAU = gl.constexpr(numerics.TAU)
# Adding and subtracting 1.5 * 2^23 rounds an fp32 |x| < 2^22 to the nearest (even) integer.
ROUND_MAGIC = gl.constexpr(12582912.0)


@gluon.jit
def pow2_int(e):
    """2^e for integer-valued e <= 0, exactly; 0 for e < -126."""
    bits = (gl.maximum(e, -127.0).to(gl.int32) + 127) << 23
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def round_bf16(x):
    """fp32 -> bf16, two at a time. Written as asm because the compiler, seeing the result used as
    fp32 again, converts one by one with an instruction that runs at a quarter of the rate."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def add_row_sums(l, factor, p):
    """l * factor plus the eight partial sums of each row of p."""
    sums = gl.sum(gl.reshape(p.to(gl.float32), [BLOCK, 8, 8]), 1)
    return l * gl.convert_layout(factor, SUMS_ROW)[:, None] + gl.convert_layout(sums, SUMS)


@gluon.jit
def softmax_step(s, k, l, scale_log2, RESCALE: gl.constexpr = "pow2"):
    """(P, what O is moved by, k', l') of one tile of scores, -inf where masked."""
    if RESCALE == "pow2":  # numerics.py, with k moved only past 2^TAU
        row_max = gl.fma(gl.max(s, 1), scale_log2, GRID_OFFSET) - GRID_OFFSET
        row_max = gl.maximum(gl.ceil(row_max), EXPONENT_FLOOR)
        k_new = gl.where(row_max > k + TAU, row_max, k)
        factor = pow2_int(k - k_new)
        t = gl.fma(s, scale_log2, GRID_OFFSET)
        p = round_bf16(gl.exp2(t - (k_new + GRID_OFFSET)[:, None]))
        l = add_row_sums(l, factor, p)
        return p, factor, k_new, l
    else:
        k_new = gl.maximum(gl.max(s, 1) * scale_log2, k)
        weights = gl.exp2(s * scale_log2 - k_new[:, None])
        l = add_row_sums(l, gl.exp2(k - k_new), weights)
        s16, _n, _c = amla_factor(k_new)
        p = round_bf16(weights * s16[:, None])
        return p, amla_step(k, k_new).to(gl.float32, bitcast=True), k_new, l


@gluon.jit
def amla_factor(k):
    """(S16, n, c) of a reference k: 2^k = 2^-n S32, S16 = S32 rounded to bf16, c = S16 / S32."""
    n = (-k + ROUND_MAGIC) - ROUND_MAGIC
    s32 = gl.exp2(k + n)
    s16 = s32.to(gl.bfloat16).to(gl.float32)
    return s16, n, s16 / s32


@gluon.jit
def amla_step(k, k_new):
    """What moving the reference from k to k_new adds to the bits of O."""
    _s, n, c = amla_factor(k)
    _s, n_new, c_new = amla_factor(k_new)
    down = gl.minimum(n - n_new, 30.0).to(gl.int32)
    mantissa = (1.5 * (c_new / c - 1.0)) * 8388608.0
    mantissa = (mantissa + ROUND_MAGIC) - ROUND_MAGIC
    return gl.where(k_new > k, mantissa.to(gl.int32) - (down << 23), 0)


@gluon.jit
def rescale(acc, factors, RESCALE: gl.constexpr):
    """O at the new reference; untouched if no row of the tile has moved."""
    if RESCALE == "pow2":
        if gl.min(factors.load(FACTORS), 0) < 1.0:
            acc = acc * factors.load(OUTPUT_ROW)[:, None]
    else:
        moved = factors.load(FACTORS).to(gl.int32, bitcast=True) != 0
        if gl.max(moved.to(gl.int32), 0) != 0:
            step = factors.load(OUTPUT_ROW).to(gl.int32, bitcast=True)
            down = (4194304 - step) >> 23  # the mantissa's part is below 2^17
            bits = acc.to(gl.int32, bitcast=True)
            # Without the guard the add turns zeros and small numbers into huge ones.
            ok = ((bits >> 23) & 0xFF) >= (down + 2)[:, None]
            acc = gl.where(ok, (bits + step[:, None]).to(gl.float32, bitcast=True), 0.0)
    return acc


@gluon.jit
def o_factor(k, RESCALE: gl.constexpr):
    """O is relative to 2^k times this: amla's S16."""
    if RESCALE == "pow2":
        return gl.full_like(k, 1.0)
    else:
        s16, _n, _c = amla_factor(k)
        return s16
