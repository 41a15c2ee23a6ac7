# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention kernels for torch and Triton. Imports no serving engine."""

from mla_kernels.cache.api import write_kv_cache
from mla_kernels.decode.api import mla_decode
from mla_kernels.decode.plan.api import MlaDecodePlan, plan_mla_decode
from mla_kernels.indexer.api import indexer_scores, indexer_topk
from mla_kernels.indexer.cache import write_indexer_cache
from mla_kernels.indexer.rows import indexer_lengths
from mla_kernels.indexer.slots import positions_to_slots
from mla_kernels.indexer.workspace import indexer_topk_workspace
from mla_kernels.layer.api import mla_layer
from mla_kernels.sparse.api import mla_sparse_attention
from mla_kernels.sparse.workspace import mla_sparse_workspace
from mla_kernels.topk.api import exact_topk
from mla_kernels.topk.merge import merge_topk
from mla_kernels.topk.plan import exact_topk_workspace

__all__ = [
    "MlaDecodePlan",
    "exact_topk",
    "exact_topk_workspace",
    "indexer_lengths",
    "indexer_scores",
    "indexer_topk",
    "indexer_topk_workspace",
    "merge_topk",
    "mla_decode",
    "mla_layer",
    "mla_sparse_attention",
    "mla_sparse_workspace",
    "plan_mla_decode",
    "positions_to_slots",
    "write_indexer_cache",
    "write_kv_cache",
]
