# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks of the indexer's cache."""

from typing import Any

from vllm.v1.attention.backend import AttentionBackend

from mla_backend.attention import support
from mla_backend.attention.sparse.metadata import IndexerMetadataBuilder


class IndexerBackend(AttentionBackend):
    """The indexer's cache of keys: uint8 pages, fp8 codes and then scales (`IndexerLayout`)."""

    @staticmethod
    def get_name() -> str:
        return "MLA_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the indexer's cache has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type[IndexerMetadataBuilder]:
        return IndexerMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any, **__: Any) -> list[int]:
        return [support.BLOCK_SIZE]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # IndexerLayer.deterministic; vLLM's second model runner asks

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3) if include_num_layers_dimension else (0, 1, 2)
