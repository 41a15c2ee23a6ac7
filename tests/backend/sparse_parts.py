# SPDX-License-Identifier: Apache-2.0
"""Pieces of the sparse backend without an engine: steps, configurations, a layer, its indexer."""

import types

import torch

BLOCK, H, RANK, ROPE, NOPE = 64, 4, 512, 64, 128
SCALE = 1 / 24


def common_metadata(query_lens, seq_lens, *, tokens=None, max_blocks=6):
    """vLLM's CommonAttentionMetadata of these requests; `tokens` counts padding too."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tables = torch.randperm(len(seq_lens) * max_blocks, generator=torch.Generator().manual_seed(1))
    return types.SimpleNamespace(
        num_reqs=len(seq_lens),
        num_actual_tokens=int(starts[-1]) if tokens is None else tokens,
        max_query_len=max(query_lens),
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_tensor=tables.view(len(seq_lens), max_blocks).int(),
    )


def build_rows(*args, **kwargs):
    from mla_backend.attention.sparse.rows import RowsBuilder

    return RowsBuilder(64, torch.device("cpu")).build(common_metadata(*args, **kwargs))


class CompilationConfig(types.SimpleNamespace):
    """Other than its base it takes weak references, as vLLM's does."""


def fake_config(topk_rows=64, dcp=1, drafts=0, ubatches=1, stages=1, method="mtp"):
    speculative = types.SimpleNamespace(
        num_speculative_tokens=drafts, method=method, parallel_drafting=False
    )
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(
            decode_context_parallel_size=dcp, num_ubatches=ubatches, pipeline_parallel_size=stages
        ),
        use_v2_model_runner=False,
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=topk_rows, max_num_seqs=4),
        speculative_config=speculative if drafts else None,
        model_config=types.SimpleNamespace(max_model_len=384),
        cache_config=types.SimpleNamespace(block_size=64),
        attention_config=types.SimpleNamespace(sparse_mla_force_mqa=False),
        compilation_config=CompilationConfig(
            splitting_ops=["vllm::sparse_attn_indexer"], static_forward_context={}
        ),
    )


def make_impl(monkeypatch, kv_cache_dtype="auto", dtype=torch.float32, config=None, **changes):
    from mla_backend import compat
    from mla_backend.attention.sparse import impl as module

    monkeypatch.setattr(module, "get_current_vllm_config", lambda: config or fake_config())
    monkeypatch.setattr(compat, "mla_prefill_backend", lambda _: "CPU")
    args = {
        "num_heads": H,
        "head_size": RANK + ROPE,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": kv_cache_dtype,
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "topk_indices_buffer": torch.full((64, 96), -1, dtype=torch.int32),
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": NOPE,
        "kv_b_proj": types.SimpleNamespace(quant_method=None),
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return module.SparseMlaImpl(**args | changes)
    finally:
        torch.set_default_dtype(before)


def fake_indexer(**changes):
    op = types.SimpleNamespace(_forward_method=None)
    cache = types.SimpleNamespace(prefix="layers.0.indexer.k_cache", get_attn_backend=None)
    values = {"head_dim": 128, "n_head": 8, "topk_tokens": 96, "scale_fmt": "ue8m0"}
    buffer = torch.full((64, 96), -1, dtype=torch.int32)
    indexer = {"indexer_op": op, "k_cache": cache, "topk_indices_buffer": buffer}
    return types.SimpleNamespace(**indexer | values | changes)
