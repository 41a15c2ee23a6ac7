# SPDX-License-Identifier: Apache-2.0
"""The sparse kernel on a GPU: real sizes, CUDA graphs, a decode step that allocates nothing."""

import pytest
import torch
from mla_kernels import mla_sparse_attention, mla_sparse_workspace
from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.testing.metrics import SHORT_BAR, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

K = 2048
SCALE = 576**-0.5
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}


class Step:
    """A decode step as a server runs it: other queries and slots, the same memory."""

    def __init__(self, T, heads, cache="bf16", blocks=256):
        g = torch.Generator("cuda").manual_seed(0)
        rows = torch.randn(blocks * 64, 576, generator=g, device="cuda").bfloat16()
        self.kv_scale = 2.0**-6 if cache == "fp8" else None
        if cache != "bf16":
            rows = encode_rows(rows[:, :512], rows[:, 512:], DTYPES[cache], self.kv_scale)
        self.kv = rows.view(blocks, 64, -1)
        self.q = torch.empty(T, heads, 576, dtype=torch.bfloat16, device="cuda")
        self.slots = torch.empty(T, K, dtype=torch.int32, device="cuda")
        self.out = torch.empty(T, heads, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(T, heads, device="cuda")
        self.workspace = mla_sparse_workspace(T, heads, K, device=self.q.device)
        self.change(0)

    def change(self, seed):
        """New queries and slots; one of several tokens has none. Results are poisoned."""
        g = torch.Generator("cuda").manual_seed(seed)
        self.q.normal_(generator=g).mul_(0.5)
        T, num_slots = len(self.q), self.kv.shape[0] * 64
        self.slots.random_(0, num_slots, generator=g)
        lengths = torch.randint(1, K + 1, (T, 1), generator=g, device="cuda")
        if T > 1:
            lengths[seed % T] = 0
        self.slots[torch.arange(K, device="cuda") >= lengths] = -1
        for result in (self.out, self.lse):
            result.fill_(torch.nan)
        self.workspace.fill_(0xFF)

    def __call__(self):
        mla_sparse_attention(
            self.q, self.kv, self.slots, scale=SCALE, kv_scale=self.kv_scale,
            out=self.out, lse=self.lse, workspace=self.workspace,
        )  # fmt: skip

    def check(self, tokens=4):
        torch.cuda.synchronize()
        T = len(self.q)
        some = sorted({*range(0, T, max(1, T // tokens)), T - 1})
        want, lse = mla_sparse_attention_reference(
            self.q[some], self.kv, self.slots[some], scale=SCALE, kv_lora_rank=512,
            kv_scale=self.kv_scale, lengths=None, sink=None,
        )  # fmt: skip
        assert SHORT_BAR.failures(measure(self.out[some], want)) == []
        seen = torch.isfinite(lse)
        assert torch.equal(seen, torch.isfinite(self.lse[some]))
        assert (self.lse[some] - lse)[seen].abs().max() < 2**-8


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("T", [1, 33, 300])
def test_tokens_heads_and_caches(cache, heads, T):
    step = Step(T, heads, cache)
    step.change(T + 1)
    step()
    step.check()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("T", [2, 64])
def test_graph_replays_with_other_slots(heads, T):
    step = Step(T, heads, "fp8_ds_mla")
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(1, 4):
        step.change(seed)
        graph.replay()
        step.check()


def test_steps_neither_allocate_nor_sync_nor_compile():
    import triton

    step = Step(8, 16, "fp8_ds_mla")
    step()
    compiled = []
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    listener, triton.knobs.compilation.listener = (
        triton.knobs.compilation.listener,
        lambda **event: compiled.append(event),
    )
    try:
        for _ in range(10):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        triton.knobs.compilation.listener = listener
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert not compiled
    step.check()


def test_the_same_bits_every_time():
    step = Step(40, 16)
    step()
    first, lse = step.out.clone(), step.lse.clone()
    for _ in range(20):
        step.out.fill_(torch.nan)
        step()
        assert torch.equal(step.out, first) and torch.equal(step.lse, lse)


def test_rows_past_two_to_the_31_elements():
    """int64 addresses: the last rows of a cache of 2.4e9 elements."""
    blocks = 2**16
    kv = torch.zeros(blocks, 64, 576, dtype=torch.bfloat16, device="cuda")
    kv[-1] = 1.0
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(blocks * 64 - 64, blocks * 64, dtype=torch.int32, device="cuda")[None]
    out, _ = mla_sparse_attention(q, kv, slots, scale=SCALE, impl="triton")
    assert torch.equal(out, torch.ones_like(out))
