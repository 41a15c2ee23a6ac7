# SPDX-License-Identifier: Apache-2.0
"""What the sparse warm-up compiles covers what steps launch: keys of every launch are recorded."""

import random
import sys
import types

import pytest
import torch
from mla_kernels.arch import ARCHS

MAX_TOKENS, MAX_REQUESTS, HEADS, TOPK = 700, 300, 16, 2048
INDEX_HEADS = 64


class Recorder:
    """In place of a kernel: notes what Triton would specialise a launch by."""

    def __init__(self, name, function, keys):
        self.name, self.keys = name, keys
        options = getattr(function, "kwargs", {}) or {}
        self.plain = set(options.get("do_not_specialize") or ())
        if not options:  # Gluon's
            self.plain = {p.name for p in function.params if p.do_not_specialize}
        self.arg_names = list(function.arg_names)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        key = {name: self.part(name, value) for name, value in named.items()}
        self.keys.add((self.name, *sorted((k, str(v)) for k, v in key.items())))

    def part(self, name, value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int) and not isinstance(value, bool) and name in self.positional:
            return "int" if name in self.plain else (value == 1, value % 16 == 0)
        return value if name not in self.positional else type(value).__name__

    @property
    def positional(self):
        """Arguments that are not compile-time constants: those in lower case."""
        return {name for name in self.arg_names if name != name.upper()}


@pytest.fixture
def keys(monkeypatch):
    """The set of keys launched, on a pretended H200."""
    from mla_kernels.cache import api as cache_api
    from mla_kernels.cache.triton import launcher  # noqa: F401
    from mla_kernels.indexer import fused  # noqa: F401
    from mla_kernels.indexer.hopper import launcher as hopper_scores  # noqa: F401
    from mla_kernels.indexer.triton import launcher as scores
    from mla_kernels.indexer.triton import row_launchers  # noqa: F401
    from mla_kernels.query.triton import launcher as join  # noqa: F401
    from mla_kernels.sparse.hopper import launcher as hopper_sparse  # noqa: F401
    from mla_kernels.sparse.triton import launcher as sparse
    from mla_kernels.sparse.triton import tiles
    from mla_kernels.topk.triton import merge_launcher  # noqa: F401

    found = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("mla_kernels.") or ".triton.kernel" in name:
            continue
        for attribute, value in list(vars(module).items()):
            if attribute.endswith("_kernel") and hasattr(value, "arg_names"):
                monkeypatch.setattr(module, attribute, Recorder(attribute, value, found))
        for attribute, number in (("num_programs", 396), ("resident_programs", 132)):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, lambda device, number=number: number)
    monkeypatch.setattr(tiles, "INTERPRETED_SMS", 132)
    monkeypatch.setattr(sparse, "arch_of", lambda device: ARCHS[90])
    monkeypatch.setattr(scores, "INTERPRETED", ARCHS[90])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(multi_processor_count=132),
    )

    triton = types.SimpleNamespace(impl="triton")
    monkeypatch.setattr(cache_api, "choose_impl", lambda *args, **kwargs: triton)
    return found


@pytest.fixture
def two_ranks(monkeypatch):
    """Rank 0 of two; its peer brings the same candidates."""
    from mla_backend import compat
    from mla_backend.attention.shard import Shard

    monkeypatch.setattr(Shard, "of", lambda _: Shard(2, 0, 1))
    monkeypatch.setattr(
        compat, "all_gather_into", lambda gathered, own: torch.cat([own, own], out=gathered)
    )


def make_indexer(max_blocks, ranks=1, *, fp8_products, deterministic):
    from mla_kernels import indexer_topk_workspace

    from mla_backend.attention.sparse.indexer_layer import IndexerLayer
    from mla_backend.attention.sparse.shared_choice import SharedChoice

    cpu = torch.device("cpu")

    return IndexerLayer(
        heads=INDEX_HEADS,
        dtype=torch.bfloat16,
        scale_format="ue8m0",
        impl="triton",
        workspace=indexer_topk_workspace(MAX_TOKENS, max_blocks, cpu),
        topk_indices=torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32),
        fp8_products=fp8_products,
        deterministic=deterministic,
        shared=SharedChoice(ranks, TOPK, MAX_TOKENS, cpu) if ranks > 1 else None,
    )


def random_step(rng, max_tokens):
    """(query lengths, padding) of a step of one kind or another."""
    kind = rng.choice(["decode", "draft", "prompt", "mixed", "padded", "uneven drafts"])
    if kind == "decode":
        return [1] * rng.randint(1, MAX_REQUESTS), 0
    if kind == "draft":
        run = rng.randint(2, 5)
        return [run] * rng.randint(1, max_tokens // run // 2), 0
    if kind == "uneven drafts":
        return [rng.randint(1, 2) for _ in range(rng.randint(2, max_tokens // 2))], 0
    if kind == "prompt":
        run = rng.randint(1, max_tokens)
        return [run] * min(rng.randint(1, 3), max_tokens // run), 0
    lengths = [rng.choice([1, 1, 1, 2, rng.randint(1, 40)]) for _ in range(rng.randint(2, 6))]
    return lengths, rng.randint(0, 5) if kind == "padded" else 0


def random_common(rng, max_blocks, max_tokens=MAX_TOKENS):
    """vLLM's CommonAttentionMetadata of a random step."""
    query_lens, padding = random_step(rng, max_tokens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return types.SimpleNamespace(
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]) + padding,
        max_query_len=max(query_lens),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=starts.diff(),
        dcp_local_seq_lens=starts.diff(),
        block_table_tensor=torch.zeros(len(query_lens), max_blocks, dtype=torch.int32),
    )


@pytest.mark.parametrize("max_blocks, ranks", [(64, 1), (2048, 1), (64, 2)])
@pytest.mark.parametrize(
    "scores, fp8_products, deterministic",
    [
        ("hopper", True, False),
        ("hopper", False, False),
        ("triton", False, False),
        ("triton", False, True),
    ],
)
def test_no_step_launches_what_was_not_compiled(
    keys, max_blocks, ranks, scores, fp8_products, deterministic, monkeypatch, two_ranks
):
    from mla_kernels.indexer import api
    from mla_kernels.topk import merge

    from mla_backend.attention.shard import Shard
    from mla_backend.attention.sparse.rows import RowsBuilder
    from mla_backend.attention.sparse.warmup import warm_up_indexer

    monkeypatch.setattr(torch, "empty", torch.zeros)  # indices that no kernel has written
    monkeypatch.setattr(api, "_choose", lambda *_: types.SimpleNamespace(impl=scores))
    triton = types.SimpleNamespace(impl="triton")
    monkeypatch.setattr(merge, "choose_impl", lambda *args, **kwargs: triton)
    how = {"fp8_products": fp8_products, "deterministic": deterministic}
    indexer, shard = make_indexer(max_blocks, ranks, **how), None
    if ranks > 1:
        indexer.shared.shard = shard = Shard.of(None)
    builder = RowsBuilder(MAX_TOKENS, torch.device("cpu"), shard)
    warm_up_indexer(indexer, MAX_TOKENS, MAX_REQUESTS, max_blocks)
    compiled = set(keys)
    names = {key[0] for key in compiled}
    kernel = "hopper_scores_kernel" if scores == "hopper" else "scores_kernel"
    assert {kernel, "write_indexer_cache_kernel"} <= names
    assert ({"chosen_values_kernel", "merge_topk_kernel"} <= names) is (ranks > 1)
    if deterministic:
        assert {dict(key[1:])["ROWS"] for key in compiled if key[0] == "scores_kernel"} == {"1"}
    assert len(compiled) < 90, "each takes a second or two at start-up"
    keys.clear()

    rng = random.Random(0)
    cache = torch.zeros(4, 64, 132, dtype=torch.uint8)
    for _ in range(80):
        common = random_common(rng, max_blocks)
        T = common.num_actual_tokens
        indexer.run(
            torch.zeros(T, INDEX_HEADS, 128, dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.zeros(T, 128, dtype=torch.bfloat16),
            torch.zeros(T, INDEX_HEADS),
            indexer.topk_indices,
            cache,
            builder.build(common),
            torch.full((T,), -1, dtype=torch.int64),
        )
    late = [dict(key[1:]) | {"kernel": key[0]} for key in keys - compiled]
    assert not late, late[:3]


ATTENTION = {
    "hopper": ("hopper", "hopper_sparse_kernel"),
    "triton": ("triton", "mla_sparse_kernel"),
    "few rows": ("triton", "few_rows_sparse_kernel"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ATTENTION)
def test_no_step_attends_with_what_was_not_compiled(kind, ranks, keys, monkeypatch):
    import sparse_parts
    from mla_kernels.sparse import api as sparse_api
    from mla_kernels.sparse.hopper import launcher as hopper
    from mla_kernels.sparse.triton import launcher as portable

    from mla_backend.attention.sparse.rows import RowsBuilder
    from mla_backend.attention.sparse.warmup import warm_up_attention

    monkeypatch.setenv("MLA_BACKEND_IMPL", "triton")
    kernel, name = ATTENTION[kind]
    few = kind == "few rows"
    monkeypatch.setattr(portable, "INTERPRET", not few)  # which has no Gluon
    buffer = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
    impl = sparse_parts.make_impl(
        monkeypatch,
        "fp8_ds_mla" if few else "auto",
        dtype=torch.bfloat16,
        config=sparse_parts.fake_config(topk_rows=MAX_TOKENS),
        topk_indices_buffer=buffer,
        num_heads=HEADS,
    )
    if ranks > 1:  # of heads that two ranks gather
        impl.num_heads = HEADS // 2
        impl._slots = torch.empty(MAX_TOKENS, TOPK, dtype=torch.int32)
    choice = types.SimpleNamespace(impl=kernel)
    monkeypatch.setattr(sparse_api, "choose_sparse_impl", lambda *args, **kwargs: choice)
    monkeypatch.setattr(hopper, "device_arch", lambda device: ARCHS[90])
    if kernel == "hopper":
        impl._workspace = torch.empty(2**26, dtype=torch.uint8)
    layer = types.SimpleNamespace(_k_scale=torch.ones(1), impl=impl)
    builder = RowsBuilder(MAX_TOKENS, torch.device("cpu"))
    warm_up_attention(layer, 300, MAX_REQUESTS, 64)
    compiled = set(keys)
    names = {key[0] for key in compiled}
    joins = kind == "triton" and ranks == 1
    assert ("join_query_kernel" in names) is joins, "others read q in two parts, or get it joined"
    assert names >= {
        name, "mla_sparse_merge_kernel", "positions_to_slots_kernel",
        "write_kv_cache_kernel",
    }  # fmt: skip
    assert len(compiled) < 30
    keys.clear()
    rng = random.Random(1)
    cache = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
    if few:
        cache = torch.zeros(4, 64, 656, dtype=torch.uint8)
    for _ in range(40):
        common = random_common(rng, 64, 300)
        T = common.num_actual_tokens
        impl.do_kv_cache_update(
            torch.zeros(T, 512, dtype=torch.bfloat16),
            torch.zeros(T, 1, 64, dtype=torch.bfloat16),
            cache,
            torch.full((T,), -1, dtype=torch.int64),
            impl.kv_cache_dtype,
            layer._k_scale,
        )
        parts = torch.zeros(HEADS, T, 512), torch.zeros(T, HEADS, 192)[..., 128:]
        q = parts[0].bfloat16().transpose(0, 1), parts[1].bfloat16()
        if ranks > 1:
            q = torch.cat(q, -1)
        step = types.SimpleNamespace(rows=builder.build(common))
        impl.forward_mqa(q, cache, step, layer)
    late = [dict(key[1:]) | {"kernel": key[0]} for key in keys - compiled]
    assert not late, late[:3]
