# SPDX-License-Identifier: Apache-2.0
"""The public function `mla_sparse_attention`, and which implementation it takes."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from mla_kernels import checks
from mla_kernels.decode.query import Query, check_query, first_part, joined, results_for
from mla_kernels.dispatch import Choice
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse.choice import AVAILABLE as AVAILABLE
from mla_kernels.sparse.choice import choose_sparse_impl, is_few
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.sparse.torch_impl import mla_sparse_attention_torch
from mla_kernels.sparse.torch_sdpa import sparse_attention_by_sdpa
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import Recordings, kind

MAX_HEADS = 128

_RECORDINGS = Recordings(512)


@untraced
def mla_sparse_attention(
    q: Query,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int = 512,
    kv_scale: float | torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    rescale: str = "pow2",
    deterministic: bool = False,
    impl: str = "auto",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each token over the cache rows that its slots name (DeepSeek Sparse Attention),
    in absorbed form: softmax(scale * q K^T) V with K the named rows, V = K[:, :kv_lora_rank].

    Decode and prefill alike: a token is a row of q.

    q          [T, H, Dk] bf16, fp16 or fp32; Dk = kv_lora_rank + rope dim; H 1..128. Or its parts
               ([T, H, kv_lora_rank], [T, H, rope dim]) with any strides but for the last: what an
               absorbed layer computes, and what the Hopper kernel and the one for few heads take as
               they are; for the others they are joined by `join_query`
    kv_cache   [num_blocks, block_size, Dk] bf16, fp16 or fp32; float8_e4m3fn with kv_scale; or
               uint8 [num_blocks, block_size, 656] = fp8_ds_mla rows (layouts.py)
    slots      [T, K] int32 = block * block_size + offset, K up to 2^20; -1, or any number outside
               the cache, is none, at any place in the row; a slot named twice counts twice
    scale      softmax scale, 1 / sqrt(head dim before absorption); a Python number
    kv_scale   float8_e4m3fn caches only: value = e4m3 * kv_scale
    lengths    [T] int32: token t uses slots[t, :lengths[t]] only
    sink       [H] fp32: a logit that takes part in the softmax and has no value; out is scaled by
               exp(lse) / (exp(lse) + exp(sink)), lse is returned as without it
    rescale    "pow2" (numerics.py), or "flash", on a CPU alone: torch's own operator, which also
               takes the tokens of a prompt together, 1.1 to 6 times as fast
    impl       "auto", "hopper", "triton", "torch", "reference"
    deterministic  the bits of a token's result do not depend on the other tokens of the call; few
               tokens take longer, as they are not cut to fill the device
    out, lse   contiguous, as returned below: written in place if given
    max_logits [T, H] fp32, contiguous, written if given: the largest scale * q . k of each row,
               -inf without a slot; the sink does not count. Of a row with NaN, whose lse says so,
               anything. Not with rescale "flash"
    workspace  [bytes] uint8 from `mla_sparse_workspace`: scratch of the GPU kernel, which splits
               few tokens over the device. With out, lse and workspace nothing is allocated. Not for
               two calls that may run at once

    Returns (out [T, H, kv_lora_rank] in q.dtype, lse [T, H] fp32, natural log). A token without a
    slot gives zeros and -inf. ValueError for arguments that do not fit, before any launch.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "kv_lora_rank": kv_lora_rank,
        "kv_scale": kv_scale,
        "lengths": lengths,
        "sink": sink,
        "max_logits": max_logits,
        "deterministic": deterministic,
        "rescale": rescale,
    }
    tensors = kind(q), kind(kv_cache), kind(slots), kind(out), kind(lse), kind(workspace)
    key = *tensors, *map(kind, options.values()), impl
    replay = _RECORDINGS.find(key)
    if replay is not None:
        out, lse = results_for(q, kv_lora_rank, out, lse)
        replay(_operands(q, kv_cache, slots, out, lse, workspace, options))
        return out, lse
    chosen = _check_arguments(
        q,
        kv_cache,
        slots,
        scale,
        kv_lora_rank,
        kv_scale,
        lengths,
        sink,
        impl,
        out,
        lse,
        max_logits,
        workspace,
        deterministic,
        rescale,
    ).impl
    options |= {"scale": float(scale), "deterministic": bool(deterministic)}
    if chosen in ("hopper", "triton"):
        out, lse = results_for(q, kv_lora_rank, out, lse)
        operands = _operands(q, kv_cache, slots, out, lse, workspace, options)
        options |= {"workspace": workspace}
        launch = functools.partial(_by_kernel, chosen, q, kv_cache, slots, out, lse, **options)
        _RECORDINGS.record(key, operands, launch)
        return out, lse
    q = joined(q)
    del options["rescale"]
    if chosen == "reference":
        run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = mla_sparse_attention_reference
    elif rescale == "flash":
        del options["max_logits"]
        run = sparse_attention_by_sdpa
    else:
        run = mla_sparse_attention_torch
    result, result_lse = run(q, kv_cache, slots, **options)
    out = result.to(q.dtype) if out is None else out.copy_(result)
    return out, (result_lse.float() if lse is None else lse.copy_(result_lse))


def _operands(
    q: Query,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """Every tensor that a launch of this call may be given, or views of it."""
    parts = (q,) if isinstance(q, torch.Tensor) else q
    given = (*parts, kv_cache, slots, out, lse, workspace, *options.values())
    return [x for x in given if isinstance(x, torch.Tensor)]


def _by_kernel(
    chosen: str, *args: Any, kv_lora_rank: int, deterministic: bool, rescale: str, **named: Any
) -> None:
    """Launch the kernels of "hopper" or "triton", which rescale by powers of two; kv_lora_rank is
    out's width."""
    from mla_kernels.sparse.call import SparseCall

    call = SparseCall(*args, **named)
    if chosen == "triton":
        from mla_kernels.sparse.triton.launcher import mla_sparse_attention_triton

        mla_sparse_attention_triton(call, deterministic=deterministic)
        return
    from mla_kernels.sparse.hopper.launcher import mla_sparse_attention_hopper

    mla_sparse_attention_hopper(call, deterministic=deterministic)


def _check_arguments(
    q: Query,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    impl: str,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    workspace: torch.Tensor | None,
    deterministic: bool,
    rescale: str,
) -> Choice:
    """What can be checked without reading the device; the implementation that will run."""
    T, H, Dk = check_query(q, kv_lora_rank, ("T", "H"))
    dtype, device = first_part(q).dtype, first_part(q).device
    checks.check_range("number of heads (q.shape[1])", H, 1, MAX_HEADS)
    checks.check_range("kv_lora_rank", kv_lora_rank, 1, Dk - 1)
    checks.check_scale(scale)
    checks.check_flags(deterministic=deterministic)
    checks.check_kv_cache(kv_cache, MlaDims(kv_lora_rank, Dk - kv_lora_rank), kv_scale)
    if kv_cache.dtype in checks.FLOAT_DTYPES and kv_cache.dtype != dtype:
        raise ValueError(f"Expected q and kv_cache of one dtype, got {dtype} and {kv_cache.dtype}")
    checks.check_shape("slots", slots, (T, "K"))
    checks.check_range("K (slots.shape[1])", slots.shape[1], 0, checks.MAX_SLOTS)
    checks.check_dtype("slots", slots, (torch.int32,))
    checks.check_last_contiguous("slots", slots)
    rows = kv_cache.shape[0] * kv_cache.shape[1]
    if rows > 2**31:
        raise ValueError(
            f"Expected kv_cache of up to 2^31 rows (slots are int32), got {rows}: split it"
        )
    tensors = {"kv_cache": kv_cache, "slots": slots}
    if lengths is not None:
        checks.check_shape("lengths", lengths, (T,))
        checks.check_dtype("lengths", lengths, (torch.int32,))
        checks.check_last_contiguous("lengths", lengths)
        tensors["lengths"] = lengths
    if sink is not None:
        checks.check_shape("sink", sink, (H,))
        checks.check_dtype("sink", sink, (torch.float32,))
        checks.check_last_contiguous("sink", sink)
        tensors["sink"] = sink
    results = (
        ("out", out, (T, H, kv_lora_rank), dtype),
        ("lse", lse, (T, H), torch.float32),
        ("max_logits", max_logits, (T, H), torch.float32),
    )
    if workspace is not None:
        checks.check_workspace(workspace, device)
    for name, tensor, shape, of in results:
        if tensor is not None:
            checks.check_shape(name, tensor, shape)
            checks.check_written(name, tensor)
            checks.check_dtype(name, tensor, (of,))
            tensors[name] = tensor
            checks.check_contiguous(name, tensor)
    for name, x in tensors.items():
        checks.check_device(name, x, device)
    if rescale == "flash" and max_logits is not None:
        raise ValueError("Expected no max_logits with rescale 'flash', which does not keep them")
    return choose_sparse_impl(
        impl,
        device,
        dims=MlaDims(kv_lora_rank, Dk - kv_lora_rank),
        dtype=dtype,
        kv_cache_dtype=kv_cache.dtype,
        # Parts are joined where the kernel cannot take their strides.
        contiguous=not isinstance(q, torch.Tensor) or checks.is_for_tma(q),
        aligned=checks.rows_aligned(kv_cache),
        # Which kernel is faster depends on how many tokens there are; and the one for few rows does
        # not keep the largest logits.
        few=is_few(T, H, kv_cache.dtype) and not deterministic and max_logits is None,
        rescale=rescale,
    )
