# SPDX-License-Identifier: Apache-2.0
"""Which decode kernel an engine uses: settled once at start-up, the same for layers and plans."""

from dataclasses import dataclass

import torch
from mla_kernels import MlaDecodePlan, plan_mla_decode
from mla_kernels.decode.choice import choose_decode_impl
from mla_kernels.layouts import MlaDims
from vllm import envs as vllm_envs

from mla_backend import envs
from mla_backend.attention import fp8_query, support
from mla_backend.attention.choice import choose
from mla_backend.stats import STATS

_QUANTISED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_ds_mla": torch.uint8,
}


def cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """What vLLM's name for a KV cache means to the kernels, in a model of `dtype`."""
    return _QUANTISED.get(kv_cache_dtype, dtype)


def rescale_on(device: torch.device) -> str:
    """By MLA_BACKEND_RESCALE: unless it names one, that of the fastest form on this device."""
    asked: str = envs.get("MLA_BACKEND_RESCALE")
    if asked != "auto":
        return asked
    by_torch = device.type == "cpu" and envs.get("MLA_BACKEND_IMPL") in ("auto", "torch")
    return "flash" if by_torch else "pow2"


@dataclass(frozen=True)
class DecodeKernel:
    """Arguments of `mla_decode` that do not change while an engine runs."""

    impl: str
    rescale: str
    dims: MlaDims
    dtype: torch.dtype  # the model's
    query_dtype: torch.dtype  # the same, or float8_e4m3fn (MLA_BACKEND_FP8_QUERY)
    kv_cache_dtype: torch.dtype
    deterministic: bool  # vLLM's batch-invariant mode

    @classmethod
    def choose(
        cls,
        dims: MlaDims,
        dtype: torch.dtype,
        kv_cache_dtype: str,
        device: torch.device,
    ) -> "DecodeKernel":
        """By MLA_BACKEND_IMPL, MLA_BACKEND_RESCALE and MLA_BACKEND_FP8_QUERY; the choice and its
        reason go to STATS.

        kv_cache_dtype is vLLM's name. ValueError if what is asked for cannot run here.
        """
        rescale = rescale_on(device)
        query_dtype = torch.float8_e4m3fn if fp8_query.asked() else dtype
        choice = choose(
            choose_decode_impl,
            device,
            dims=dims,
            dtype=query_dtype,
            kv_cache_dtype=cache_dtype(kv_cache_dtype, dtype),
            block_size=support.BLOCK_SIZE,
            rescale=rescale,
        )
        STATS.decode = {"impl": choice.impl, "reason": choice.reason, "rescale": rescale}
        STATS.decode["query_dtype"] = str(query_dtype).removeprefix("torch.")
        return cls(
            choice.impl,
            rescale,
            dims,
            dtype,
            query_dtype,
            cache_dtype(kv_cache_dtype, dtype),
            deterministic=bool(vllm_envs.VLLM_BATCH_INVARIANT),
        )

    def plan(
        self,
        seq_lens: torch.Tensor,
        num_heads: int,
        s_q: int,
        max_seq_len: int | None = None,
        lender: MlaDecodePlan | None = None,
    ) -> MlaDecodePlan:
        """The plan of a step for seq_lens [B] int32.

        max_seq_len bounds its workspace, which is `lender`'s where that is large enough.
        """
        return plan_mla_decode(
            seq_lens,
            num_heads=num_heads,
            s_q=s_q,
            max_seq_len=max_seq_len,
            deterministic=self.deterministic,
            kv_lora_rank=self.dims.kv_lora_rank,
            rope_dim=self.dims.rope_dim,
            impl=self.impl,
            rescale=self.rescale,
            dtype=self.query_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=support.BLOCK_SIZE,
            lender=lender,
        )
