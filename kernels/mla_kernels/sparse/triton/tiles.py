# SPDX-License-Identifier: Apache-2.0
"""Which tile the sparse kernel uses, and into how many ranges of slots it cuts a token."""

from dataclasses import dataclass
from functools import cache

import torch

from mla_kernels.arch import KB, Arch, arch_of
from mla_kernels.decode.triton.few_rows.tiles import FewRowsTile
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse.triton.few_rows.tiles import choose_few_rows

# What starting a program costs, in tiles of 64 slots: finding the last slot, filling the pipeline.
OVERHEAD = 2.0
# What a merge costs at all, and for each program's partial result, in the same unit.
MERGE = 1.0
PARTIAL = 2.0
MAX_SPLITS = 64
# Views of later tokens are aligned as the first are, so that no kernel is compiled for others.
ALIGNED = 16
# Two launches are taken for so much less: of the cost, which is an estimate.
WORTH = 0.95
# Tokens that fill the device so many times are not split.
FULL = 4
# Slots of a range in deterministic mode. Measured on an H200: as one range of 2048 slots a token of
# 16 heads takes 82 us instead of 9.
FIXED_SPAN = 512
# Workspace that the deterministic mode allocates at most if it is given none; more only where one
# token needs it: with 128 heads above 261000 slots.
FIXED_WORKSPACE = 2**27
INTERPRETED_SMS = 4
FORMATS = ("float", "fp8", "fp8_ds_mla")


@dataclass(frozen=True)
class Tile:
    """One specialisation of the sparse kernel.

    rows        heads of a program
    tokens      slots of one step
    warps, stages, max_registers   as Triton's num_warps, num_stages, maxnreg
    parts       of a row (attend.py)
    wgmma       the dots will be wgmma (Hopper, 64 heads)
    per_sm      programs that share an SM
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    max_registers: int = 255
    parts: int = 4
    wgmma: bool = False
    per_sm: int = 1


@dataclass(frozen=True)
class Split:
    """splits ranges of span slots a token. With shares, of the Hopper kernel: ranges of span slots
    of all tokens' on end, each token's padded to whole tiles, so that one can hold the end of a
    token and the next one's beginning; `splits` a token at most."""

    splits: int
    span: int
    shares: bool = False


@dataclass(frozen=True)
class Turn:
    """Tokens start to stop - 1 of a call, in one launch."""

    start: int
    stop: int
    split: Split


def choose_tile(heads: int, kv_format: str, arch: Arch, *, half: bool = False) -> Tile:
    """The tile for `heads` query heads: few are not padded to 64. `half`: fp16 queries."""
    wgmma = arch.tensor_core == "wgmma"
    if heads > 32 and wgmma:
        if kv_format == "float":
            return Tile(64, 32, warps=8, stages=3, parts=2, wgmma=True)
        return Tile(64, 64, warps=8, stages=2, parts=1, wgmma=True)
    if arch.tensor_core == "mfma":  # compiled only, as in decode/triton/tiles.py
        rows = 16 if heads <= 16 else 32
        tokens = 32 if rows == 16 and kv_format != "fp8_ds_mla" else 16
        return Tile(rows, tokens, warps=4, stages=1)
    small = arch.shared_memory < 128 * KB
    integer = kv_format != "float" and not arch.e4m3_convert
    if heads > 16:
        if wgmma and (kv_format == "fp8_ds_mla" or half):
            return Tile(32, 64, warps=8, stages=2)  # with 4 warps the loop spills
        if wgmma:
            return Tile(32, 32, warps=4, stages=3, per_sm=2)
        return Tile(32, 32, warps=8, stages=2)
    if integer:  # conversions by integer operations spill with fewer warps
        return Tile(16, 32, warps=8, stages=2 if small else 3)
    return Tile(16, 32, warps=4, stages=2 if small else 3, per_sm=1 if small else 2)


def unaligned_tile(heads: int, kv_format: str, arch: Arch) -> Tile:
    """The tile for cache rows that do not start at multiples of 16 bytes: they come to registers a
    few bytes at a time, where more slots than these spill, and conversions by integer operations
    with more heads."""
    integer = kv_format != "float" and not arch.e4m3_convert and arch.tensor_core == "mma"
    rows = 16 if heads <= 16 or integer else 32
    return Tile(rows, 16, warps=4 if arch.tensor_core == "mfma" else 8, stages=1)


def choose_split(T: int, H: int, K: int, tile: Tile | FewRowsTile, device: torch.device) -> Split:
    """How T tokens of H heads and K slots are cut on this device."""
    row_tiles, (capacity, alone) = -(-H // tile.rows), capacities(tile, device)
    return even_split(T, row_tiles, K, tile.tokens, capacity_for(T * row_tiles, capacity, alone))


def choose_turns(
    T: int, H: int, K: int, tile: Tile | FewRowsTile, device: torch.device
) -> tuple[Turn, ...]:
    """The launches of such a call, with `choose_split` of each one's tokens."""
    return even_turns(T, -(-H // tile.rows), K, tile.tokens, *capacities(tile, device))


def capacities(tile: Tile | FewRowsTile, device: torch.device) -> tuple[int, int]:
    """Programs that run at once, and as many as shall if few enough (`capacity_for`)."""
    sms = INTERPRETED_SMS
    if device.type != "cpu":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    if isinstance(tile, FewRowsTile):
        return sms * tile.ctas, sms
    return sms * tile.per_sm, sms * tile.per_sm


def capacity_for(programs: int, capacity: int, alone: int) -> int:
    """How many programs shall run at once: `alone`, which give each an SM to itself, if that is
    room enough, as they are faster so and leave half as much to merge."""
    return alone if 2 * programs <= alone else capacity


def fixed_split(K: int) -> Split:
    """Ranges that do not depend on how many tokens there are."""
    return Split(max(1, -(-K // FIXED_SPAN)), FIXED_SPAN)


def tokens_at_once(H: int, splits: int, kv_lora_rank: int, workspace_bytes: int) -> int:
    """Tokens whose partial results fit a workspace; of many a multiple of ALIGNED."""
    fit = workspace_bytes // partial_bytes(1, H, splits, kv_lora_rank)
    return fit - fit % ALIGNED if fit >= ALIGNED else fit


def split_cost(splits: int, T: int, row_tiles: int, K: int, tokens: int, capacity: int) -> float:
    """What T tokens in so many ranges take, in tiles of 64 slots, where `capacity` programs run:
    the longest chain of tiles, and the merge."""
    tiles = max(1, -(-K // tokens))
    waves = -(-T * row_tiles * splits // capacity)
    chain = waves * (-(-tiles // splits) * tokens / 64 + OVERHEAD)
    merge = MERGE + T * splits / 128 + waves * PARTIAL
    return chain + (merge if splits > 1 else 0.0)


@cache
def even_split(T: int, row_tiles: int, K: int, tokens: int, capacity: int) -> Split:
    """The split that takes least, where `capacity` programs run."""
    tiles = max(1, -(-K // tokens))
    most = 1 if T * row_tiles >= FULL * capacity else min(tiles, MAX_SPLITS)
    splits = min(range(1, most + 1), key=lambda s: split_cost(s, T, row_tiles, K, tokens, capacity))
    span = -(-tiles // splits)
    return Split(-(-tiles // span), span * tokens)


@cache
def even_turns(
    T: int, row_tiles: int, K: int, tokens: int, capacity: int, alone: int
) -> tuple[Turn, ...]:
    """One launch, or two: where the last of a few waves of programs would leave much of the device
    idle, its tokens are a launch of their own, in ranges."""

    def turn(start: int, stop: int) -> tuple[Turn, float]:
        size = stop - start
        room = capacity_for(size * row_tiles, capacity, alone)
        split = even_split(size, row_tiles, K, tokens, room)
        cost = split_cost(split.splits, size, row_tiles, K, tokens, room)
        return Turn(start, stop, split), cost

    together, cost = turn(0, T)
    whole = T * row_tiles // capacity * capacity // row_tiles // ALIGNED * ALIGNED
    if not 0 < whole < T or T * row_tiles >= FULL * capacity:
        return (together,)
    (first, of_first), (rest, of_rest) = turn(0, whole), turn(whole, T)
    return (first, rest) if of_first + of_rest < WORTH * cost else (together,)


def partial_bytes(T: int, H: int, splits: int, kv_lora_rank: int) -> int:
    """Bytes of all partial results: O, l and k in fp32; none for one range a token."""
    return 4 * T * splits * H * (kv_lora_rank + 2) if splits > 1 else 0


def largest_workspace(T: int, H: int, K: int, kv_lora_rank: int, device: torch.device) -> int:
    """Bytes that up to T tokens need, in any cache format; deterministic calls a token at least."""
    arch = arch_of(device)
    most = partial_bytes(min(T, 1), H, fixed_split(K).splits, kv_lora_rank)
    dims = MlaDims(kv_lora_rank, 64)
    used: list[Tile | FewRowsTile] = []
    for kv_format in FORMATS:
        used.append(choose_tile(H, kv_format, arch))
        few_rows = choose_few_rows(H, dims, kv_format, arch)
        if few_rows is not None:
            used.append(few_rows)
    for tile in dict.fromkeys(used):
        for t in range(1, T + 1):
            splits = choose_split(t, H, K, tile, device).splits
            most = max(most, partial_bytes(t, H, splits, kv_lora_rank))
            if t * H >= FULL * 1024 * tile.rows:
                break
    return most
