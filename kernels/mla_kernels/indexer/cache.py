# SPDX-License-Identifier: Apache-2.0
"""The public function `write_indexer_cache` and its torch form."""

import functools

import torch

from mla_kernels import checks
from mla_kernels.dispatch import choose_impl
from mla_kernels.layouts import E4M3_MAX, INDEXER_MIN_AMAX, IndexerLayout
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import Recordings, kind, rows_kind

AVAILABLE = ("triton", "torch", "reference")
_RECORDINGS = Recordings(256)
SCALE_FORMATS = ("ue8m0", "fp32")


@untraced
def write_indexer_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale_format: str = "ue8m0",
    impl: str = "auto",
) -> None:
    """Quantise the indexer keys of new tokens and write them to their slots, in place.

    k             [T, D] bf16, fp16 or fp32 (D = 128 in DeepSeek-V3.2), RoPE already applied
    k_cache       [num_blocks, 64, D + 4] uint8 pages (`IndexerLayout`): e4m3 codes, one fp32 scale
                  a token; or [num_blocks, 64, D] bf16, where keys are only rounded
    slot_mapping  [N] int32 or int64, N <= T: block * 64 + offset, negative = skip. In torch on a
                  CPU a slot past the cache is an error; the kernel writes where it points
    scale_format  of the fp8 cache: scale = max(amax |k|, 1e-4) / 448, "ue8m0" rounds it up to a
                  power of two (as DeepSeek-V3.2 is served), "fp32" keeps it

    The same bytes as vLLM's `indexer_k_quant_and_cache`, for finite keys. ValueError for arguments
    that do not fit.
    """
    key = rows_kind(k), kind(k_cache), rows_kind(slot_mapping), scale_format, impl
    operands = [k, k_cache, slot_mapping]
    replay = _RECORDINGS.find(key)
    if replay is not None:
        tokens = slot_mapping.shape[0]
        # A single slot may have any stride.
        if k.shape[0] >= tokens > 0 and slot_mapping.is_contiguous():
            replay(operands, (tokens, 1, 1))
            return
    checks.check_shape("k", k, ("T", "D"))
    checks.check_range("D (k.shape[1])", k.shape[1], 1, 2**15)
    checks.check_dtype("k", k, checks.FLOAT_DTYPES)
    check_indexer_cache(k_cache, k.shape[1])
    checks.check_distinct("k_cache", k_cache)
    checks.check_shape("slot_mapping", slot_mapping, ("N",))
    checks.check_dtype("slot_mapping", slot_mapping, (torch.int32, torch.int64))
    checks.check_range("length of slot_mapping", slot_mapping.shape[0], 0, k.shape[0])
    checks.check_choice("scale_format", scale_format, SCALE_FORMATS)
    checks.check_last_contiguous("k", k)
    checks.check_last_contiguous("slot_mapping", slot_mapping)
    for name, x in (("k_cache", k_cache), ("slot_mapping", slot_mapping)):
        checks.check_device(name, x, k.device)
    choice = choose_impl("write_indexer_cache", impl, k.device, available=AVAILABLE)
    if choice.impl != "triton":  # the torch form is its own definition
        write_indexer_cache_torch(k, k_cache, slot_mapping, scale_format=scale_format)
    elif len(slot_mapping):
        from mla_kernels.indexer.triton.row_launchers import launch_write_indexer_cache

        launch = functools.partial(launch_write_indexer_cache, *operands, scale_format=scale_format)
        _RECORDINGS.record(key, operands, launch)


def check_indexer_cache(k_cache: torch.Tensor, D: int) -> None:
    """A cache for keys of width D: uint8 pages with scales, or bf16."""
    checks.check_dtype("k_cache", k_cache, (torch.uint8, torch.bfloat16))
    layout = IndexerLayout(head_dim=D)
    width = D + 4 if k_cache.dtype == torch.uint8 else D
    checks.check_shape("k_cache", k_cache, ("num_blocks", layout.block_size, width))
    if k_cache.shape[0] and not k_cache[0].is_contiguous():
        raise ValueError(f"Expected contiguous pages in k_cache, got strides {k_cache.stride()}")
    checks.check_aligned("k_cache", k_cache, 0)


def quantise_keys(k: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """k [T, D] -> (codes [T, D] uint8, scales [T] fp32). NaN: code 0x7F, not counted in a scale."""
    k = k.float()
    nan = k.isnan()
    amax = k.abs().masked_fill_(nan, 0.0).amax(-1)
    # By a tensor: a GPU multiplies by the reciprocal of a Python number, which is an ulp off.
    scales = amax.clamp(min=INDEXER_MIN_AMAX) / torch.full_like(amax, E4M3_MAX)
    if scale_format == "ue8m0":  # up to a power of two: the mantissa bits go
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = (k / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).masked_fill_(nan, 0x7F), scales


@torch.no_grad()
def write_indexer_cache_torch(
    k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor, *, scale_format: str
) -> None:
    """See `write_indexer_cache`."""
    k = k[: slot_mapping.shape[0]]
    slots = slot_mapping.long()
    keep = slots >= 0
    if slots.device.type == "cpu":
        size = k_cache.shape[0] * k_cache.shape[1]
        if len(slots) and int(slots.max()) >= size:
            token = int(slots.argmax())
            raise ValueError(
                f"Expected slot_mapping below {size} (blocks x block size), got "
                f"{int(slots[token])} for token {token}"
            )
        if not bool(keep.all()):
            k, slots = k[keep], slots[keep]
    elif len(slots):
        # No size may depend on the data: a skipped row repeats the write of the first kept one,
        # and if none is kept, k_cache[0, 0] must not change (see `_put`).
        first = keep.int().argmax(0, keepdim=True)  # [1]: torch reads a number that is an index
        k = torch.where(keep[:, None], k, k[first])
        slots = torch.where(keep, slots, slots[first])
    layout = IndexerLayout(head_dim=k.shape[1])
    page, offset = slots // layout.block_size, slots % layout.block_size
    if k_cache.dtype == torch.bfloat16:
        _put(k_cache, page, offset, k.bfloat16(), slots)
        return
    codes, scales = quantise_keys(k, scale_format)
    pages = k_cache.view(k_cache.shape[0], layout.page_bytes)
    code_view = pages[:, : layout.scale_offset].unflatten(1, (-1, layout.head_dim))
    _put(code_view, page, offset, codes, slots)
    _put(pages[:, layout.scale_offset :].view(torch.float32), page, offset, scales, slots)


def _put(
    target: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """target[page, offset] = values; nothing where slots are negative (then all of them are)."""
    page, offset = page.clamp(min=0), offset.clamp(min=0)
    written = (slots >= 0).view(-1, *(1,) * (values.dim() - 1))
    target[page, offset] = torch.where(written, values, target[page, offset])
