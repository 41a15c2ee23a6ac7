# SPDX-License-Identifier: Apache-2.0
"""fp8_ds_mla with up to 16 rows: neither keys nor values are scaled, but each group's scores by
its scale s_g of a token, and P^T, once a group, by s_g over the token's largest."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.hopper.fp8.operands import rows_of
from mla_kernels.decode.hopper.fp8.softmax import round_f16
from mla_kernels.decode.hopper.layouts import BLOCK, SCALES_READ
from mla_kernels.decode.triton.few_rows.operands import LEAST_SCALE
from mla_kernels.triton_common.gluon_compat import reinterpret


@gluon.jit
def rows_of_scales(scales):
    """A tile's scales, [64, 4], as they are read and written here."""
    return reinterpret(scales, gl.float32, [BLOCK, 4], SCALES_READ)


@gluon.jit
def load_scale(scales, g: gl.constexpr, L: gl.constexpr):
    """fp32 [64]: the scale of group g of each token."""
    return gl.max(rows_of_scales(scales).slice(g, 1, dim=1).load(L.parent), 1)


@gluon.jit
def load_scales(scales, n, unmasked, length, hi, L: gl.constexpr):
    """(the scales of the four groups, the largest of each token), [64] each; 0 and the least past
    a request's length or a segment's end, where no numbers of this request lie.

    What is left of tile n is found out where it is needed: before, it would take a register."""
    token = gl.arange(0, BLOCK, L)
    found = ()
    for g in gl.static_range(4):
        scale = load_scale(scales, g, L)
        if n >= unmasked:
            left = gl.minimum(length, hi * BLOCK) - n * BLOCK
            scale = gl.where(token < left, scale, 0.0)
        found = found + (scale,)  # type: ignore  # noqa: RUF005
    largest = gl.maximum(
        gl.maximum(gl.abs(found[0]), gl.abs(found[1])),  # type: ignore
        gl.maximum(gl.abs(found[2]), gl.abs(found[3])),  # type: ignore
    )
    return found, gl.maximum(largest, LEAST_SCALE)


@gluon.jit
def log2(x):
    """Of normal numbers, to 2^-22."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sum_of_groups(groups, scales):
    """S^T from group_scores' sums and the scales of each token."""
    s = groups[4]
    for g in gl.static_range(4):
        s = gl.fma(groups[g], scales[g][:, None] + gl.zeros_like(s), s)
    return s


@gluon.jit
def store_planes(p, scales, inverse, p_ring, slot):
    """P^T for each group's values, [4 * 64, N]: times the group's scale of a token over the
    largest."""
    N: gl.constexpr = p.shape[1]
    parts = ()
    for g in gl.static_range(4):
        part = round_f16(p * (scales[g] * inverse)[:, None])
        parts = parts + (part,)  # type: ignore  # noqa: RUF005
    planes = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))  # type: ignore
    planes = gl.permute(planes, (3, 2, 0, 1))  # [group // 2, group % 2, token, row]
    target = reinterpret(p_ring, gl.float16, [2, 4 * BLOCK, N], rows_of(N))
    target.index(slot).store(gl.reshape(planes, [4 * BLOCK, N]))
