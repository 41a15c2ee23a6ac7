# SPDX-License-Identifier: Apache-2.0
"""What one layer's Lightning Indexer launches: the write of new keys, the scores, the top-k."""

from dataclasses import dataclass

import torch
from mla_kernels import indexer_topk, write_indexer_cache

from mla_backend.attention.sparse.rows import TokenRows


@dataclass
class IndexerLayer:
    """What does not change between the steps of one indexer.

    dtype          of the keys before they are quantised
    topk_indices   [>= max tokens, index_topk] int32, which the attention of the layer reads
    """

    heads: int
    dtype: torch.dtype
    scale_format: str
    impl: str
    workspace: torch.Tensor | None
    topk_indices: torch.Tensor

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        weights: torch.Tensor,
        topk_indices: torch.Tensor,
        k_cache: torch.Tensor,
        rows: TokenRows,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `indexer.run_indexer`; k goes to slot_mapping of k_cache."""
        T = rows.lengths.shape[0]
        if k is not None:
            write_indexer_cache(
                k, k_cache, slot_mapping, scale_format=self.scale_format, impl=self.impl
            )
        indexer_topk(
            q[:T],
            k_cache,
            weights[:T].float(),
            rows.block_table,
            rows.seq_lens,
            topk_indices.shape[1],
            request_ids=rows.request_ids,
            lengths=rows.lengths,
            out=topk_indices[:T],
            workspace=self.workspace,
            impl=self.impl,
        )


# By the name of the indexer's cache, which is how an op and a metadata builder find their layer.
LAYERS: dict[str, IndexerLayer] = {}
