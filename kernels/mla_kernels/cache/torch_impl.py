# SPDX-License-Identifier: Apache-2.0
"""Cache rows in torch: quantised, joined and scattered to their slots."""

import torch

from mla_kernels.cache.rows import as_words, scalar
from mla_kernels.layouts import E4M3_MAX, MIN_GROUP_SCALE, Fp8DsMlaLayout
from mla_kernels.torch_modes import without_modes


@without_modes
def write_kv_cache_torch(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
) -> None:
    """See `write_kv_cache`. On a CPU, where it costs no wait, slots past the cache are refused."""
    N = slot_mapping.shape[0]
    rows = encode_rows(kv_c[:N], k_pe[:N], kv_cache.dtype, kv_scale)
    if slot_mapping.device.type == "cpu":
        size = kv_cache.shape[0] * kv_cache.shape[1]
        if N and int(slot_mapping.max()) >= size:
            token = int(slot_mapping.argmax())
            raise ValueError(
                f"Expected slot_mapping below {size} (blocks x block size), got "
                f"{int(slot_mapping[token])} for token {token}"
            )
        if N and int(slot_mapping.min()) < 0:
            keep = slot_mapping >= 0
            rows, slot_mapping = rows[keep], slot_mapping[keep]
    elif N:
        keep = slot_mapping >= 0
        # No size may depend on the data: a skipped token repeats the write of one that is kept,
        # and if none is kept, writes back what the slot holds.
        first = keep.int().argmax(0, keepdim=True)  # [1]: torch reads a number that is an index
        slot = slot_mapping[first].clamp(min=0)
        block_size = kv_cache.shape[1]
        stand_in = torch.where(
            keep.any(), _bytes(rows)[first], _bytes(kv_cache)[slot // block_size, slot % block_size]
        )
        filled = torch.where(keep[:, None], _bytes(rows), stand_in)
        rows = filled.view(rows.dtype)
        slot_mapping = torch.where(keep, slot_mapping, slot)
    slots = slot_mapping.long()
    block_size = kv_cache.shape[1]
    words = as_words(kv_cache)
    words[slots // block_size, slots % block_size] = rows.view(words.dtype)


def encode_rows(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    dtype: torch.dtype,
    kv_scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [T, row] of a cache of `dtype` (layouts.py) from their latent and rope parts."""
    if dtype == torch.uint8:
        return _fp8_ds_mla_rows(kv_c, k_pe)
    rows = torch.cat([kv_c, k_pe], dim=-1)
    if dtype == torch.float8_e4m3fn:
        assert kv_scale is not None
        if not isinstance(scale := scalar(kv_scale), torch.Tensor):
            # Filled in on the device (a CUDA graph takes no copy from the host). Not divided by the
            # number: on a GPU, torch divides by a number through its rounded reciprocal.
            scale = torch.full((), scale, dtype=torch.float32, device=rows.device)
        return to_e4m3(rows.float() / scale.float())
    return rows.to(dtype)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> float8_e4m3fn, saturating at +-448 (a bare cast overflows to NaN)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _fp8_ds_mla_rows(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    groups = kv_c.float().unflatten(-1, (-1, Fp8DsMlaLayout.group_size))
    amax = groups.abs().masked_fill(groups.isnan(), 0.0).amax(-1)
    # By a tensor: on a GPU, torch divides by a Python number through its rounded reciprocal.
    scales = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=MIN_GROUP_SCALE)
    codes = to_e4m3(groups / scales[..., None]).flatten(-2)
    rope = k_pe.to(torch.bfloat16)
    return torch.cat([_bytes(codes), _bytes(scales), _bytes(rope)], dim=-1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)
