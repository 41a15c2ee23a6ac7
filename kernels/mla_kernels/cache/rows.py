# SPDX-License-Identifier: Apache-2.0
"""Cache rows of any layout as numbers, and as words to copy, in torch."""

import torch

from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims


def rows_as_float(
    rows: torch.Tensor,
    dtype: torch.dtype,
    kv_lora_rank: int,
    head_dim: int,
    kv_scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [..., width] of a cache -> [..., head_dim] in `dtype`, as the kernels see them.

    Quantised values are dequantised in fp32 and rounded once to `dtype`; float rows are cast.
    """
    if rows.dtype == torch.uint8:
        return _fp8_ds_mla(rows, dtype, MlaDims(kv_lora_rank, head_dim - kv_lora_rank))
    if rows.dtype == torch.float8_e4m3fn:
        assert kv_scale is not None
        return (rows.float() * scalar(kv_scale)).to(dtype)
    return rows.to(dtype)


def scalar(scale: float | torch.Tensor) -> float | torch.Tensor:
    """A scale, of any type or shape that checks.check_fp8_scale takes, as a factor in torch."""
    return scale.reshape(()) if isinstance(scale, torch.Tensor) else float(scale)


def _fp8_ds_mla(rows: torch.Tensor, dtype: torch.dtype, dims: MlaDims) -> torch.Tensor:
    layout = Fp8DsMlaLayout(dims)
    codes = rows[..., : dims.kv_lora_rank].view(torch.float8_e4m3fn).float()
    scales = rows[..., layout.scale_offset : layout.rope_offset].contiguous().view(torch.float32)
    latent = (codes.unflatten(-1, (-1, layout.group_size)) * scales[..., None]).flatten(-2)
    rope = rows[..., layout.rope_offset :].contiguous().view(torch.bfloat16)
    return torch.cat([latent.to(dtype), rope.to(dtype)], dim=-1)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """x in the widest integers that its rows can be copied as: faster to gather or scatter than
    16-bit floats, and fp8 can be neither."""
    size = 8 // x.element_size()
    fits = all(n % size == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(torch.int64 if fits else torch.uint8)
