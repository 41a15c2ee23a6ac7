# SPDX-License-Identifier: Apache-2.0
"""The class behind CUSTOM for layers with sparse attention, and the one of their indexer."""

from typing import Any

from vllm.v1.attention.backend import AttentionBackend

from mla_backend.attention import support
from mla_backend.attention.backend import MlaBackend
from mla_backend.attention.sparse.impl import SparseMlaImpl
from mla_backend.attention.sparse.metadata import IndexerMetadataBuilder, SparseMetadataBuilder


class SparseMlaBackend(MlaBackend):
    """Multi-head latent attention over the tokens that the indexer chose."""

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[SparseMlaImpl]:  # type: ignore[override]
        return SparseMlaImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:  # type: ignore[override]
        return SparseMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(support.SPARSE_HEAD_SIZES)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # how a row is split depends on the batch


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
