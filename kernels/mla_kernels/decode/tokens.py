# SPDX-License-Identifier: Apache-2.0
"""`mla_decode` for the layers of an engine, whose queries are rows of tokens."""

from typing import Any

import torch

from mla_kernels import checks
from mla_kernels.decode.api import mla_decode, operands_of
from mla_kernels.decode.plan.api import QUERY_DTYPES, MlaDecodePlan
from mla_kernels.decode.query import Query, check_query, results_for
from mla_kernels.triton_common.record import kind


def mla_decode_tokens(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    plan: MlaDecodePlan,
    kv_lora_rank: int = 512,
    kv_scale: float | torch.Tensor | None = None,
    q_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_decode` of q [T, H, Dk], or its parts: of each of B requests T / B tokens, in order.

    Returns out [T, H, kv_lora_rank] and lse [T, H]; the other arguments and the errors are those of
    `mla_decode`. A view takes as long as a fifth of a call that is replayed, and this one makes
    none.
    """
    if not isinstance(plan, MlaDecodePlan):
        raise ValueError(f"Expected plan from plan_mla_decode, got {type(plan).__name__}")
    key = None
    if plan.device_plan is not None:
        modes = tuple(map(kind, options.values()))
        tensors = kind(q), kind(kv_cache), kind(block_table), kind(seq_lens), kind(out), kind(lse)
        key = tensors, kind(kv_lora_rank), kind(kv_scale), kind(q_scale), *options, *modes
        replay = plan.recordings.find(key)
        if replay is not None:
            out, lse = results_for(q, kv_lora_rank, out, lse)
            operands = (q, kv_cache, block_table, seq_lens, kv_scale, q_scale, out, lse)
            replay(operands_of(*operands, plan))
            return out, lse
    checks.check_shape("seq_lens", seq_lens, ("B",))
    T, _, Dk = check_query(q, kv_lora_rank, ("T", "H"), QUERY_DTYPES)
    checks.check_range("kv_lora_rank", kv_lora_rank, 1, Dk - 1)
    B = seq_lens.shape[0]
    if T % B if B else T:
        raise ValueError(f"Expected the tokens of {B} requests, as many of each, got {T}")
    shape = (B, T // B if B else plan.s_q)
    out, lse = results_for(q, kv_lora_rank, out, lse)
    checks.check_shape("out", out, (T, "H", "kv_lora_rank"))
    checks.check_shape("lse", lse, (T, "H"))

    def call() -> None:
        mla_decode(
            by_request(q, shape),
            kv_cache,
            block_table,
            seq_lens,
            plan=plan,
            kv_lora_rank=kv_lora_rank,
            kv_scale=kv_scale,
            q_scale=q_scale,
            out=out.unflatten(0, shape),
            lse=lse.unflatten(0, shape),
            **options,
        )

    if key is None:
        call()
    else:
        operands = (q, kv_cache, block_table, seq_lens, kv_scale, q_scale, out, lse)
        plan.recordings.record(key, operands_of(*operands, plan), call)
    return out, lse


def by_request(q: Query, shape: tuple[int, int]) -> Query:
    """[T, H, columns] as [*shape, H, columns], without copying."""
    if isinstance(q, tuple):
        return q[0].unflatten(0, shape), q[1].unflatten(0, shape)
    return q.unflatten(0, shape)
