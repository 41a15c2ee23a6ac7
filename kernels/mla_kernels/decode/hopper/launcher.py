# SPDX-License-Identifier: Apache-2.0
"""Launching the Hopper kernels. Arguments are checked by `mla_kernels.decode.api`."""

import torch

from mla_kernels.arch import device_arch
from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.hopper.bf16.launcher import launch_bf16
from mla_kernels.decode.hopper.fp8.configs import choose_config
from mla_kernels.decode.hopper.fp8.launcher import launch_fp8
from mla_kernels.decode.hopper.fp8_query.launcher import launch_fp8_query
from mla_kernels.decode.hopper.parts import parts_and_spare
from mla_kernels.decode.hopper.support import FORMATS
from mla_kernels.decode.merge.launcher import launch_merge
from mla_kernels.decode.plan.api import MlaDecodePlan
from mla_kernels.decode.plan.launcher import build_plan
from mla_kernels.decode.query import Query, first_part


def mla_decode_hopper(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_scale: float | torch.Tensor | None,
    q_scale: float | torch.Tensor | None,
    causal: bool,
    rescale: str,
    plan: MlaDecodePlan | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    deterministic: bool,
) -> None:
    """`mla_decode` into contiguous out and lse. Allocates nothing when given a plan, but for parts
    of q with strides that TMA does not take."""
    _, s_q, H, _ = first_part(q).shape
    q_dtype = first_part(q).dtype
    device_plan = None if plan is None else plan.device_plan
    if device_plan is None:
        parts, spare = parts_and_spare(s_q * H, seq_lens.device, kv_cache.dtype, q_dtype)
        device_plan = build_plan(
            seq_lens,
            num_heads=H,
            s_q=s_q,
            deterministic=deterministic,
            max_seq_len=block_table.shape[1] * kv_cache.shape[1],
            num_parts=parts,
            spare=spare,
        )
    call = DecodeCall(
        q, kv_cache, block_table, seq_lens, device_plan, out, lse,
        scale=scale, kv_scale=kv_scale, q_scale=q_scale, causal=causal, rescale=rescale,
    )  # fmt: skip
    if q_dtype == torch.float8_e4m3fn:
        launch_fp8_query(call)
    elif kv_cache.dtype == torch.bfloat16:
        launch_bf16(call)
    else:
        launch_fp8(call, choose_config(s_q * H, FORMATS[kv_cache.dtype]))
    launch_merge(device_plan, out, lse, device_arch(seq_lens.device))
