# SPDX-License-Identifier: Apache-2.0
"""fp8 queries through the public functions on a Hopper GPU: replays, CUDA graphs, refusals."""

import pytest
import torch
from mla_kernels import mla_decode, plan_mla_decode
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.testing import metrics
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.graphs import captured
from mla_kernels.triton_common.direct import Replay

FP8 = torch.float8_e4m3fn
Q_SCALE, KV_SCALE = 0.01, 0.02
LENGTHS = [0, 70, 1, 3000, 65]
# Weights of 4 significant bits are off by up to 2^-4 of themselves, so that much is an outer bound
# on what random values may differ by; what the kernel is compared with exactly is elsewhere.
BAR = metrics.Bar(2.0**-4, 2.0**-3, 2.0**-3)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an sm_90 GPU",
    ),
]


class Call:
    """A decode of fp8 queries with a plan, its results in tensors of its own."""

    def __init__(self, heads=128, s_q=1, deterministic=False, lengths=LENGTHS, seed=0):
        self.case = decode_case(
            lengths, num_heads=heads, s_q=s_q, q_std=0.5, cache_dtype=FP8, kv_scale=KV_SCALE,
            seed=seed, device="cuda",
        )  # fmt: skip
        self.q = (self.case.q.float() / Q_SCALE).to(FP8)
        self.options = self.case.options | {"deterministic": deterministic}
        self.options["q_scale"] = torch.tensor(Q_SCALE, device="cuda")
        self.options["kv_scale"] = torch.tensor([KV_SCALE], device="cuda")
        self.plan = self.new_plan(heads, s_q, deterministic)
        self.out = self.case.poisoned_out()
        self.lse = self.out.new_full(self.out.shape[:3], torch.nan, dtype=torch.float32)

    def new_plan(self, heads, s_q, deterministic):
        return plan_mla_decode(
            self.case.seq_lens, num_heads=heads, s_q=s_q, deterministic=deterministic,
            max_seq_len=4096, dtype=FP8, kv_cache_dtype=FP8,
        )  # fmt: skip

    def __call__(self, plan=None, **changes):
        results = {"out": self.out, "lse": self.lse} if plan is None else {}
        options = self.options | results | changes
        return mla_decode(self.q, *self.case.args[1:], plan=plan or self.plan, **options)

    def reference(self, **changes):
        options = {**self.case.options, "kv_scale": KV_SCALE} | changes
        q = self.q.float() * Q_SCALE
        return mla_decode_reference(q, *self.case.args[1:], **options, causal=True)


@pytest.fixture
def replays(monkeypatch):
    """Grows by one with each replay."""
    seen, call = [], Replay.__call__

    def counted(self, *args):
        seen.append(self)
        call(self, *args)

    monkeypatch.setattr(Replay, "__call__", counted)
    return seen


@pytest.mark.parametrize(("heads", "s_q"), [(128, 1), (128, 2), (16, 1), (16, 4), (6, 5), (1, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_against_the_definition(heads, s_q, deterministic):
    call = Call(heads, s_q, deterministic)
    out, lse = call()
    assert out is call.out and out.dtype == torch.bfloat16
    want, want_lse = call.reference()
    assert not BAR.failures(metrics.measure(out, want))
    seen = torch.isfinite(want_lse)
    assert torch.equal(seen, torch.isfinite(lse))
    assert (lse - want_lse)[seen].abs().max() < 2.0**-4


@pytest.mark.parametrize(("heads", "s_q"), [(128, 1), (16, 4)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_replay_takes_the_scales_that_it_is_given(heads, s_q, deterministic, replays):
    """Of another layer: other tensors of the same kind."""
    first = Call(heads, s_q, deterministic)
    first()
    for seed, q_scale in ((1, Q_SCALE / 2), (2, Q_SCALE * 3)):
        other = Call(heads, s_q, deterministic, seed=seed)
        other.options["q_scale"] = torch.tensor(q_scale, device="cuda")
        want, want_lse = other(other.new_plan(heads, s_q, deterministic))
        before = len(replays)
        other.plan = first.plan
        got, lse = other()
        assert len(replays) == before + 1
        assert torch.equal(got, want) and torch.equal(lse, want_lse)


def test_rows_of_tokens(replays):
    call = Call(16, 4)
    want, want_lse = call()
    for n in range(2):
        out, lse = mla_decode_tokens(
            call.q.flatten(0, 1), *call.case.args[1:], plan=call.plan, **call.options
        )
        assert len(replays) == n
        assert torch.equal(out, want.flatten(0, 1)) and torch.equal(lse, want_lse.flatten(0, 1))


@pytest.mark.parametrize("scale", ["number", "tensor", "none"])
def test_forms_of_the_scale(scale):
    call = Call(64)
    forms = {"number": Q_SCALE, "tensor": torch.full((1,), Q_SCALE, device="cuda"), "none": None}
    softmax = call.options["scale"]
    if scale == "none":
        call.options["scale"] = softmax * Q_SCALE
    out, lse = call(q_scale=forms[scale])
    want, want_lse = call.reference()
    assert not BAR.failures(metrics.measure(out, want))
    seen = torch.isfinite(want_lse)
    assert (lse - want_lse)[seen].abs().max() < 2.0**-4


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_replays_with_other_lengths(deterministic):
    call = Call(128, 2, deterministic, lengths=[3000] * 6)
    call.case.kv_cache.view(torch.uint8).bitwise_and_(0x3F)  # rows are read past other ends

    def step():
        call.plan.update(call.case.seq_lens)
        call()

    graph, _ = captured(step)
    for lengths in ([1, 0, 64, 2999, 65, 1000], [3000, 2, 3, 4, 5, 0]):
        call.case.seq_lens.copy_(torch.tensor(lengths))
        call.out.fill_(torch.nan)
        graph.replay()
        got = call.out.clone()
        call(call.new_plan(128, 2, deterministic), out=call.out.fill_(torch.nan))
        assert torch.equal(got, call.out)
        assert not BAR.failures(metrics.measure(got, call.reference()[0]))


def test_steps_neither_allocate_nor_sync_nor_compile(only_launches):
    call = Call(128)
    call()
    call()
    with only_launches():
        for _ in range(10):
            call.plan.update(call.case.seq_lens)
            call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"impl": "triton"}, "takes q of bfloat16 or float16"),
        ({"rescale": "amla"}, "Hopper kernel alone: .*rescales by 'pow2'"),
        ({"q_scale": torch.ones(1)}, "q_scale on cuda"),
    ],
)
def test_refusals_on_a_gpu(change, words):
    with pytest.raises(ValueError, match=words):
        Call(16)(**change)


def test_a_result_that_starts_at_an_odd_element_is_refused():
    call = Call(16)
    odd = call.out.new_empty(call.out.numel() + 1)[1:].view_as(call.out)
    with pytest.raises(ValueError, match="needs q, kv_cache and out contiguous"):
        call(out=odd)
    assert not torch.isfinite(call.out).any()
