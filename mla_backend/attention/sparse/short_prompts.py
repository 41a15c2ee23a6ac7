# SPDX-License-Identifier: Apache-2.0
"""Prompts that see no more tokens than the indexer may choose.

All their tokens are read whatever it says, so such prompts attend unscored and as those of dense
layers do, in expanded form: a new token costs 2 * (192 + 128) FLOP a head and token that it sees,
not 2 * (576 + 512). For that each cached row is expanded, which costs what some 170 new tokens save
on it. The keys of the indexer are written as ever: later tokens are chosen among them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import envs as vllm_envs
from vllm.platforms import current_platform

from mla_backend import compat, envs
from mla_backend.attention import extends
from mla_backend.attention.prefill import PrefillTile, plan_prefill
from mla_backend.refusals import RefusalError

# Tokens that see a cached row, from which on it is better expanded.
TOKENS_PER_ROW = 170
# Cached rows that a GPU expands at a time, 1 GB of keys and values with 128 heads.
WORKSPACE_ROWS = 8192


def are_expanded(kv_cache_dtype: str, dtype: torch.dtype, vllm_config: Any) -> bool:
    """Whether an engine's short prompts are, by MLA_BACKEND_EXPAND_PROMPTS. ValueError if that is
    asked for and cannot be had. Known before a layer is built: from 0.27 on vLLM then makes no
    prefill backend that nothing would use, and no memory is kept for it."""
    if envs.get("MLA_BACKEND_EXPAND_PROMPTS") is False:
        return False
    return _free_of(_obstacle(kv_cache_dtype, dtype, vllm_config))


def can_expand(part: Any) -> bool:
    """Whether the MLA layer of such an engine that `part` is, or is the indexer of, gives prompts
    to `forward_mha`; errors as above."""
    return current_platform.is_cpu() or _free_of(compat.expanding_lacks(part))


def _free_of(obstacle: str) -> bool:
    if obstacle and envs.get("MLA_BACKEND_EXPAND_PROMPTS"):
        raise RefusalError(
            f"MLA_BACKEND_EXPAND_PROMPTS=1 needs {obstacle}. Mend: unset MLA_BACKEND_EXPAND_PROMPTS"
        )
    return not obstacle


def _obstacle(kv_cache_dtype: str, dtype: torch.dtype, vllm_config: Any) -> str:
    """What expanding prompts needs and is not there, or ""."""
    if vllm_envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT unset: the form depends on what else is in a step"
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "--decode-context-parallel-size 1: a rank has a part of each context alone"
    if vllm_config.attention_config.sparse_mla_force_mqa:
        return "sparse_mla_force_mqa unset"
    if not current_platform.is_cpu() and (kv_cache_dtype, dtype) == ("fp8_ds_mla", torch.float16):
        return "a model of bfloat16 with fp8_ds_mla, whose rows vLLM gathers as such"
    # FLASHINFER's looks for a dense layer, and finds none.
    if compat.mla_prefill_backend(vllm_config) in (None, "FLASHINFER"):
        return "another prefill backend than FLASHINFER, like FLASH_ATTN"
    return ""


@dataclass(frozen=True)
class ExpandedBytes:
    """What a GPU holds in a layer while prompts attend in expanded form, beside the layer's own
    query and output.

    token  of each new token: the query whole, what it is expanded to, and the outputs over the new
           tokens, over a chunk of their context, and over all chunks so far
    row    of each cached row of a chunk, what it is expanded to: the whole key, beside the key
           without rope and the value as kv_b_proj gives them; and the larger of the two of the
           chunk before, which goes when its successor is there
    """

    token: int
    row: int

    @classmethod
    def of(cls, impl: Any, itemsize: int, capability: tuple[int, int]) -> "ExpandedBytes":
        """impl: with vLLM's dims. FlashAttention pads values to the width of keys, but not on sm_90
        and sm_100."""
        qk, heads = impl.qk_head_dim, impl.num_heads * itemsize
        value = impl.v_head_dim if capability[0] in (9, 10) else qk
        given = impl.qk_nope_head_dim + value
        outputs = compat.outputs_of_chunked_context() * value
        return cls((2 * qk + given + outputs) * heads, (qk + given + max(qk, given)) * heads)

    def at_most(self, T: int) -> int:
        """In a step of T tokens."""
        return T * self.token + WORKSPACE_ROWS * self.row


def pays(query_lens: np.ndarray, contexts: np.ndarray) -> bool:
    """Whether prompts of [R] new tokens behind [R] cached ones are better expanded."""
    read = query_lens * (contexts + query_lens / 2)
    return bool(read.sum() >= TOKENS_PER_ROW * contexts.sum())


class ShortPrompts:
    """Which prompts of a step attend in expanded form, and vLLM's metadata for them.

    layer     an MLA layer of vLLM with our sparse impl and a prefill backend
    most_s_q  new tokens of a request that `forward_mqa` gets in any case, like drafts
    added     of a longer step, new tokens of each request that the host's lengths lack
    """

    def __init__(
        self, layer: Any, most_s_q: int, block_size: int, device: torch.device, added: int = 0
    ) -> None:
        self._topk = layer.impl.topk_indices_buffer.shape[1]
        self._most_s_q, self._block_size, self._device = most_s_q, block_size, device
        self._dtype, self._added = layer.impl.dtype, added
        self._backend = layer.prefill_backend.clone()  # vLLM's own builders do: each has its steps
        self._workspace: torch.Tensor | None = None
        if device.type != "cpu":
            self._workspace = torch.empty(
                WORKSPACE_ROWS, layer.impl.head_size, dtype=self._dtype, device=device
            )

    def find(self, common: Any) -> int | None:
        """The request of vLLM's reordered batch from which on all are such prompts; None: there
        are none, or a longer one is among them, or expanding their context does not pay, or a block
        of each context is more than is expanded at a time."""
        if common.max_query_len <= self._most_s_q:
            return None
        query_lens, contexts = extends.host_lengths(common, self._added)
        longer = query_lens > self._most_s_q
        if not longer.any():
            return None
        first = int(longer.argmax())
        query_lens, contexts = query_lens[first:], contexts[first:]
        if (query_lens + contexts).max() > self._topk or not pays(query_lens, contexts):
            return None
        if np.count_nonzero(contexts) * self._block_size > WORKSPACE_ROWS:
            return None
        return first

    def describe(self, common: Any, first: int) -> tuple[Any, list[PrefillTile] | None]:
        """MLACommonPrefillMetadata of the requests from `first` on; on a CPU with the tiles of
        `run_prefill`."""
        lengths = extends.host_lengths(common, self._added)
        query_lens, contexts = (of_all[first:] for of_all in lengths)
        starts = common.query_start_loc[first : common.num_reqs + 1]
        prefill = compat.expanded_prompts(
            block_table=common.block_table_tensor[first : common.num_reqs],
            query_start_loc=starts - starts[0],
            max_query_len=int(query_lens.max()),
            query_lens_cpu=torch.from_numpy(query_lens),
        )
        if self._workspace is None:
            return prefill, plan_prefill(
                prefill.block_table,
                prefill.query_start_loc,
                common.seq_lens[first : common.num_reqs],
                block_size=self._block_size,
            )
        starts = common.query_start_loc_cpu[first:]
        prefill.chunked_context = compat.chunked_context(
            context_lens_cpu=torch.from_numpy(contexts),
            prefill_query_start_loc_cpu=starts - starts[0],
            chunked_prefill_workspace=self._workspace,
            chunked_prefill_workspace_size=WORKSPACE_ROWS,
            block_size=self._block_size,
            align_chunk_to_block=True,
            device=self._device,
            dcp_world_size=1,
            dcp_local_block_size=1,
            dcp_virtual_block_size=1,
        )
        compat.merge_every_context(prefill, lambda: contexts)
        prefill.q_data_type = prefill.output_dtype = self._dtype
        prefill.prefill_backend = self._backend
        self._backend.prepare_metadata(prefill)
        return prefill, None
