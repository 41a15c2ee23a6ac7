# SPDX-License-Identifier: Apache-2.0
"""`mla_layer` on a GPU at full size: right, captured once, replayed with everything changed."""

import pytest
import torch
from mla_kernels import mla_layer, plan_mla_decode
from mla_kernels.layer import MlaLayerBuffers, MlaLayerConfig, rope_table
from mla_kernels.testing.graphs import captured
from mla_kernels.testing.naive_layer import NaiveMlaLayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
B, PAGE, BLOCKS = 4, 64, 8
CONFIG = MlaLayerConfig(dim=1024, num_heads=32)


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    layer = NaiveMlaLayer(CONFIG).cuda().requires_grad_(False)
    for weight in layer.parameters():
        weight.copy_((torch.randn_like(weight) * weight.shape[1] ** -0.5).bfloat16())
    return layer


class Step:
    """Static tensors of one decode step, and ways to change what is in them."""

    def __init__(self, layer):
        self.layer = layer
        self.weights = type(layer).absorbed_weights(layer.bfloat16())
        layer.float()
        self.x = torch.zeros(B, 1, CONFIG.dim, dtype=torch.bfloat16, device="cuda")
        shape = (B * BLOCKS, PAGE, CONFIG.cache.head_dim)
        self.cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        self.block_table = torch.zeros(B, BLOCKS, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.ones(B, dtype=torch.int32, device="cuda")
        self.table = rope_table(CONFIG, BLOCKS * PAGE, "cuda")
        self.buffers = MlaLayerBuffers.allocate(CONFIG, B, dtype=torch.bfloat16, device="cuda")
        self.plan = plan_mla_decode(self.seq_lens, num_heads=CONFIG.num_heads, s_q=1)

    def run(self):
        self.plan.update(self.seq_lens)
        args = (self.x, self.cache, self.block_table, self.seq_lens, self.weights, self.table)
        return mla_layer(*args, buffers=self.buffers, plan=self.plan)

    def fill(self, lens, seed):
        """New input, lengths, tables and rows; returns what the plain fp32 layer makes of them."""
        torch.manual_seed(seed)
        self.x.normal_()
        self.seq_lens.copy_(torch.tensor(lens))
        self.block_table.copy_(torch.randperm(B * BLOCKS).view(B, BLOCKS))
        self.cache.fill_(torch.nan)
        past = torch.randn(B, BLOCKS * PAGE, CONFIG.cache.head_dim, device="cuda").bfloat16()
        rows = self.layer.rotated_rows(past.float()).bfloat16().unflatten(1, (BLOCKS, PAGE))
        self.cache[self.block_table.long()] = rows
        want = torch.zeros(B, 1, CONFIG.dim, device="cuda")
        for b, n in enumerate(lens):
            if n:
                # Junk from the new token on: the step itself must write its row.
                page, at = self.block_table[b, (n - 1) // PAGE], (n - 1) % PAGE
                self.cache[page, at:] = torch.nan
                one = slice(b, b + 1)
                want[one] = self.layer(self.x[one].float(), past[one, : n - 1].float())[0]
        self.buffers.out.fill_(torch.nan)
        return want


def assert_close(got, want):
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < 1.5e-2  # bf16 between every pair of matrix products


CASES = [[1, 64, 65, 512], [512, 0, 33, 128], [0, 0, 0, 7], [300, 301, 302, 303]]


def test_eager_step_is_right(layer):
    step = Step(layer)
    for seed, lens in enumerate(CASES):
        want = step.fill(lens, seed)
        assert_close(step.run(), want)


def test_one_captured_graph_serves_every_later_step(layer):
    step = Step(layer)
    step.fill([1, 2, 3, 4], 99)
    graph, _ = captured(step.run)
    for seed, lens in enumerate(CASES):
        want = step.fill(lens, seed)
        graph.replay()
        assert_close(step.buffers.out, want)
        assert not step.buffers.out[[n == 0 for n in lens]].any()


def test_steps_do_not_synchronise_or_grow_memory(layer):
    step = Step(layer)
    step.fill(CASES[0], 0)
    step.run()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before
