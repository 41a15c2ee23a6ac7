# SPDX-License-Identifier: Apache-2.0
"""Walking a part of the plan, segment by segment.

A segment is an unbroken range of tiles [lo, hi) of one request, folded into one accumulator. Every
warpgroup walks for itself. How tiles are loaded is each kernel's own: the loads.py of bf16/ and
fp8/, the stream.py of many_rows/ and few_rows_fp8/.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_kernels.decode.hopper.layouts import BLOCK
from mla_kernels.triton_common.gluon_compat import aggregate


@aggregate
class Part:
    """This program's share of the plan (decode/plan/launcher.py) and what it is read with: requests
    up to `last`, of which the last one up to tile `last_end`."""

    last: gl.tensor
    last_end: gl.tensor
    seq_lens: gl.tensor
    requests: gl.tensor
    table: gl.tensor
    table_stride: gl.tensor
    CHUNKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, last, last_end, seq_lens, requests, table, table_stride, CHUNKED):
        self.last = last
        self.last_end = last_end
        self.seq_lens = seq_lens
        self.requests = requests
        self.table = table
        self.table_stride = table_stride
        self.CHUNKED = gl.constexpr(CHUNKED)


@gluon.jit
def request_end(plan, request):
    """Number of the tile past this part's share of a request (0: nothing)."""
    tiles = (gl.load(plan.seq_lens + gl.minimum(request, plan.last)) + BLOCK - 1) // BLOCK
    return gl.where(request >= plan.last, gl.minimum(plan.last_end, tiles), tiles)


@gluon.jit
def next_request(plan, request):
    request = request + 1
    end = request_end(plan, request)
    while (request <= plan.last) & (end <= 0):
        request = request + 1
        end = request_end(plan, request)
    return request, end


@gluon.jit
def segment_end(plan, request, lo, end):
    """Where the segment from tile `lo` stops: at the end of its chunk, or of the part's share."""
    if plan.CHUNKED:
        chunk = gl.load(plan.requests + gl.minimum(request, plan.last) * 4 + 2)
        return gl.minimum(lo + chunk, end)
    else:
        return end


@gluon.jit
def next_segment(plan, request, hi, end):
    """(request, lo, hi, end) of the segment after the one that stops at tile `hi`."""
    lo = hi + 0
    if plan.CHUNKED:
        if lo >= end:
            request, end = next_request(plan, request)
            lo = lo * 0
    else:
        request, end = next_request(plan, request)
        lo = lo * 0
    return request, lo, segment_end(plan, request, lo, end), end


@gluon.jit
def step_on(request, split, after, after_lo, after_hi, after_end):
    """(request, lo, hi, end, split) of a loop that goes on with the segment `after`, of
    `next_segment`: the next one of its request, or the first of another."""
    # Copies: a loop does not carry one value under two names.
    return (
        after + 0, after_lo + 0, after_hi + 0, after_end + 0,
        gl.where(after == request, split + 1, 0),
    )  # fmt: skip


@aggregate
class Start:
    """This program's row of the plan (decode/plan/kernel.py): read once, for all warpgroups,
    while the barriers are made."""

    request: gl.tensor
    lo: gl.tensor
    last: gl.tensor
    last_end: gl.tensor
    split: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, request, lo, last, last_end, split, end):
        self.request = request
        self.lo = lo
        self.last = last
        self.last_end = last_end
        self.split = split
        self.end = end


@gluon.jit
def read_start(parts):
    row = parts + gl.program_id(1) * 8
    return Start(
        gl.load(row + 0), gl.load(row + 1), gl.load(row + 2),
        gl.load(row + 3), gl.load(row + 4), gl.load(row + 5),
    )  # fmt: skip


@gluon.jit
def start_segment(start, seq_lens, requests, table, table_stride, CHUNKED: gl.constexpr):
    """(part, request, lo, hi, end, split) of this program."""
    # A part without work says last = -1; reads past the end below are clamped to request `last`.
    request = gl.where(start.last < 0, 1, start.request)
    last = gl.maximum(start.last, 0)
    lo = start.lo + 0
    split = start.split + 0
    end = start.end + 0
    plan = Part(last, start.last_end, seq_lens, requests, table, table_stride, CHUNKED)
    if (request <= last) & (lo >= end):
        request, end = next_request(plan, request)
        lo = lo * 0
        split = split * 0
    return plan, request, lo, segment_end(plan, request, lo, end), end, split
