# SPDX-License-Identifier: Apache-2.0
"""Queries of attention: one tensor, or the two parts that an absorbed layer computes."""

import torch

from mla_kernels import checks
from mla_kernels.cache.rows import scalar
from mla_kernels.query.api import join_query

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
FP8 = torch.float8_e4m3fn


def check_query(
    q: Query,
    kv_lora_rank: int,
    dims: tuple[str, ...] = ("B", "s_q", "H"),
    dtypes: tuple[torch.dtype, ...] = checks.FLOAT_DTYPES,
) -> tuple[int, ...]:
    """(*dims, Dk) of queries whose shapes, dtypes and devices fit each other."""
    if isinstance(q, torch.Tensor):
        checks.check_shape("q", q, (*dims, "Dk"))
        checks.check_dtype("q", q, dtypes)
        return tuple(q.shape)
    if not isinstance(q, tuple) or len(q) != 2:
        got = f"a tuple of {len(q)}" if isinstance(q, tuple) else type(q).__name__
        raise ValueError(f"Expected q to be a tensor or a tuple of its two parts, got {got}")
    latent, rope = q
    checks.check_range("kv_lora_rank", kv_lora_rank, 1, 2**15)
    checks.check_shape("q[0]", latent, (*dims, kv_lora_rank))
    if latent.dtype == FP8 and FP8 in dtypes:
        raise ValueError("Expected q of float8_e4m3fn as one tensor, got its two parts")
    checks.check_dtype("q[0]", latent, checks.FLOAT_DTYPES)
    sizes = tuple(latent.shape[:-1])
    checks.check_shape("q[1]", rope, (*sizes, "P"))
    checks.check_dtype("q[1]", rope, (latent.dtype,))
    checks.check_device("q[1]", rope, latent.device)
    for i, part in enumerate(q):
        checks.check_last_contiguous(f"q[{i}]", part)
    return *sizes, kv_lora_rank + rope.shape[-1]


def first_part(q: Query) -> torch.Tensor:
    """A tensor with q's dtype and device, for making others like it."""
    return q if isinstance(q, torch.Tensor) else q[0]


def head_dim(q: Query) -> int:
    """Dk of q, or of both its parts together."""
    return q.shape[-1] if isinstance(q, torch.Tensor) else q[0].shape[-1] + q[1].shape[-1]


def check_q_scale(q: Query, q_scale: object) -> None:
    """None, or the scale of a q of fp8 codes."""
    first = first_part(q)
    if q_scale is None:
        return
    if first.dtype != FP8:
        raise ValueError(f"Expected q_scale=None for q of {first.dtype}, got {q_scale!r}")
    checks.check_fp8_scale("q_scale", q_scale, "q", first.device)


def dequantised(q: torch.Tensor, q_scale: float | torch.Tensor | None) -> torch.Tensor:
    """q of float8_e4m3fn as the fp32 numbers that it stands for; of other dtypes as it is."""
    if q.dtype != FP8:
        return q
    return q.float() if q_scale is None else q.float() * scalar(q_scale)


def result_dtype(q_dtype: torch.dtype) -> torch.dtype:
    """Of the attention's output: q's, but for fp8 queries bf16."""
    return torch.bfloat16 if q_dtype == FP8 else q_dtype


def results_for(
    q: Query, kv_lora_rank: int, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [..., H, kv_lora_rank] and lse [..., H] of q: the given ones, or new ones."""
    first = first_part(q)
    rows = first.shape[:-1]
    if out is None:
        out = first.new_empty((*rows, kv_lora_rank), dtype=result_dtype(first.dtype))
    if lse is None:
        lse = first.new_empty(rows, dtype=torch.float32)
    return out, lse


def joined(q: Query) -> torch.Tensor:
    """q as one contiguous tensor [..., H, Dk] where it came in parts."""
    if isinstance(q, torch.Tensor):
        return q
    latent, rope = (part.flatten(0, -3) for part in q)
    return join_query(latent, rope).view(*q[0].shape[:-1], head_dim(q))


def both_parts(q: Query, kv_lora_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rope part, views of q where it came as one tensor."""
    if isinstance(q, torch.Tensor):
        return q[..., :kv_lora_rank], q[..., kv_lora_rank:]
    return q


def tokens_of(q: Query, part: slice) -> Query:
    """Some tokens of q [T, H, columns], or of both its parts."""
    return q[part] if isinstance(q, torch.Tensor) else (q[0][part], q[1][part])


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
    return both_parts(joined(q).flatten(1, 2), kv_lora_rank)


def token_parts(q: Query, kv_lora_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """row_parts of q [T, H, columns]."""
    if isinstance(q, torch.Tensor):
        return row_parts(q[:, None], kv_lora_rank)
    return row_parts((q[0][:, None], q[1][:, None]), kv_lora_rank)


def _rows(part: torch.Tensor) -> torch.Tensor | None:
    B, s_q, H, D = part.shape
    if s_q > 1 and H > 1 and part.stride(1) != H * part.stride(2):
        return None
    row = part.stride(2) if H > 1 else part.stride(1) if s_q > 1 else D
    request = part.stride(0) if B > 1 else s_q * H * row
    offsets = (part.data_ptr(), row * part.element_size(), request * part.element_size())
    # Of one that is expanded the next is the same; that TMA takes a stride of 0 is not known.
    if any(offset % 16 for offset in offsets) or not row or not request:
        return None
    return part.as_strided((B, s_q * H, D), (request, row, 1))
