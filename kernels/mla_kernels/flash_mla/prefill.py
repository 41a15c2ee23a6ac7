# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill, of keys that lie in no pages."""

import torch

from mla_kernels import checks
from mla_kernels.decode.api import MAX_HEADS
from mla_kernels.flash_mla.arguments import check_beside, check_out
from mla_kernels.flash_mla.shapes import PAGE, as_pages, lonely_to_inf
from mla_kernels.sparse.api import mla_sparse_attention
from mla_kernels.torch_modes import untraced


@untraced
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int | None = 0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill: every query token attends to the rows of `kv` that its indices name.

    q            [s_q, H, Dk]
    kv           [s_kv, 1, Dk]
    indices      [s_q, 1, topk] int32; -1 or a number >= s_kv is none
    topk_length  [s_q] int32: only the leftmost indices are used
    indexer_topk 0 or None: FlashMLA's second log-sum-exp, over so many indices, is not supported
    out          [s_q, H, d_v] contiguous, to write into

    Returns (out [s_q, H, d_v], max_logits [s_q, H], lse [s_q, H]): of each row the largest scaled
    score (-inf without a key) and the log-sum-exp (natural; +inf without a key), the sink left out.
    """
    if isinstance(indexer_topk, torch.Tensor):  # in vLLM's copy out is in this place
        raise ValueError(
            f"Expected indexer_topk=0 in the 8th place, got tensor {list(indexer_topk.shape)}: "
            "out goes by name"
        )
    if indexer_topk not in (None, 0):
        raise ValueError(f"Expected indexer_topk=0 (no other is supported), got {indexer_topk!r}")
    checks.check_shape("q", q, ("s_q", "H", "Dk"))
    checks.check_dtype("q", q, checks.FLOAT_DTYPES)
    s_q, H, Dk = q.shape
    checks.check_range("number of heads (q.shape[1])", H, 1, MAX_HEADS)
    checks.check_range("d_v", d_v, 1, Dk - 1)
    checks.check_scale(sm_scale, "sm_scale")
    for name, x in (("kv", kv), ("indices", indices)):
        checks.check_tensor(name, x)
    check_beside(q, "kv", kv, ("s_kv", 1, Dk), q.dtype)
    checks.check_range("s_kv (kv.shape[0])", kv.shape[0], 1, 2**31 - 1)
    check_beside(q, "indices", indices, (s_q, 1, "topk"), torch.int32)
    check_beside(q, "topk_length", topk_length, (s_q,), torch.int32)
    check_beside(q, "attn_sink", attn_sink, (H,), torch.float32)
    check_out(q, out, (s_q, H, d_v))
    rows = kv.squeeze(1)
    pages, slots = as_pages(rows), indices.squeeze(1)
    if pages.shape[0] * PAGE > rows.shape[0]:  # what lies past the copied rows is no key
        slots = torch.where(slots < rows.shape[0], slots, -1)
    max_logits = q.new_empty(q.shape[:2], dtype=torch.float32)
    result, lse = mla_sparse_attention(
        q,
        pages,
        slots,
        scale=sm_scale,
        kv_lora_rank=d_v,
        lengths=topk_length,
        sink=attn_sink,
        out=out,
        max_logits=max_logits,
    )
    return result, max_logits, lonely_to_inf(lse)
