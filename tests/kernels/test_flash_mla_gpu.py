# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's functions on a GPU, beside the definitions in fp64; in a CUDA graph, too."""

import pytest
import torch
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.decoded import LSE_BAR
from mla_kernels.testing.graphs import captured
from mla_kernels.testing.metrics import SHORT_BAR, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE = "cuda"
LENGTHS = [0, 1, 63, 64, 65, 200, 1000, 5000, 33]
SCALE = 576**-0.5


def assert_close(got, want):
    """(out, lse): rows of decode are [B, s_q, H] in out, [B, H, s_q] in lse. The definition's lse
    of no key is -inf, FlashMLA's +inf."""
    (out, lse), (want_out, want_lse) = got, want
    assert out.shape == want_out.shape
    assert SHORT_BAR.failures(measure(out, want_out)) == []
    assert lse.shape == want_lse.shape and lse.dtype == torch.float32
    lonely = want_lse == -torch.inf
    assert torch.equal(lse == torch.inf, lonely)
    rows = out.transpose(1, 2) if out.dim() == 4 else out
    assert not rows[lonely].any()
    assert ((lse - want_lse)[~lonely].abs() < LSE_BAR).all()


def dense(case, causal, meta, **options):
    k_cache = case.kv_cache.unsqueeze(2)
    args = (case.q, k_cache, case.block_table, case.seq_lens, 512, meta, None, SCALE, causal)
    return flash_mla_with_kvcache(*args, is_fp8_kvcache=k_cache.dtype == torch.uint8, **options)


def assert_dense(case, causal, got):
    out, lse = mla_decode_reference(*case.args, **case.options, causal=causal)
    assert_close(got, (out, lse.transpose(1, 2)))


@pytest.mark.parametrize("cache", [None, torch.uint8])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("s_q", "causal"), [(1, False), (2, True), (2, False), (17, True)])
def test_dense_decode(cache, heads, s_q, causal):
    case = decode_case(
        LENGTHS, num_heads=heads, s_q=s_q, q_std=0.5, cache_dtype=cache, device=DEVICE
    )
    meta, _ = get_mla_metadata()
    assert_dense(case, causal, dense(case, causal, meta))
    # The second layer of a step: the plan is there, the queries are others.
    case.q.mul_(-1)
    out = case.poisoned_out()
    got = dense(case, causal, meta, out=out)
    assert got[0] is out
    assert_dense(case, causal, got)


class SparseDecode:
    """A decode step over fp8_ds_mla rows. Rows of no request, and of its table's end, are NaN."""

    TOPK = 512

    def __init__(self, heads, s_q):
        self.case = decode_case(
            [3000, 700, 64, 1, 2000], num_heads=heads, s_q=s_q, q_std=0.5,
            cache_dtype=torch.uint8, device=DEVICE,
        )  # fmt: skip
        B = len(self.case.seq_lens)
        self.indices = torch.empty(B, s_q, self.TOPK, dtype=torch.int32, device=DEVICE)
        self.topk_length = torch.empty(B, dtype=torch.int32, device=DEVICE)
        self.sink = torch.empty(heads, device=DEVICE)
        self.change(0)

    def change(self, seed):
        """Other queries, indices, lengths and sinks, in the same memory."""
        g = torch.Generator().manual_seed(seed)
        case = self.case
        case.q.copy_(torch.randn(case.q.shape, generator=g) * 0.5)
        table = case.block_table.cpu()
        for b, n in enumerate(case.seq_lens.tolist()):
            position = torch.randint(0, n, self.indices.shape[1:], generator=g)
            slots = table[b, position // 64] * 64 + position % 64
            slots[torch.rand(slots.shape, generator=g) < 0.2] = -1
            self.indices[b].copy_(slots)
        lengths = torch.randint(1, self.TOPK + 1, self.topk_length.shape, generator=g)
        lengths[seed % len(lengths)] = 0
        self.topk_length.copy_(lengths)
        sink = torch.randn(self.sink.shape, generator=g)
        sink[:2] = torch.tensor([torch.inf, -torch.inf])
        self.sink.copy_(sink)

    def __call__(self):
        return flash_mla_with_kvcache(
            self.case.q, self.case.kv_cache.unsqueeze(2), None, None, 512, get_mla_metadata()[0],
            softmax_scale=SCALE, is_fp8_kvcache=True, indices=self.indices,
            attn_sink=self.sink, topk_length=self.topk_length,
        )  # fmt: skip

    def check(self, got):
        q = self.case.q
        B, s_q, H, _ = q.shape
        lengths = torch.tensor([n for n in self.topk_length.tolist() for _ in range(s_q)])
        out, lse = mla_sparse_attention_reference(
            q.flatten(0, 1), self.case.kv_cache, self.indices.flatten(0, 1), scale=SCALE,
            kv_lora_rank=512, kv_scale=None, lengths=lengths, sink=self.sink,
        )  # fmt: skip
        want = out.view(B, s_q, H, 512), lse.view(B, s_q, H).transpose(1, 2)
        assert_close(got, want)
        assert not got[0][:, :, 0].any(), "an infinite sink takes all the weight"


# With few heads the portable kernel, with many on sm_90 the Hopper one.
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("s_q", [1, 3])
def test_sparse_decode(heads, s_q):
    step = SparseDecode(heads, s_q)
    step.check(step())


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("s_kv", [4096, 1003])
@pytest.mark.parametrize("more", [False, True])
def test_sparse_prefill(heads, s_kv, more):
    """`more`: with topk_length and attn_sink."""
    g = torch.Generator().manual_seed(0)
    T, K = 70, 300
    q = (torch.randn(T, heads, 576, generator=g) * 0.5).bfloat16().to(DEVICE)
    kv = torch.randn(s_kv, 1, 576, generator=g).bfloat16().to(DEVICE)
    indices = torch.randint(-1, s_kv, (T, 1, K), generator=g, dtype=torch.int32)
    indices[:, :, ::7] = s_kv + 1
    indices[5] = -1
    indices = indices.to(DEVICE)
    options = {"topk_length": None, "attn_sink": None}
    if more:
        lengths = torch.randint(0, K + 1, (T,), generator=g, dtype=torch.int32)
        lengths[7] = 0
        sink = torch.randn(heads, generator=g)
        options = {"topk_length": lengths.to(DEVICE), "attn_sink": sink.to(DEVICE)}
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, SCALE, **options)
    want_max = torch.empty_like(max_logits)
    want = mla_sparse_attention_reference(
        q, kv, indices[:, 0], scale=SCALE, kv_lora_rank=512, kv_scale=None,
        lengths=options["topk_length"], sink=options["attn_sink"], max_logits=want_max,
    )  # fmt: skip
    assert_close((out, lse), want)
    assert bool((max_logits[5] == -torch.inf).all())
    torch.testing.assert_close(max_logits, want_max, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("heads", [16, 128])
def test_graph_of_a_dense_decode(heads):
    """Metadata taken inside the graph is made anew by each replay, so lengths may change."""
    case = decode_case([2000, 5, 900, 64], num_heads=heads, q_std=0.5, device=DEVICE)

    def two_layers():
        meta, _ = get_mla_metadata()
        return dense(case, False, meta), dense(case, False, meta)

    graph, layers = captured(two_layers)
    for lengths in ([2000, 5, 900, 64], [1, 0, 899, 63], [1999, 3, 0, 64]):
        case.seq_lens.copy_(torch.tensor(lengths))
        case.q.mul_(-1)
        for out, lse in layers:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for got in layers:
            assert_dense(case, False, got)


@pytest.mark.parametrize("heads", [16, 128])
def test_graph_of_a_sparse_decode(heads):
    step = SparseDecode(heads, 2)
    graph, got = captured(step)
    for seed in range(1, 4):
        step.change(seed)
        for result in got:
            result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        step.check(got)
