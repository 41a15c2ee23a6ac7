# SPDX-License-Identifier: Apache-2.0
"""Bytes of the KV cache."""

from mla_kernels.layouts import BLOCK_SIZE, Fp8DsMlaLayout, IndexerLayout, MlaDims

from mla_serving.plan.model import MlaModel

_FP8_DS_MLA = MlaDims(512, 64)


def row_bytes(model: MlaModel, kv_cache_dtype: str) -> int:
    """One token in one attention's cache: the latent and rope row. Of a dtype that is not "auto";
    ValueError for a layout it has not."""
    if kv_cache_dtype == "fp8_ds_mla":
        if model.dims != _FP8_DS_MLA:
            widths = f"{model.dims.kv_lora_rank} + {model.dims.rope_dim}"
            raise ValueError(
                f"fp8_ds_mla rows are for 512 + 64 elements, {model.name} has {widths}"
            )
        return Fp8DsMlaLayout(model.dims).row_bytes
    return model.dims.head_dim * {"fp8": 1, "fp8_e4m3": 1}.get(kv_cache_dtype, 2)


def indexer_row_bytes(model: MlaModel) -> int:
    """One token in one layer of the Lightning Indexer's cache; 0 for a dense model."""
    if not model.sparse:
        return 0
    return IndexerLayout(model.index_dim).page_bytes // BLOCK_SIZE


def token_bytes(model: MlaModel, kv_cache_dtype: str, layers: range) -> int:
    """One token in all of `layers`."""
    indexers = model.indexers(layers) * indexer_row_bytes(model)
    rows = len(layers) * len(model.attentions)
    return rows * row_bytes(model, kv_cache_dtype) + indexers
