# SPDX-License-Identifier: Apache-2.0
"""The public function `mla_decode`."""

import math
from typing import Any

import torch

from mla_kernels import checks
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.decode.torch_impl import mla_decode_torch
from mla_kernels.layouts import MlaDims


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int = 512,
    kv_scale: float | torch.Tensor | None = None,
    causal: bool = True,
    rescale: str = "pow2",
    impl: str = "auto",
    plan: Any = None,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA attention of s_q new tokens a request over its paged cache."""
    checks.check_shape("q", q, ("B", "s_q", "H", "Dk"))
    checks.check_dtype("q", q, checks.FLOAT_DTYPES)
    B, Dk = q.shape[0], q.shape[3]
    if not 0 < kv_lora_rank < Dk:
        raise ValueError(f"Expected kv_lora_rank in 1..{Dk - 1} (below Dk), got {kv_lora_rank}")
    if not math.isfinite(scale):
        raise ValueError(f"Expected a finite softmax scale, got {scale}")
    checks.check_kv_cache(kv_cache, MlaDims(kv_lora_rank, Dk - kv_lora_rank), kv_scale)
    checks.check_shape("block_table", block_table, (B, "max_blocks"))
    checks.check_dtype("block_table", block_table, checks.INDEX_DTYPES)
    checks.check_shape("seq_lens", seq_lens, (B,))
    checks.check_dtype("seq_lens", seq_lens, checks.INDEX_DTYPES)
    for name, x in (("kv_cache", kv_cache), ("block_table", block_table), ("seq_lens", seq_lens)):
        checks.check_device(name, x, q.device)
    if validate:
        checks.check_contents(block_table, seq_lens, kv_cache.shape[0], kv_cache.shape[1])
    run = mla_decode_reference if impl == "reference" else mla_decode_torch
    o, lse = run(
        q,
        kv_cache,
        block_table,
        seq_lens,
        scale=scale,
        kv_lora_rank=kv_lora_rank,
        kv_scale=kv_scale,
        causal=causal,
    )
    if out is None:
        out = o.to(q.dtype)
    else:
        out.copy_(o)
    return out, lse.float()
