# SPDX-License-Identifier: Apache-2.0
"""The queries of `mla_decode`: one tensor, or the two parts that an absorbed layer computes."""

import torch

from mla_kernels import checks
from mla_kernels.query.api import join_query

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_query(q: Query, kv_lora_rank: int) -> tuple[int, int, int, int]:
    """(B, s_q, H, Dk) of queries whose shapes, dtypes and devices fit each other."""
    if isinstance(q, torch.Tensor):
        checks.check_shape("q", q, ("B", "s_q", "H", "Dk"))
        checks.check_dtype("q", q, checks.FLOAT_DTYPES)
        B, s_q, H, Dk = q.shape
        return B, s_q, H, Dk
    if not isinstance(q, tuple) or len(q) != 2:
        raise ValueError(f"Expected q to be a tensor or its two parts, got {type(q).__name__}")
    latent, rope = q
    checks.check_shape("q[0]", latent, ("B", "s_q", "H", kv_lora_rank))
    checks.check_dtype("q[0]", latent, checks.FLOAT_DTYPES)
    B, s_q, H, R = latent.shape
    checks.check_shape("q[1]", rope, (B, s_q, H, "P"))
    checks.check_dtype("q[1]", rope, (latent.dtype,))
    checks.check_device("q[1]", rope, latent.device)
    for i, part in enumerate(q):
        checks.check_last_contiguous(f"q[{i}]", part)
    return B, s_q, H, R + rope.shape[3]


def first_part(q: Query) -> torch.Tensor:
    """A tensor with q's dtype and device, for making others like it."""
    return q if isinstance(q, torch.Tensor) else q[0]


def joined(q: Query) -> torch.Tensor:
    """q as one contiguous tensor [B, s_q, H, Dk] where it came in parts."""
    if isinstance(q, torch.Tensor):
        return q
    B, s_q, H, _ = q[0].shape
    return join_query(q[0].flatten(0, 1), q[1].flatten(0, 1)).view(B, s_q, H, -1)


def row_parts(q: Query, kv_lora_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rope part as [B, s_q * H, columns], as TMA takes them: the rows of a request one
    stride apart, every stride and the start a multiple of 16 bytes. Joined first if they are not.

    A contiguous q and, for one new token, the products over heads [H, B, R].transpose(0, 1) of a
    layer are.
    """
    if not isinstance(q, torch.Tensor):
        rows = _rows(q[0]), _rows(q[1])
        if rows[0] is not None and rows[1] is not None:
            return rows[0], rows[1]
    whole = joined(q).flatten(1, 2)
    return whole[..., :kv_lora_rank], whole[..., kv_lora_rank:]


def _rows(part: torch.Tensor) -> torch.Tensor | None:
    B, s_q, H, D = part.shape
    if s_q > 1 and H > 1 and part.stride(1) != H * part.stride(2):
        return None
    row = part.stride(2) if H > 1 else part.stride(1) if s_q > 1 else D
    request = part.stride(0) if B > 1 else s_q * H * row
    offsets = (part.data_ptr(), row * part.element_size(), request * part.element_size())
    if any(offset % 16 for offset in offsets):
        return None
    return part.as_strided((B, s_q * H, D), (request, row, 1))
