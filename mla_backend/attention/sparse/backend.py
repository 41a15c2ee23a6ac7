# SPDX-License-Identifier: Apache-2.0
"""The class behind CUSTOM for layers with sparse attention."""

from mla_backend.attention import support
from mla_backend.attention.backend import MlaBackend
from mla_backend.attention.sparse.impl import SparseMlaImpl
from mla_backend.attention.sparse.metadata import SparseMetadataBuilder


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
