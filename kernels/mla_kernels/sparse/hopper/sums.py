# SPDX-License-Identifier: Apache-2.0
"""What warpgroup 0 leaves of a token: its row sums and largest scores, or those of a part of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_kernels import numerics
from mla_kernels.decode.hopper.layouts import BLOCK, SCORES_ROW
from mla_kernels.sparse.hopper.walk import row_of

LN2 = gl.constexpr(numerics.LN2)
LOG2E = gl.constexpr(numerics.LOG2E)


@gluon.jit
def store_sums(
    k, l, top, part, token, first_head, num_heads, part_sums, max_logits, MAX_LOGITS: gl.constexpr
):  # fmt: skip
    """What a program found of a token that several share, as its partial result `part`."""
    head = first_head + gl.arange(0, BLOCK, SCORES_ROW)
    ok = head < num_heads
    total = gl.convert_layout(gl.sum(l, 1), SCORES_ROW)
    if MAX_LOGITS:
        at = max_logits + row_of(token, num_heads) + head
        gl.atomic_max(at, top * LN2, mask=ok, sem="relaxed")
    at = (part * num_heads + head) * 2
    gl.store(part_sums + at, total, mask=ok)
    gl.store(part_sums + at + 1, k, mask=ok)


@gluon.jit
def store_whole_sums(
    k, l, top, token, first_head, num_heads, sink, lse, max_logits, inverse, full_out,
    HAS_SINK: gl.constexpr, MAX_LOGITS: gl.constexpr,
):  # fmt: skip
    """Of a token that a program has all of: lse, and 1 / l for the other warpgroups."""
    head = first_head + gl.arange(0, BLOCK, SCORES_ROW)
    ok = head < num_heads
    total = gl.convert_layout(gl.sum(l, 1), SCORES_ROW)
    seen = total != 0.0  # NaN too
    if MAX_LOGITS:
        gl.store(max_logits + token * num_heads + head, top * LN2, mask=ok)
    with_sink = total
    if HAS_SINK:
        logit = gl.load(sink + head, mask=ok, other=0.0)
        with_sink = total + gl.exp2(logit * LOG2E - k)
    inverse.store(gl.where(seen, 1.0 / with_sink, 0.0))
    mbarrier.arrive(full_out, count=1)
    value = gl.where(seen, (k + gl.log2(total)) * LN2, -float("inf"))
    gl.store(lse + token * num_heads + head, value, mask=ok)
