# SPDX-License-Identifier: Apache-2.0
"""fp8_ds_mla with more than 16 rows: a tile's scales over M (../scales.py), as factors of keys and
of values in fp16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_kernels.decode.hopper.fp8.query import times
from mla_kernels.decode.hopper.fp8.token_scales import rows_of_scales
from mla_kernels.decode.hopper.layouts import BLOCK, PASS_64
from mla_kernels.decode.hopper.scales import power_of_two
from mla_kernels.triton_common.gluon_compat import cta_barrier

# A group of two tokens a thread.
PAIRS = gl.constexpr(gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))


@gluon.jit
def clear_scales_past(scales, left):
    """Zero the scales of tokens at or past `left`: no numbers of this request lie there."""
    token = gl.arange(0, BLOCK, gl.SliceLayout(1, PAIRS))
    scales = rows_of_scales(scales)
    scales.store(gl.where((token < left)[:, None], scales.load(PAIRS), 0.0))


@gluon.jit
def store_ratios(scales, exponent, ratios):
    """scale / M of each token, group by group, [4 * 64] fp16."""
    ratio = (rows_of_scales(scales).load(PAIRS) * power_of_two(-exponent)).to(gl.float16)
    ratios.store(gl.reshape(gl.permute(ratio, (1, 0)), [4 * BLOCK]))


@gluon.jit
def ratios_of(
    ratios, group: gl.constexpr, first: gl.constexpr, count: gl.constexpr, L: gl.constexpr
):
    """A group's ratios of `count` tokens."""
    return ratios.slice(group * BLOCK + first, count).load(L)


@gluon.jit
def scaled(codes, ratio, AXIS: gl.constexpr):
    """fp16 values of codes times the ratio of each token, two at a time; AXIS: the one that ratio
    lacks."""
    codes, ratio = gl.broadcast(codes, gl.expand_dims(ratio, AXIS))
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [codes, ratio],
        dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def scale_rope(rope, factor):
    """A tile's rope columns times a power of two, in place."""
    rope.store(times(rope.load(PASS_64), factor))
    fence_async_shared()
    cta_barrier()
