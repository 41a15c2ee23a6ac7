# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF005 (Triton adds tuples, and knows no stars)
# mypy: disable-error-code="assignment"
"""scores.py's kernel for several rows a tile: drafts of one request, or tokens of a prompt.

A page is loaded and converted once for all rows of a tile that read it; each row is a product of
its own, issued while the row before it is weighed and summed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from mla_kernels.indexer.hopper.scores import (
    BYTES,
    KEYS,
    PAGE,
    PROPAGATE_NAN,
    QUERY,
    QUERY_LOAD,
    SCALE_VECTOR,
    SCALES,
    TILE_LIST,
    D,
    add,
    load_page,
    shuffled,
)
from mla_kernels.indexer.triton.scores import tile_rows
from mla_kernels.topk.triton.keys import GROUP, ordered_key
from mla_kernels.triton_common.gluon_compat import cta_barrier, reinterpret


@gluon.jit
def tile_pages(lengths_ptr, first, stop, max_len, ROWS: gl.constexpr):
    """Pages up to the last key that one of the rows [first, stop) sees."""
    longest = first * 0
    for i in gl.static_range(ROWS):
        length = gl.load(lengths_ptr + first + i, mask=first + i < stop, other=0)
        longest = gl.maximum(longest, length)
    return (gl.minimum(longest, max_len) + PAGE - 1) // PAGE


@gluon.jit
def score_pages(
    keys_desc, scales_desc, table, first, stop, keys, scales, full, slot, phase, q_shared, weights,
    lengths, own, row, scores_ptr, level1_ptr, stride_scores, stride_level1,
    DOTS: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of pages [first, stop) of a request for its `own` rows of a tile, of which `row` is
    the first. Returns the ring's next slot and phase."""
    KEY_OPERAND: gl.constexpr = gl.DotOperandLayout(0, DOTS, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(1, DOTS)
    HEAD: gl.constexpr = gl.SliceLayout(0, DOTS)
    token = gl.arange(0, PAGE, TOKEN)
    ahead = slot
    for i in gl.static_range(STAGES):
        if first + i < stop:
            page = gl.load(table + first + i)
            load_page(keys_desc, scales_desc, page, keys, scales, full, ahead)
            ahead = gl.where(ahead + 1 == STAGES, 0, ahead + 1)
    page = gl.load(table + gl.minimum(first + STAGES, stop - 1))
    for n in range(first, stop):
        mbarrier.wait(full.index(slot), phase)
        codes = keys.index(slot).load(BYTES)
        scale = reinterpret(scales.index(slot), gl.float32, [PAGE], SCALE_VECTOR).load(TOKEN)
        cta_barrier()
        if n + STAGES < stop:
            load_page(keys_desc, scales_desc, page, keys, scales, full, slot)
        page = gl.load(table + gl.minimum(n + STAGES + 1, stop - 1))
        k = gl.convert_layout(shuffled(codes), KEY_OPERAND, assert_trivial=True)
        issued = product(k, q_shared.index(0), DOTS, HEADS)
        for i in gl.static_range(ROWS):
            if i + 1 < ROWS:
                following = product(k, q_shared.index(i + 1), DOTS, HEADS)
                dots, k = warpgroup_mma_wait(1, deps=(issued, k))
                issued = following
            else:
                dots, k = warpgroup_mma_wait(0, deps=(issued, k))  # its registers are read till now
            # NaN passes through the ReLU as it does in torch.
            relu = gl.maximum(dots, 0.0, propagate_nan=PROPAGATE_NAN)
            weight = weights.index(i).load(HEAD)  # 64 registers for 4 rows, if they were kept
            score = gl.sum(relu * weight[None, :], 1) * scale
            score = gl.where(n * PAGE + token < lengths[i], score, float("-inf"))
            at = scores_ptr + (row + i) * stride_scores + n * PAGE + token
            gl.store(at, score, mask=(token < PAGE) & own[i])
            if level1_ptr is not None:
                best = gl.max(gl.reshape(ordered_key(score), [PAGE // GROUP, GROUP]), 1)
                group = gl.arange(0, PAGE // GROUP, best.type.layout)
                at = level1_ptr + (row + i) * stride_level1 + n * (PAGE // GROUP) + group
                gl.store(at, best.to(gl.int32, bitcast=True), mask=(group >= 0) & own[i])
        wrap = slot + 1 == STAGES
        slot = gl.where(wrap, 0, slot + 1)
        phase = gl.where(wrap, phase ^ 1, phase)
    return slot, phase


@gluon.jit
def product(k, q, DOTS: gl.constexpr, HEADS: gl.constexpr):
    """k [PAGE, D] times q [HEADS, D], not waited for."""
    zeros = gl.zeros([PAGE, HEADS], gl.float32, DOTS)
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit(
    do_not_specialize=[
        "num_tiles",
        "num_rows",
        "rows_per_request",
        "stride_weights",
        "stride_table",
    ]
)
def hopper_several_scores_kernel(
    keys_desc,  # [num_blocks * 66, 128] uint8, boxes [64, 128]
    scales_desc,  # the same, boxes [2, 128]
    q_ptr,  # [T, H, 128] uint8 (e4m3)
    weights_ptr,  # [T, H] fp32
    table_ptr,  # [B, max_blocks] int32
    requests_ptr,  # [T] int32: the request of each row, -1 for padding; or None
    lengths_ptr,  # [T] int32
    scores_ptr,  # [T, 64 * max_blocks] fp32, written up to the end of each row's last page
    level1_ptr,  # [T, 8 * max_blocks] int32, likewise, or None: the top-k's keys of 8 tokens each
    num_tiles,
    num_rows,
    rows_per_request,
    max_len,
    stride_q_row,
    stride_q_head,
    stride_weights,
    stride_table,
    stride_scores,
    stride_level1,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
):
    gdc_launch_dependents()
    RAGGED: gl.constexpr = requests_ptr is not None
    DOTS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEADS, 16]
    )
    keys = gl.allocate_shared_memory(gl.uint8, [STAGES, PAGE, D], KEYS)
    scales = gl.allocate_shared_memory(gl.uint8, [STAGES, 2, D], SCALES)
    q_shared = gl.allocate_shared_memory(gl.float16, [ROWS, HEADS, D], QUERY)
    weights = gl.allocate_shared_memory(gl.float32, [ROWS, HEADS], SCALE_VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    # This program's share of the pages of all tiles, counted through.
    tiles = gl.arange(0, TILES, TILE_LIST)
    first_rows, stop_rows, _ = tile_rows(tiles, num_rows, rows_per_request, ROWS, RAGGED)
    stop_rows = gl.where(tiles < num_tiles, stop_rows, 0)
    pages = tile_pages(lengths_ptr, first_rows, stop_rows, max_len, ROWS)
    ends = gl.associative_scan(pages, 0, add)
    total = gl.max(ends, 0)
    share = gl.cdiv(total, gl.num_programs(0))
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)

    h = gl.arange(0, HEADS, gl.SliceLayout(1, QUERY_LOAD))
    d = gl.arange(0, D, gl.SliceLayout(0, QUERY_LOAD))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, DOTS))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    while begin < end:
        tile = gl.sum((ends <= begin).to(gl.int32), 0)
        tile_begin = gl.max(gl.where(ends <= begin, ends, 0), 0)
        tile_end = gl.minimum(end, gl.sum(gl.where(tiles == tile, ends, 0), 0))
        first_row, stop_row, request = tile_rows(tile, num_rows, rows_per_request, ROWS, RAGGED)
        first, stop = begin - tile_begin, tile_end - tile_begin
        row64 = first_row.to(gl.int64)
        lengths, inside, requests = (), (), ()
        for i in gl.static_range(ROWS):
            here = first_row + i < stop_row
            q_row = q_ptr + (row64 + i) * stride_q_row
            q_at = q_row + (h * stride_q_head)[:, None] + d[None, :]
            codes = gl.load(q_at, mask=(h < H)[:, None] & here, other=0)
            q_shared.index(i).store(shuffled(codes))
            weights_at = weights_ptr + (row64 + i) * stride_weights + head
            weights.index(i).store(gl.load(weights_at, mask=(head < H) & here, other=0.0))
            length = gl.load(lengths_ptr + row64 + i, mask=here, other=0)
            lengths = lengths + (length,)
            inside = inside + (here,)
            if RAGGED:
                of_row = gl.load(requests_ptr + row64 + i, mask=here, other=-1)
                requests = requests + (of_row,)
        fence_async_shared()
        cta_barrier()
        for n in range(ROWS if RAGGED else 1):
            own, last = inside, stop
            seen = n < 0
            if RAGGED:  # row n's request and the rows that are its own, unless one before was
                for i in gl.static_range(ROWS):
                    request = gl.where(n == i, requests[i], request)
                seen = request < 0
                longest = gl.to_tensor(0)
                own = ()
                for i in gl.static_range(ROWS):
                    same = inside[i] & (requests[i] == request)
                    own = own + (same,)
                    longest = gl.where(same, gl.maximum(longest, lengths[i]), longest)
                    seen = seen | (same & (i < n))
                last = gl.minimum(stop, (longest + PAGE - 1) // PAGE)
            if (first < last) & (seen == 0):
                slot, phase = score_pages(
                    keys_desc, scales_desc, table_ptr + request.to(gl.int64) * stride_table,
                    first, last, keys, scales, full, slot, phase, q_shared, weights, lengths,
                    own, row64, scores_ptr, level1_ptr, stride_scores, stride_level1,
                    DOTS, HEADS, ROWS, STAGES,
                )  # fmt: skip
        begin += stop - first
        cta_barrier()  # all have done with q
