# SPDX-License-Identifier: Apache-2.0
"""Cases whose exact result is known: integer arithmetic end to end, so one wrong token shows."""

import torch

from mla_kernels.layouts import MlaDims
from mla_kernels.numerics import LOG2E
from mla_kernels.testing.cases import DecodeCase, decode_case


def uniform_weights(
    num_tokens: int = 2**13, *, num_heads: int = 16, seed: int = 0, device: str = "cpu"
) -> tuple[DecodeCase, torch.Tensor]:
    """q = 0 and integer values in -8..8: the exact mean over a power of two of tokens.

    Returns (case, out [1, 1, H, 512] bf16).
    """
    dims = MlaDims()
    g = torch.Generator().manual_seed(seed)
    keys = torch.randint(-8, 9, (num_tokens, dims.head_dim), generator=g).float()
    q = torch.zeros(1, 1, num_heads, dims.head_dim)
    case = decode_case([num_tokens], q=q.to(device), tokens=[keys.to(device)], device=device)
    mean = keys[:, : dims.kv_lora_rank].double().mean(0).to(torch.bfloat16)
    return case, mean.expand(1, 1, num_heads, -1).to(device)


def integer_ramp(
    exponents: torch.Tensor, *, num_heads: int = 16, seed: int = 0, device: str = "cpu"
) -> tuple[DecodeCase, torch.Tensor]:
    """Token i has the weight 2^exponents[i] exactly, and integer values in -8..8.

    The scores go through three rope columns of q whose bf16 parts add up to 1 / (scale * log2 e).
    Jumps up to 20 keep every partial sum exact. Returns (case, out [1, 1, H, 512] bf16).
    """
    dims = MlaDims()
    g = torch.Generator().manual_seed(seed)
    scale = dims.head_dim**-0.5
    unit = 1.0 / (scale * LOG2E)
    parts = []
    left = torch.tensor(unit, dtype=torch.float64)
    for _ in range(3):
        parts.append(left.to(torch.bfloat16).double())
        left = left - parts[-1]
    keys = torch.zeros(exponents.numel(), dims.head_dim)
    keys[:, : dims.kv_lora_rank] = torch.randint(
        -8, 9, (exponents.numel(), dims.kv_lora_rank), generator=g
    ).float()
    keys[:, dims.kv_lora_rank : dims.kv_lora_rank + 3] = exponents.float()[:, None]
    q = torch.zeros(1, 1, num_heads, dims.head_dim)
    q[..., dims.kv_lora_rank : dims.kv_lora_rank + 3] = torch.stack(parts).float()
    case = decode_case(
        [exponents.numel()], q=q.to(device), tokens=[keys.to(device)], scale=scale, device=device
    )
    weight = torch.exp2((exponents - exponents.max()).double())
    exact = weight @ keys[:, : dims.kv_lora_rank].double() / weight.sum()
    return case, exact.to(torch.bfloat16).expand(1, 1, num_heads, -1).to(device)
