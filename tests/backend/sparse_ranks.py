# SPDX-License-Identifier: Apache-2.0
"""Ranks of decode context parallelism as threads of one process, each with the backend's own
indexer, metadata builders and attention; their caches are those that vLLM's slots would fill."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import sparse_parts
import torch

BLOCK, LATENT, ROPE, INDEX_HEADS = 64, 512, 64, 4
TOPK = 96


class Group:
    """In place of vLLM's GroupCoordinator: `gather` concatenates what all ranks bring.

    One rank computes at a time, whoever has `turn`: Triton's interpreter takes no two.
    """

    def __init__(self, rank, size, turn, meeting, brought):
        self.rank_in_group, self.world_size = rank, size
        self._turn, self._meeting, self._brought = turn, meeting, brought
        self.calls = 0

    def gather(self, gathered, own):
        self.calls += 1
        self._brought[self.rank_in_group] = own.clone()
        self._meet()
        torch.cat(self._brought, out=gathered)
        self._meet()

    def _meet(self):
        self._turn.release()
        try:
            self._meeting.wait(timeout=60)
        finally:
            self._turn.acquire()


class Requests:
    """Requests of seq_lens[b] tokens, the last query_lens[b] of them new, and padding tokens.

    Keys, queries and weights of the indexer are small integers: their scores are exact in any order
    of additions, and many of them are equal.
    """

    def __init__(self, query_lens, seq_lens, heads, padding=0, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.T, self.padding = sum(query_lens), padding

        def integers(low, high, *shape):
            return torch.randint(low, high + 1, shape, generator=g).float()

        self.keys = [integers(-2, 2, n, 128) for n in seq_lens]
        rows = self.T + padding
        self.index_q = integers(-1, 1, rows, INDEX_HEADS, 128).to(torch.float8_e4m3fn)
        self.weights = integers(-1, 2, rows, INDEX_HEADS)
        self.kv = [torch.randn(n, LATENT + ROPE, generator=g) for n in seq_lens]
        self.q = torch.randn(rows, heads, LATENT + ROPE, generator=g)


def slots_of(positions, table, rank, size, interleave):
    """vLLM's slot mapping (0.26 v1/worker/block_table.py): -1 for another rank's token."""
    block, offset = positions // (BLOCK * size), positions % (BLOCK * size)
    local = offset // interleave % size == rank
    offset = offset // (size * interleave) * interleave + offset % interleave
    return torch.where(local, table[block].long() * BLOCK + offset, -1)


class Rank:
    """One rank: `step(requests)` runs a whole step on it."""

    def __init__(self, monkeypatch, group, interleave, heads, current, most_tokens=64):
        from mla_backend.attention.sparse.metadata import (
            IndexerMetadataBuilder,
            SparseMetadataBuilder,
        )

        self.group = current.group = group
        rank, size = (0, 1) if group is None else (group.rank_in_group, group.world_size)
        self.rank, self.size, self.interleave = rank, size, interleave
        config = sparse_parts.fake_config(topk_rows=most_tokens, dcp=size)
        config.parallel_config.cp_kv_cache_interleave_size = 99  # vLLM settles it later
        config.compilation_config.max_cudagraph_capture_size = 8
        self.indexer = sparse_parts.fake_indexer(n_head=INDEX_HEADS)
        self.name = self.indexer.k_cache.prefix
        self.impl = sparse_parts.make_impl(
            monkeypatch, config=config, indexer=self.indexer, num_heads=heads // size
        )
        spec = types.SimpleNamespace(block_size=BLOCK)
        self.layer = types.SimpleNamespace(
            _k_scale=torch.tensor(1.0),
            impl=self.impl,
            kv_cache=torch.empty(0),
            prefill_backend=None,
        )
        # The dict stays the engine's, by which its layers share memory.
        config.compilation_config.static_forward_context.update(
            {"attention": self.layer, self.name: self.indexer.k_cache}
        )
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        cpu = torch.device("cpu")
        self.builders = (
            IndexerMetadataBuilder(spec, [self.name], config, cpu),
            SparseMetadataBuilder(spec, ["attention"], config, cpu),
        )

    def common(self, requests):
        """vLLM's CommonAttentionMetadata: lengths of whole requests, slots and tables of a rank."""
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        blocks = -(-max(requests.seq_lens) // (BLOCK * self.size))
        common = sparse_parts.common_metadata(
            requests.query_lens,
            requests.seq_lens,
            tokens=requests.T + requests.padding,
            max_blocks=blocks,
        )
        old, new = [], []
        for b, n in enumerate(requests.seq_lens):
            table = common.block_table_tensor[b]
            slots = slots_of(torch.arange(n), table, self.rank, self.size, self.interleave)
            old.append(slots[: n - requests.query_lens[b]])
            new.append(slots[n - requests.query_lens[b] :])
        common.dcp_local_seq_lens = get_dcp_local_seq_lens(
            common.seq_lens, self.size, self.rank, self.interleave
        )
        nowhere = torch.full((requests.padding,), -1)
        common.slot_mapping = torch.cat([*new, nowhere])
        return common, torch.cat(old)

    def step(self, requests, current):
        """(chosen [T, k], out [T, H, 512], lse [T, H]) of this rank."""
        from mla_kernels import write_indexer_cache

        from mla_backend.attention.sparse.indexer import run_indexer

        common, old = self.common(requests)
        pages = common.block_table_tensor.numel()
        k_cache = torch.full((pages, BLOCK, 132), 0x7F, dtype=torch.uint8)  # NaN
        kv_cache = torch.full((pages, BLOCK, LATENT + ROPE), float("nan"))

        def part(rows, new):
            cuts = [n - q for n, q in zip(requests.seq_lens, requests.query_lens, strict=True)]
            return torch.cat(
                [x[cut:] if new else x[:cut] for x, cut in zip(rows, cuts, strict=True)]
            )

        for new, slots in ((False, old), (True, common.slot_mapping)):
            kv = part(requests.kv, new)
            if new:
                kv = torch.nn.functional.pad(kv, (0, 0, 0, requests.padding))
            self.impl.do_kv_cache_update(
                kv[:, :LATENT], kv[:, None, LATENT:], kv_cache, slots, "auto", self.layer._k_scale
            )
        write_indexer_cache(part(requests.keys, False), k_cache, old)
        self.layer.kv_cache = kv_cache
        indexed, attended = (builder.build(0, common) for builder in self.builders)
        self.indexer.k_cache.kv_cache = k_cache
        current.context = types.SimpleNamespace(
            attn_metadata={self.name: indexed}, no_compile_layers={self.name: self.indexer.k_cache}
        )
        keys = torch.nn.functional.pad(part(requests.keys, True), (0, 0, 0, requests.padding))
        buffer = self.indexer.topk_indices_buffer.fill_(7)
        run_indexer(requests.index_q, keys, requests.weights, buffer, self.name)
        T = len(requests.q)
        out, lse = self.impl.forward_mqa(requests.q, kv_cache, attended, self.layer)
        return buffer[:T].clone(), out, lse


class Cluster:
    """`size` ranks with `heads` query heads together, and how they run a step."""

    def __init__(self, monkeypatch, size, interleave, heads=8):
        from vllm.distributed import parallel_state
        from vllm.model_executor.models import deepseek_v2

        from mla_backend import compat
        from mla_backend.attention.sparse import impl, indexer

        self.size, self.current = size, threading.local()
        on_gpu = types.SimpleNamespace(is_cpu=lambda: False)
        monkeypatch.setattr(impl, "current_platform", on_gpu)
        monkeypatch.setattr(compat, "all_gather_into", lambda *args: self._group().gather(*args))
        if size == 1:  # as ranks do
            monkeypatch.setenv("MLA_BACKEND_EXPAND_PROMPTS", "0")
        else:
            monkeypatch.delenv("MLA_BACKEND_EXPAND_PROMPTS", raising=False)
        monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", None)
        monkeypatch.setattr(indexer, "get_forward_context", lambda: self.current.context)
        monkeypatch.setattr(parallel_state, "get_dcp_group", self._group)
        self._turn, self._meeting = threading.Lock(), threading.Barrier(size)
        brought = [None] * size
        self.groups = [
            Group(rank, size, self._turn, self._meeting, brought) for rank in range(size)
        ]
        self.ranks = [
            Rank(monkeypatch, group if size > 1 else None, interleave, heads, self.current)
            for group in self.groups
        ]

    def _group(self):
        assert self.current.group is not None, "as vLLM without such ranks"
        return self.current.group

    def step(self, requests):
        """What each rank has: a list of (chosen, out, lse)."""

        def run(rank):
            try:
                with self._turn:
                    self.current.group = rank.group
                    return rank.step(requests, self.current)
            except BaseException:
                self._meeting.abort()  # or the others would wait
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, self.ranks))


def whole_choice(results, size, interleave):
    """[T, k] positions within requests that all ranks chose together, ascending, -1 behind."""
    none = 2**31 - 1
    positions = []
    for rank, (chosen, _, _) in enumerate(results):
        count = (chosen >= 0).sum(1, keepdim=True)
        column = torch.arange(chosen.shape[1])
        assert ((chosen >= 0) == (column < count)).all(), "at the front of each row"
        assert (chosen.diff(dim=1)[column[1:] < count] > 0).all(), "ascending"
        position = chosen // interleave * (size * interleave) + rank * interleave
        positions.append(torch.where(chosen < 0, none, position + chosen % interleave))
    together = torch.cat(positions, 1).sort(1).values
    k = results[0][0].shape[1]
    assert (together[:, k:] == none).all(), "never more than k"
    return torch.where(together == none, -1, together)[:, :k].int()


def merged(results):
    """Output and LSE of all ranks together, in fp64 (vLLM's merge, by its definition)."""
    lses = torch.stack([lse.double() for _, _, lse in results])
    total = lses.logsumexp(0)
    shares = (lses - total.masked_fill(total.isneginf(), 0)).exp()
    outs = torch.stack([out.double() for _, out, _ in results])
    return (outs * shares[..., None]).sum(0), total
