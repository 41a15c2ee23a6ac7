# SPDX-License-Identifier: Apache-2.0
"""What one layer's Lightning Indexer launches: the write of new keys, the scores, the top-k."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from mla_kernels import indexer_topk, write_indexer_cache

from mla_backend.attention.sparse.rows import TokenRows
from mla_backend.attention.sparse.shared_choice import SharedChoice
from mla_backend.attention.sparse.short_prompts import ExpandedBytes

# New tokens of a request from which on a CPU takes them for a prompt's, not for drafts: those of
# many requests are one product, which pays more than leaving some out.
PROMPT_TOKENS = 16


@dataclass
class IndexerLayer:
    """What does not change between the steps of one indexer.

    dtype          of the keys before they are quantised
    deterministic  vLLM's batch-invariant mode
    topk_indices   [>= max tokens, index_topk] int32, which the attention of the layer reads
    shared         under decode context parallelism: topk_indices then get this rank's share
    gathered_bytes of a token, while the attention of all ranks' heads is added up there
    expanded_bytes on a GPU, while prompts attend in expanded form; None where none does
    attention      name of the layer whose metadata says which rows do, so that nothing is chosen
                   for them; None: for all rows, as in a draft, which may read the choice again
    """

    heads: int
    dtype: torch.dtype
    scale_format: str
    impl: str
    workspace: torch.Tensor | None
    topk_indices: torch.Tensor
    fp8_products: bool = False
    deterministic: bool = False
    shared: SharedChoice | None = None
    gathered_bytes: int = 0
    expanded_bytes: ExpandedBytes | None = None
    attention: str | None = None

    def profile(self, T: int) -> None:
        """Take what a step of T tokens takes on a GPU for prompts in expanded form, or for the
        heads of all ranks, and free it, so that vLLM counts it when it sizes the KV cache: no layer
        attends while it measures."""
        size = T * self.gathered_bytes
        if self.expanded_bytes is not None:
            size += self.expanded_bytes.at_most(T)
        if size:
            torch.empty(size, dtype=torch.uint8, device=self.topk_indices.device)

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
        if not T:  # all of them prompts that read all they see
            return
        own = topk_indices[:T]
        if self.shared is not None:
            self._choose_together(self.shared, q, k_cache, weights, rows, own)
        elif own.device.type == "cpu" and self.impl in ("auto", "torch"):
            self._choose_on_cpu(q, k_cache, weights, rows, own)
        else:
            self._choose(q, k_cache, weights, rows, own)

    def _choose(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        weights: torch.Tensor,
        rows: TokenRows,
        chosen: torch.Tensor,
        scores: torch.Tensor | None = None,
    ) -> None:
        """Write chosen [T, k] int32 and, if given, their scores [T, k] fp32."""
        T = chosen.shape[0]
        indexer_topk(
            q[:T],
            k_cache,
            weights[:T].float(),
            rows.block_table,
            rows.seq_lens,
            chosen.shape[1],
            request_ids=rows.request_ids,
            lengths=rows.lengths,
            fp8_products=self.fp8_products,
            deterministic=self.deterministic,
            out=chosen,
            values=scores,
            workspace=self.workspace,
            impl=self.impl,
        )

    def _choose_together(
        self,
        shared: SharedChoice,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        weights: torch.Tensor,
        rows: TokenRows,
        chosen: torch.Tensor,
    ) -> None:
        """As `_choose`, of the tokens that all ranks hold; chosen are those that this one has."""
        T = chosen.shape[0]
        turns = list(shared.turns(T))
        if len(turns) > 1 and rows.request_ids is None:  # a turn may end within a request
            ids = torch.arange(T, dtype=torch.int32, device=chosen.device)
            rows = replace(rows, request_ids=ids // (T // rows.block_table.shape[0]))
        for part in turns:
            positions, scores = shared.candidates(part.stop - part.start)
            some = rows if len(turns) == 1 else rows.some(part)
            self._choose(q[part], k_cache, weights[part], some, positions, scores)
            shared.keep_best(chosen[part], self.impl)

    def _choose_on_cpu(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        weights: torch.Tensor,
        rows: TokenRows,
        chosen: torch.Tensor,
    ) -> None:
        """As `_choose`. A token that sees no more than it may choose reads all of them: in a
        prompt, or where all tokens do, nothing is scored for it. Lengths cost no wait here."""
        scored = (rows.lengths > chosen.shape[1]).nonzero().squeeze(1)
        ids = rows.request_ids
        run = len(chosen) // len(rows.block_table)
        if ids is None and run >= PROMPT_TOKENS:
            ids = torch.arange(len(chosen), dtype=torch.int32) // run
        if len(scored) and (ids is None or len(scored) == len(chosen)):
            self._choose(q, k_cache, weights, rows, chosen)  # requests of equal runs in one product
            return
        everything = torch.arange(chosen.shape[1], dtype=torch.int32)
        chosen.copy_(torch.where(everything < rows.lengths[:, None], everything, -1))
        if ids is not None and len(scored):
            lengths = rows.lengths[scored]
            some = TokenRows(rows.block_table, rows.seq_lens, ids[scored], lengths)
            own = chosen.new_empty(len(scored), chosen.shape[1])
            self._choose(q[scored], k_cache, weights[scored], some, own)
            chosen[scored] = own


# Of the layer of vLLM that is the indexer's cache. Engines of one process have layers of the same
# names, so no table by name would do.
_ATTRIBUTE = "mla_backend_indexer"


def attach(k_cache: Any, layer: IndexerLayer) -> None:
    """Let `k_cache`, vLLM's layer, hold the `layer` that writes and reads it."""
    setattr(k_cache, _ATTRIBUTE, layer)


def is_attached(k_cache: Any) -> bool:
    return hasattr(k_cache, _ATTRIBUTE)


def attached(k_cache: Any) -> IndexerLayer:
    """What `k_cache` holds. AttributeError if it is not an indexer's cache of ours."""
    layer: IndexerLayer = getattr(k_cache, _ATTRIBUTE)
    return layer
