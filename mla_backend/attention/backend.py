# SPDX-License-Identifier: Apache-2.0
"""The class that `--attention-backend CUSTOM` names: what it supports, and its two parts."""

from typing import Any, ClassVar

import torch
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

from mla_backend import compat
from mla_backend.attention import fp8_query, layer_reasons, support
from mla_backend.attention.impl import MlaImpl
from mla_backend.attention.metadata import MlaMetadataBuilder
from mla_backend.attention.sparse import fp8_indexer
from mla_backend.refusals import note


class MlaBackend(MLACommonBackend):
    """Dense multi-head latent attention over 64-token pages, computed by `mla_kernels`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [getattr(torch, n) for n in support.DTYPES]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(support.KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        # vLLM compares this with names of its enum; CUSTOM is the member in every version.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MlaImpl]:
        return MlaImpl

    @staticmethod
    def get_builder_cls() -> type[MlaMetadataBuilder]:
        return MlaMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(support.HEAD_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Asked by vLLM before 0.29; later versions take the row's bytes from the cache spec."""
        if cache_dtype_str == "fp8_ds_mla":
            head_size = Fp8DsMlaLayout(MlaDims()).row_bytes
        return (num_blocks, block_size, head_size)

    # The Hopper kernels read the pages of a layer as one matrix: no other layer's may lie between
    # them, whatever a KV connector prefers.
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        return compat.layer_compact_layouts()

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The same for vLLM before 0.29, which then gives each layer a cache of its own."""
        if include_num_layers_dimension:
            raise NotImplementedError("one cache for all layers")
        return (0, 1, 2)

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any, **__: Any) -> list[int]:
        return [support.BLOCK_SIZE]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int = support.BLOCK_SIZE) -> int:
        return support.BLOCK_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        # None: a device without one, that is a CPU.
        return capability is None or support.is_compute_capability_served(capability)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # plans are deterministic then (`DecodeKernel`)

    @classmethod
    def supports_pcp(cls) -> bool:
        return False  # the base class says yes for every MLA backend; nothing here was tried

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # every decode request of a step has the s_q that the CPU counted

    @classmethod
    def validate_configuration(cls, **config: Any) -> list[str]:
        """Why this backend cannot serve `config` (vLLM's AttentionSelectorConfig), in our words.

        An empty list means it can. vLLM raises with the list at start-up.
        """
        reasons = layer_reasons.explain(super().validate_configuration(**config), config)
        reasons += layer_reasons.combination_reasons(config)
        reasons += fp8_query.reasons(config) + fp8_indexer.reasons(config)
        if reasons:
            note(f"CUSTOM cannot serve this: {'; '.join(reasons)}")
        return reasons
