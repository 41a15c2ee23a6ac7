# SPDX-License-Identifier: Apache-2.0
"""Online softmax of one tile of scores, and moving O to a new reference, in the two forms that
`decode/rescale.py` defines: pow2 (exact, on a fixed grid, lazy) and amla (the paper's integer add).

What warpgroup 0 hands to the value warpgroups for each row is, as fp32: with pow2 the power of two
that O is multiplied by (1: nothing to do), with amla the number that is added to O's bits (0).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import (
    BLOCK,
    FACTORS,
    OUTPUT_ROW,
    QUADS,
    SCORES,
    SCORES_ROW,
)

GRID_OFFSET = gl.constexpr(numerics.GRID_OFFSET)
EXPONENT_FLOOR = gl.constexpr(numerics.EXPONENT_FLOOR)
# Adding and subtracting 1.5 * 2^23 rounds an fp32 |x| < 2^22 to the nearest (even) integer.
ROUND_MAGIC = gl.constexpr(12582912.0)


@gluon.jit
def pow2_int(e):
    """2^e for integer-valued e <= 0, exactly; 0 for e < -126."""
    # Added to 2^23, e + 127 is the sum's low bits: the exponent field of the result.
    bits = (gl.maximum(e, -127.0) + 8388735.0).to(gl.int32, bitcast=True) << 23
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def round_bf16(x):
    """fp32 -> bf16, two at a time. Written as asm because the compiler, seeing the result used as
    fp32 again, converts one by one with an instruction that runs at a quarter of the rate."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def unpack_bf16(p):
    """bf16 -> fp32 two at a time, one instruction each; the compiler would take two or three."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [p],
        dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


# k' of a thread's two rows, from the largest of its own scores in them and from k. As long as no
# row of the warp has passed k + TAU, nobody needs the maximum of a whole row.
MOVE_REFERENCE = gl.constexpr(f"""{{
    .reg .pred any; .reg .f32 a, b, limit_a, limit_b, other;
    sub.f32 a, $2, {numerics.GRID_OFFSET:.1f}; sub.f32 b, $3, {numerics.GRID_OFFSET:.1f};
    add.f32 limit_a, $4, {numerics.TAU:.1f}; add.f32 limit_b, $5, {numerics.TAU:.1f};
    setp.gt.f32 any, a, limit_a; setp.gt.or.f32 any, b, limit_b, any;
    vote.sync.any.pred any, any, 0xffffffff;
    mov.f32 $0, $4; mov.f32 $1, $5;
    @!any bra DONE;
    shfl.sync.bfly.b32 other, a, 2, 0x1f, 0xffffffff; max.f32 a, a, other;
    shfl.sync.bfly.b32 other, a, 1, 0x1f, 0xffffffff; max.f32 a, a, other;
    shfl.sync.bfly.b32 other, b, 2, 0x1f, 0xffffffff; max.f32 b, b, other;
    shfl.sync.bfly.b32 other, b, 1, 0x1f, 0xffffffff; max.f32 b, b, other;
    cvt.rpi.f32.f32 a, a; cvt.rpi.f32.f32 b, b;
    setp.gt.f32 any, a, limit_a; @any mov.f32 $0, a;
    setp.gt.f32 any, b, limit_b; @any mov.f32 $1, b;
DONE: }}""")


@gluon.jit
def by_thread(s):
    """[64, 64] SCORES as [64, 8, 4, 2]: lane j of a row's four has the elements [:, :, j]."""
    return gl.reshape(s, [BLOCK, 8, 4, 2])


@gluon.jit
def lane_maxima(x):
    """The largest of each lane's elements of a row: [64, 8, 4, 2] to [64, 4] QUADS."""
    return gl.convert_layout(gl.max(gl.max(x, 3), 1), QUADS)


@gluon.jit
def lane_sums(x):
    return gl.convert_layout(gl.sum(gl.sum(x, 3), 1), QUADS)


@gluon.jit
def along_rows(x, like):
    """[64, 4] QUADS to [64, 1, 4, 1], to be broadcast to `like`."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(x, ROWS), 1), 3)


@gluon.jit
def pow2_step(t, top, k, l):
    """(P, 2^(k - k'), k', l') of scores on the grid t (`by_thread`) whose maxima are `top`:
    numerics.py, with k moved only past 2^TAU."""
    k_new = gl.inline_asm_elementwise(
        MOVE_REFERENCE, "=&f,=&f,f,f,f,f", [top, k], dtype=gl.float32, is_pure=True, pack=2
    )
    factor = pow2_int(k - k_new)
    p = round_bf16(gl.exp2(t - along_rows(k_new + GRID_OFFSET, t)))
    l = l * factor + lane_sums(unpack_bf16(p))
    return gl.convert_layout(gl.reshape(p, [BLOCK, BLOCK]), SCORES), factor, k_new, l


@gluon.jit
def softmax_step(s, k, l, scale_log2, RESCALE: gl.constexpr):
    """(P, what O is moved by, k', l') of one tile of scores, -inf where masked; k, l and what O is
    moved by are [64, 4] QUADS, l the sums of each lane's own elements."""
    s = by_thread(s)
    top = lane_maxima(s)
    if RESCALE == "pow2":
        top = gl.fma(top, scale_log2, GRID_OFFSET)
        return pow2_step(gl.fma(s, scale_log2, GRID_OFFSET), top, k, l)
    else:
        k_new = gl.maximum(gl.max(top, 1)[:, None] * scale_log2, k)
        weights = gl.exp2(s * scale_log2 - along_rows(k_new, s))
        l = l * gl.exp2(k - k_new) + lane_sums(weights)
        s16, _n, _c = amla_factor(k_new)
        p = round_bf16(weights * along_rows(s16, s))
        p = gl.convert_layout(gl.reshape(p, [BLOCK, BLOCK]), SCORES)
        return p, amla_step(k, k_new).to(gl.float32, bitcast=True), k_new, l


@gluon.jit
def of_rows(x):
    """[64] of a [64, 4] QUADS whose four lanes agree."""
    return gl.convert_layout(gl.max(x, 1), SCORES_ROW)


@gluon.jit
def sums_of_rows(l):
    """The sums of whole rows, [64]."""
    return gl.convert_layout(gl.sum(l, 1), SCORES_ROW)


@gluon.jit
def publish_factors(factors, factor):
    """Store a [64, 4] QUADS for `rescale`: lane by lane, since that needs no shuffles."""
    factors.store(gl.reshape(gl.permute(factor, (1, 0)), [4 * BLOCK]))


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
    factors = factors.slice(0, BLOCK)  # of a row's first lane
    if RESCALE == "pow2":
        # Positive numbers compare as their bits do, and for these there is one instruction.
        if gl.min(factors.load(FACTORS).to(gl.int32, bitcast=True), 0) < 0x3F800000:
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
