# SPDX-License-Identifier: Apache-2.0
"""What the Hopper sparse kernel serves, and how it splits few tokens over the device. Imports no
Triton, as decode/hopper/support.py."""

import torch

from mla_kernels.decode.hopper.support import BLOCK
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse.hopper.shares import share_split
from mla_kernels.sparse.triton.tiles import (
    Split,
    Turn,
    even_turns,
    fixed_split,
    partial_bytes,
)

# Tokens that no device splits (tiles.FULL waves of at most 512 SMs).
MOST_SPLIT = 2048
FORMATS = {torch.bfloat16: "bf16", torch.uint8: "fp8_ds_mla"}


def choose_turns(T: int, H: int, K: int, device: torch.device) -> tuple[Turn, ...]:
    """The launches of such a call on this device, one program an SM.

    Ranges that would run in several waves are equal shares instead: of 40 tokens with 128 heads 20
    tiles a program, and not 11 twice. Those of one wave, and whole tokens, are faster as they are
    (benchmarks/versions/sparse.md)."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    row_tiles = -(-H // BLOCK)
    turns = even_turns(T, row_tiles, K, BLOCK, sms, sms)
    splits = turns[0].split.splits
    if len(turns) == 1 and splits > 1 and T * row_tiles * splits > sms:
        shares = share_split(T, row_tiles, K, sms)
        if shares is not None:
            return (Turn(0, T, shares),)
    return turns


def choose_grid(
    T: int, H: int, K: int, kv_format: str, split: Split, device: torch.device
) -> tuple[int, int]:
    """A program a token, tile of heads and range of its slots. With bf16 rows and one range as many
    as run at once, which go from token to token (stream.py), as they do with shares; there the
    second number is the heads' tile."""
    row_tiles = -(-H // BLOCK)
    if split.shares:
        return -(-T * -(-K // BLOCK) * BLOCK // split.span), row_tiles
    if kv_format != "bf16" or split.splits > 1:
        return T * row_tiles, split.splits
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(T, max(1, sms // row_tiles)), row_tiles


def largest_workspace(T: int, H: int, K: int, device: torch.device) -> int:
    """Bytes that up to T tokens need; deterministic calls a token at least."""
    most = partial_bytes(min(T, 1), H, fixed_split(K).splits, MlaDims().kv_lora_rank)
    for t in range(1, T + 1):
        for turn in choose_turns(t, H, K, device):
            tokens, splits = turn.stop - turn.start, turn.split.splits
            most = max(most, partial_bytes(tokens, H, splits, MlaDims().kv_lora_rank))
        if t > MOST_SPLIT:
            break
    return most


def refusal(
    dims: MlaDims,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    contiguous: bool,
    aligned: bool,
) -> str | None:
    """Why this kernel cannot serve such a batch; None if it can."""
    if dims != MlaDims():
        return f"it needs kv_lora_rank 512 and rope 64, got {dims.kv_lora_rank} and {dims.rope_dim}"
    if dtype != torch.bfloat16:
        return f"it needs q in bf16, got {dtype}"
    if kv_cache_dtype not in FORMATS:
        return f"it needs a cache of {list(FORMATS.values())}, got {kv_cache_dtype}"
    if not contiguous:
        return "it needs a contiguous q, from a multiple of 16 bytes on"
    if not aligned:
        return "it needs cache rows at multiples of 16 bytes"
    return None
