# SPDX-License-Identifier: Apache-2.0
"""The public function `mla_decode`, and which implementation it takes."""

import functools
from typing import Any

import torch

from mla_kernels import checks
from mla_kernels.decode.choice import AVAILABLE, choose_decode_impl
from mla_kernels.decode.plan.api import MAX_HEADS, MAX_S_Q, QUERY_DTYPES, MlaDecodePlan
from mla_kernels.decode.query import (
    Query,
    check_q_scale,
    check_query,
    dequantised,
    first_part,
    joined,
    result_dtype,
    results_for,
)
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.decode.rescale import RESCALES
from mla_kernels.decode.torch_impl import mla_decode_torch
from mla_kernels.dispatch import Choice
from mla_kernels.layouts import BLOCK_SIZE, MlaDims
from mla_kernels.query.api import join_query_torch
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import kind

__all__ = ["AVAILABLE", "MAX_HEADS", "MAX_S_Q", "mla_decode"]


@untraced
def mla_decode(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int = 512,
    kv_scale: float | torch.Tensor | None = None,
    q_scale: float | torch.Tensor | None = None,
    causal: bool = True,
    rescale: str = "pow2",
    impl: str = "auto",
    plan: MlaDecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    deterministic: bool = False,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the s_q newest tokens of each request over its paged latent cache, in absorbed
    form (DeepSeek-V2, section 2.1): softmax(scale * q K^T) V with V = K[:, :kv_lora_rank].

    q             [B, s_q, H, Dk] bf16, fp16 or fp32; Dk = kv_lora_rank + rope dim; s_q 1..8,
                  H 1..128. Or its parts ([B, s_q, H, kv_lora_rank], [B, s_q, H, rope dim]) with
                  any strides but for the last: what an absorbed layer computes, and what the Hopper
                  kernel takes as it is; for the others they are joined by `join_query`.
                  Or one tensor of float8_e4m3fn with q_scale: "hopper", for float8_e4m3fn caches,
                  then multiplies in fp8, softmax weights too (docs/numerics.md); "torch" and
                  "reference" compute with its values in fp32, with any cache
    kv_cache      [num_blocks, block_size, Dk] bf16, fp16 or fp32; float8_e4m3fn with kv_scale; or
                  uint8 [num_blocks, block_size, 656] = fp8_ds_mla rows (layouts.py)
    block_table   [B, max_blocks] int32; entries past a request's length may hold anything
    seq_lens      [B] int32, tokens in the cache, the s_q new ones included
    scale         softmax scale, 1 / sqrt(head dim before absorption); a Python number
    kv_scale      float8_e4m3fn caches only: value = e4m3 * kv_scale; a number, or fp32 with one
                  element on the device
    q_scale       float8_e4m3fn q only: value = e4m3 * q_scale; as kv_scale, None = 1
    causal        query j sees keys below seq_len - s_q + 1 + j; else all of the request's. Rows
                  that any query of a request sees must be finite: a NaN in one may reach them all
    rescale       "pow2" (default; numerics.py), "amla" (the paper's Algorithm 2), "flash"
    impl          "auto", "hopper", "triton", "torch", "reference"
    plan          from `plan_mla_decode`, of this shape and mode, made or updated from these
                  seq_lens (from others results are wrong); made and thrown away if None
    out, lse      contiguous, as returned below: written in place if given
    deterministic a request's result is the same bits alone and in any batch
    validate      also check the contents of block_table and seq_lens, which reads the device. On a
                  CPU torch refuses a wrong entry in any case; a kernel reads what it names, the
                  interpreter's too

    Returns (out [B, s_q, H, kv_lora_rank] in q.dtype, bf16 for fp8 queries; lse [B, s_q, H] fp32,
    natural log). A request of length 0 gives zeros and -inf; B may be 0. ValueError for arguments
    that do not fit, before any launch.
    """
    key = None
    if isinstance(plan, MlaDecodePlan) and plan.device_plan is not None and validate is False:
        tensors = kind(q), kind(kv_cache), kind(block_table), kind(seq_lens), kind(out), kind(lse)
        numbers = kind(scale), kind(kv_lora_rank), kind(kv_scale), kind(q_scale)
        key = *tensors, *numbers, causal, deterministic, rescale, impl
        replay = plan.recordings.find(key)
        if replay is not None:
            out, lse = results_for(q, kv_lora_rank, out, lse)
            operands = (q, kv_cache, block_table, seq_lens, kv_scale, q_scale, out, lse)
            replay(operands_of(*operands, plan))
            return out, lse
    checks.check_flags(causal=causal, deterministic=deterministic, validate=validate)
    chosen = check_arguments(
        q,
        kv_cache,
        block_table,
        seq_lens,
        scale,
        kv_lora_rank,
        kv_scale,
        q_scale,
        rescale,
        impl,
        plan,
        out,
        lse,
        deterministic,
    ).impl
    if validate or chosen == "reference":
        checks.check_contents(block_table, seq_lens, kv_cache.shape[0], kv_cache.shape[1])
    options: dict[str, Any] = {
        "scale": float(scale),  # a fraction is none to torch
        "kv_lora_rank": int(kv_lora_rank),  # NumPy's integers are none to Triton
        "kv_scale": kv_scale,
        "causal": bool(causal),  # nor are its flags
        "rescale": rescale,
        "deterministic": bool(deterministic),
    }
    by_torch = chosen in ("torch", "reference")
    # Room for empty requests only, which torch sees for itself where it reads the lengths.
    no_room = block_table.shape[1] == 0 or kv_cache.shape[0] == 0
    if seq_lens.shape[0] == 0 or (no_room and not (by_torch and seq_lens.device.type == "cpu")):
        out, lse = results_for(q, kv_lora_rank, out, lse)
        return out.zero_(), lse.fill_(-torch.inf)
    if by_torch:
        values = q if isinstance(q, torch.Tensor) else join_query_torch(*q)
        values = dequantised(values, q_scale)
        rows = kv_cache, block_table, seq_lens
        dtype = result_dtype(first_part(q).dtype)
        return _by_torch(chosen, values, *rows, out, lse, dtype, **options)
    out, lse = results_for(q, kv_lora_rank, out, lse)
    options |= {"plan": plan, "out": out, "lse": lse, "q_scale": q_scale}
    launch = functools.partial(_by_kernel, chosen, q, kv_cache, block_table, seq_lens, **options)
    if key is None or plan is None:
        launch()
    else:
        operands = (q, kv_cache, block_table, seq_lens, kv_scale, q_scale, out, lse)
        plan.recordings.record(key, operands_of(*operands, plan), launch)
    return out, lse


def operands_of(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_scale: float | torch.Tensor | None,
    q_scale: float | torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: MlaDecodePlan,
) -> list[torch.Tensor]:
    """Every tensor that a launch of this call may be given, or views of it."""
    assert plan.device_plan is not None
    tensors = [kv_cache, block_table, seq_lens, out, lse, *plan.device_plan.buffers]
    tensors += [q] if isinstance(q, torch.Tensor) else q
    return [*tensors, *(x for x in (kv_scale, q_scale) if isinstance(x, torch.Tensor))]


def _by_kernel(
    chosen: str,
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    q_scale: float | torch.Tensor | None,
    **options: Any,
) -> None:
    """Launch the kernels of "hopper" or "triton"."""
    if chosen == "hopper":
        from mla_kernels.decode.hopper.launcher import mla_decode_hopper

        mla_decode_hopper(q, kv_cache, block_table, seq_lens, q_scale=q_scale, **options)
        return
    from mla_kernels.decode.triton.launcher import mla_decode_triton

    mla_decode_triton(
        joined(q), kv_cache, block_table, seq_lens, kv_lora_rank=kv_lora_rank, **options
    )


def _by_torch(
    chosen: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    rescale: str,
    deterministic: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What "torch" or "reference" computes, in the form of `mla_decode`'s results, out in dtype."""
    if chosen == "reference":
        result, result_lse = mla_decode_reference(q, kv_cache, block_table, seq_lens, **options)
    else:
        options |= {"rescale": rescale, "deterministic": deterministic}
        try:
            result, result_lse = mla_decode_torch(q, kv_cache, block_table, seq_lens, **options)
        except (IndexError, RuntimeError):
            if q.device.type == "cpu":  # says which entry is at fault
                checks.check_contents(block_table, seq_lens, kv_cache.shape[0], kv_cache.shape[1])
            raise
    out = result.to(dtype) if out is None else out.copy_(result)
    return out, (result_lse.float() if lse is None else lse.copy_(result_lse))


def check_room(B: int, max_blocks: int, block_size: int) -> None:
    """Kernels count the tokens of a request, and the blocks of a batch, in 32 bits. The plan counts
    three more for each request: one that is begun, and its OVERHEAD."""
    room = max_blocks * block_size
    if room > checks.MAX_TOKENS or B * (room // BLOCK_SIZE + 3) >= 2**31:
        raise ValueError(
            f"Expected a block_table with room for {checks.MAX_TOKENS} tokens a request and, in "
            f"all, for 2^31 blocks of {BLOCK_SIZE}; got {B} requests of {room} tokens"
        )


def check_arguments(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    q_scale: float | torch.Tensor | None,
    rescale: str,
    impl: str,
    plan: MlaDecodePlan | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    deterministic: bool,
) -> Choice:
    """What can be checked without reading the device; the implementation that will run."""
    B, s_q, H, Dk = check_query(q, kv_lora_rank, dtypes=QUERY_DTYPES)
    dtype, device = first_part(q).dtype, first_part(q).device
    checks.check_range("s_q (q.shape[1])", s_q, 1, MAX_S_Q)
    checks.check_range("number of heads (q.shape[2])", H, 1, MAX_HEADS)
    checks.check_range("kv_lora_rank", kv_lora_rank, 1, Dk - 1)
    checks.check_scale(scale)
    check_q_scale(q, q_scale)
    checks.check_choice("rescale", rescale, RESCALES)
    checks.check_kv_cache(kv_cache, MlaDims(kv_lora_rank, Dk - kv_lora_rank), kv_scale)
    both_float = {kv_cache.dtype, dtype} <= {*checks.FLOAT_DTYPES}
    if both_float and kv_cache.dtype != dtype:
        raise ValueError(f"Expected q and kv_cache of one dtype, got {dtype} and {kv_cache.dtype}")
    checks.check_shape("block_table", block_table, (B, "max_blocks"))
    check_room(B, block_table.shape[1], kv_cache.shape[1])
    checks.check_dtype("block_table", block_table, (torch.int32,))
    checks.check_last_contiguous("block_table", block_table)
    checks.check_shape("seq_lens", seq_lens, (B,))
    checks.check_dtype("seq_lens", seq_lens, (torch.int32,))
    checks.check_last_contiguous("seq_lens", seq_lens)
    for name, x in (("kv_cache", kv_cache), ("block_table", block_table), ("seq_lens", seq_lens)):
        checks.check_device(name, x, device)
    if plan is not None:
        if not isinstance(plan, MlaDecodePlan):
            raise ValueError(f"Expected plan from plan_mla_decode, got {type(plan).__name__}")
        plan.check_fits(B, s_q, H, kv_lora_rank, deterministic, device)
    for_tma = [kv_cache]
    if kv_cache.dtype != torch.bfloat16 and isinstance(out, torch.Tensor):
        for_tma.append(out)  # the kernels of fp8 caches write two columns at once
    contiguous = all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in for_tma)
    # Parts are joined where the kernel cannot take their strides.
    contiguous = contiguous and (not isinstance(q, torch.Tensor) or checks.is_for_tma(q))
    results = (
        ("out", out, (B, s_q, H, kv_lora_rank), result_dtype(dtype)),
        ("lse", lse, (B, s_q, H), torch.float32),
    )
    for name, tensor, shape, of in results:
        if tensor is not None:
            checks.check_shape(name, tensor, shape)
            checks.check_written(name, tensor)
            checks.check_dtype(name, tensor, (of,))
            checks.check_device(name, tensor, device)
            checks.check_contiguous(name, tensor)
    choice = choose_decode_impl(
        impl,
        device,
        dims=MlaDims(kv_lora_rank, Dk - kv_lora_rank),
        dtype=dtype,
        kv_cache_dtype=kv_cache.dtype,
        block_size=kv_cache.shape[1],
        rescale=rescale,
        contiguous=contiguous,
    )
    if choice.impl == "triton":
        checks.check_rows_near(kv_cache)
    return choice
