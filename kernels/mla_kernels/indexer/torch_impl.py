# SPDX-License-Identifier: Apache-2.0
"""Indexer scores in torch, batched over requests; fast enough to serve from a CPU.

A segment is a run of rows of one request, so that its keys are gathered and decoded once.
"""

from collections.abc import Iterator

import torch

from mla_kernels.cache.rows import as_words
from mla_kernels.checks import check_range
from mla_kernels.decode.torch_scratch import scratch
from mla_kernels.layouts import IndexerLayout
from mla_kernels.torch_modes import without_modes

# Elements of the largest temporary: 16 MB in fp32, which stay in a CPU's last cache.
MAX_ELEMENTS = 2**22
# What the bits of a NaN of e4m3 would be as a number; the largest is 448.
_NAN_AS_NUMBER = 480.0


@without_modes
def indexer_scores_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    request_ids: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """See `indexer_scores`; lengths [T] int32. Returns [T, width] fp32.

    On a CPU `width` ends with the page of the longest row; elsewhere that would need a
    synchronisation, and it is the width of the block table.
    """
    T, H, D = q.shape
    block = k_cache.shape[1]
    pages = block_table.shape[1]
    if q.device.type == "cpu":
        pages = min(pages, -(-max(int(lengths.max()) if T else 0, 0) // block))
    width = pages * block
    scores = q.new_full((T, width), float("-inf"), dtype=torch.float32)
    if T == 0 or width == 0 or not len(block_table):
        return scores
    q = q.float()
    columns = torch.arange(width, dtype=torch.int32, device=q.device)
    if deterministic:
        segments = _rows_alone(T, block_table.shape[0], request_ids)
    else:
        segments = _segments(T, block_table.shape[0], request_ids)
    for first, requests, R in segments:
        # Unused table entries may hold anything: only the pages of the longest row are followed.
        stop = first + len(requests) * R
        table = block_table[requests, :pages]
        longest = lengths[first:stop].view(-1, R).amax(1, keepdim=True)
        table = torch.where(columns[::block] < longest, table, 0)
        if table.device.type == "cpu" and table.numel():  # where reading it costs no wait
            for entry in (int(table.min()), int(table.max())):
                check_range("block_table entries", entry, 0, k_cache.shape[0] - 1)
        step = max(min(MAX_ELEMENTS // (width * D), len(requests)), 1)
        for s in range(0, len(requests), step):
            keys, scales = _gather_keys(k_cache, table[s : s + step])
            S = keys.shape[0]
            a = first + s * R
            rows = max(MAX_ELEMENTS // (S * H * width), 1)
            segment_q = q[a : a + S * R].view(S, R, H, D)
            segment_w = weights[a : a + S * R].view(S, R, H)
            segment = scores[a : a + S * R].view(S, R, width)
            seen = lengths[a : a + S * R].view(S, R)
            for r in (slice(r, r + rows) for r in range(0, R, rows)):
                # The first tokens of a prompt see few keys; elsewhere than on a CPU a look waits.
                n = max(int(seen[:, r].max()), 0) if q.device.type == "cpu" else width
                part = _weighted_relu(segment_q[:, r], keys[:, :n], segment_w[:, r])
                segment[:, r, :n] = part if scales is None else part * scales[:, None, :n]
    return scores.masked_fill_(columns >= lengths[:, None], float("-inf"))


def _segments(
    T: int, B: int, request_ids: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor | list[int], int]]:
    """(first row, requests, rows of each) of segments that are computed together."""
    if request_ids is None:
        yield 0, list(range(B)), T // B
    elif request_ids.device.type == "cpu":
        requests, counts = torch.unique_consecutive(request_ids, return_counts=True)
        first = 0
        for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
            if request >= 0:
                yield first, [request], count
            first += count
    else:  # run lengths are not known without a synchronisation
        yield 0, request_ids.clamp(min=0), 1


def _rows_alone(
    T: int, B: int, request_ids: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor | list[int], int]]:
    """A segment a row: in a product of several the library may add up each in another order."""
    for t in range(T):
        yield t, [t // (T // B)] if request_ids is None else request_ids[t : t + 1].clamp(min=0), 1


def _weighted_relu(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """q [S, R, H, D], keys [S, L, D], weights [S, R, H] -> [S, R, L]."""
    S, R, H, _ = q.shape
    dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).relu_()
    return torch.bmm(weights.reshape(S * R, 1, H), dots.view(S * R, H, -1)).view(S, R, -1)


def _gather_keys(
    k_cache: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys [S, L, D] fp32 of the pages in table [S, P], and their scales [S, L] (None: bf16). Valid
    until the next call of this thread."""
    S, (_, block, width) = len(table), k_cache.shape
    words = as_words(k_cache.flatten(1))
    index = table.reshape(-1)
    if table.device.type == "cpu":
        gathered = scratch("rows", (len(index), words.shape[1]), words.dtype)
        torch.index_select(words, 0, index, out=gathered)
    else:
        gathered = words.index_select(0, index)
    gathered = gathered.view(k_cache.dtype)
    if k_cache.dtype == torch.bfloat16:
        return gathered.view(S, -1, width).float(), None
    layout = IndexerLayout(block_size=block, head_dim=width - 4)
    keys = e4m3_to_f32(gathered[:, : layout.scale_offset]).view(S, -1, layout.head_dim)
    scales = gathered[:, layout.scale_offset :].contiguous().view(torch.float32)
    return keys, scales.view(S, -1)


def e4m3_to_f32(codes: torch.Tensor) -> torch.Tensor:
    """uint8 e4m3 codes [rows, n] -> fp32, exact; on a CPU valid until the next call of this thread,
    and several times as fast as torch's own conversion."""
    if codes.device.type != "cpu":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    # The code's exponent and mantissa become those of an fp16 whose exponent is 8 too small: as an
    # fp32 14 codes would be subnormal, and 0 where the caller flushes such numbers.
    bits = scratch("halves", tuple(codes.shape), torch.int16).copy_(codes.view(torch.int8))
    bits <<= 7
    bits &= -0x4080  # the copies of the sign
    halves = bits.view(torch.float16)
    values = scratch("keys", tuple(codes.shape), torch.float32).copy_(halves).mul_(256.0)
    if values.numel():
        low, high = torch.aminmax(values)
        if max(-float(low), float(high)) == _NAN_AS_NUMBER:
            values.masked_fill_(values.abs() == _NAN_AS_NUMBER, torch.nan)
    return values
