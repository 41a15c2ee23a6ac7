# SPDX-License-Identifier: Apache-2.0
"""Small kernels over rows: visible lengths, -inf past them, scores of what was chosen, positions to
slots."""

import triton
import triton.language as tl


@triton.jit
def row_request(requests_ptr, row, inside, rows_per_request, RAGGED: tl.constexpr):
    """Request of each row, -1 for padding."""
    if RAGGED:
        request = tl.load(requests_ptr + row, mask=inside, other=-1)
    else:
        request = row // rows_per_request
    return request


@triton.jit(do_not_specialize=["num_rows", "rows_per_request"])
def lengths_kernel(
    seq_lens_ptr,  # [B] int32
    positions_ptr,  # [T] int32, where HAS_POSITIONS
    requests_ptr,  # [T] int32, where RAGGED
    out_ptr,  # [T] int32, written
    num_rows,
    rows_per_request,
    BLOCK: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    request = row_request(requests_ptr, row, inside, rows_per_request, RAGGED)
    length = tl.load(seq_lens_ptr + request, mask=inside & (request >= 0), other=0)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + row, mask=inside, other=-1)
        length = tl.minimum(length, tl.minimum(position, 2147483646) + 1)
    else:
        length -= rows_per_request - 1 - row % rows_per_request
    tl.store(out_ptr + row, tl.maximum(length, 0), mask=inside)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "steps"])
def token_rows_kernel(
    starts_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    requests_ptr,  # [T] int32, written
    lengths_ptr,  # [T] int32, written
    num_requests,
    num_tokens,
    steps,  # of the search: bits of num_requests
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    # The first request that ends behind the token, num_requests if none does.
    request = tl.zeros((BLOCK,), tl.int32)
    past = request + num_requests
    for _ in range(steps):
        middle = (request + past) // 2
        searching = request < past
        ends = tl.load(starts_ptr + 1 + middle, mask=searching, other=0)
        request = tl.where(searching & (ends <= token), middle + 1, request)
        past = tl.where(searching & (ends > token), middle, past)
    known = inside & (request < num_requests)
    end = tl.load(starts_ptr + 1 + request, mask=known, other=0)
    length = tl.load(seq_lens_ptr + request, mask=known, other=0) + token + 1 - end
    tl.store(requests_ptr + token, tl.where(known, request, -1), mask=inside)
    tl.store(lengths_ptr + token, tl.where(known, tl.maximum(length, 0), 0), mask=inside)


@triton.jit
def fill_tail_kernel(
    lengths_ptr,  # [T] int32
    scores_ptr,  # [T, width] fp32, written from the end of each row's last page
    width,
    stride_scores,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + row), 0), width)
    begin = tl.cdiv(length, PAGE) * PAGE
    begin += tl.program_id(1) * BLOCK
    for start in range(begin, width, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        minus_inf = tl.full((BLOCK,), float("-inf"), tl.float32)
        tl.store(scores_ptr + row * stride_scores + i, minus_inf, mask=i < width)


@triton.jit(do_not_specialize=["rows_per_request"])
def positions_to_slots_kernel(
    positions_ptr,  # [T, K] int32
    table_ptr,  # [B, max_blocks] int32
    requests_ptr,  # [T] int32, where RAGGED
    out_ptr,  # [T, K] int32, written
    num_selected,
    max_blocks,
    rows_per_request,
    block_size,
    stride_positions,
    stride_table,
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_selected
    request = row_request(requests_ptr, row, True, rows_per_request, RAGGED).to(tl.int64)
    position = tl.load(positions_ptr + row * stride_positions + i, mask=inside, other=-1)
    block = position // block_size
    found = (position >= 0) & (block < max_blocks) & (request >= 0)
    page = tl.load(table_ptr + request * stride_table + block, mask=found, other=0)
    slot = tl.where(found, page * block_size + position % block_size, -1)
    tl.store(out_ptr + row * num_selected + i, slot, mask=inside)


@triton.jit
def chosen_values_kernel(
    scores_ptr,  # [T, width] fp32
    chosen_ptr,  # [T, K] int32
    values_ptr,  # [T, K] fp32, written
    num_chosen,
    stride_scores,
    stride_chosen,
    stride_values,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_chosen
    column = tl.load(chosen_ptr + row * stride_chosen + i, mask=inside, other=-1)
    found = column >= 0
    score = tl.load(scores_ptr + row * stride_scores + column, mask=found, other=float("-inf"))
    tl.store(values_ptr + row * stride_values + i, score, mask=inside)
