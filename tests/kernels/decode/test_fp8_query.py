# SPDX-License-Identifier: Apache-2.0
"""Queries of float8_e4m3fn without a GPU: values, refusals, and which kernel a GPU gets."""

from fractions import Fraction

import pytest
import torch
from mla_kernels import mla_decode, plan_mla_decode
from mla_kernels.decode import choice
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.testing import metrics
from mla_kernels.testing.cases import decode_case

FP8 = torch.float8_e4m3fn
GPU = torch.device("cuda:0")
CACHES = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "fp8": {"cache_dtype": FP8, "kv_scale": 0.02},
    "fp8_ds_mla": {"cache_dtype": torch.uint8},
}


def fp8_case(lengths, cache="fp8", q_scale=0.03, **options):
    """(case, q): the case has the values of q in fp32, and q their codes."""
    case = decode_case(lengths, **CACHES[cache] | options)
    q = (case.q.float() / q_scale).to(FP8)
    object.__setattr__(case, "q", q.float() * q_scale)
    return case, q


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("s_q", [1, 3])
def test_codes_stand_for_their_values(impl, cache, s_q):
    """Exactly: nothing between q's codes and the bf16 output is rounded to less than fp32."""
    case, q = fp8_case([0, 1, 63, 200], cache, s_q=s_q, num_heads=6)
    out = torch.full((4, s_q, 6, 512), torch.nan, dtype=torch.bfloat16)
    got, lse = mla_decode(q, *case.args[1:], **case.options, q_scale=0.03, impl=impl, out=out)
    assert got is out
    want, want_lse = mla_decode_reference(*case.args, **case.options, causal=True)
    differ = got != want.to(torch.bfloat16)  # fp32 sums that fall on the other side of a midpoint
    assert differ.float().mean() < 5e-3
    assert metrics.measure(got, want).peak < 2.0**-8
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    "form",
    [0.03, torch.tensor(0.03), torch.tensor([0.03]), torch.full((1,) * 5, 0.03), Fraction(3, 100)],
)
def test_forms_of_the_scale(impl, form):
    case, q = fp8_case([5, 70], num_heads=4)
    args = (q, *case.args[1:])
    want, want_lse = mla_decode(*args, **case.options, q_scale=0.03, impl=impl)
    out, lse = mla_decode(*args, **case.options, q_scale=form, impl=impl)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=2**-7, atol=0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_no_scale_is_a_scale_of_one():
    case, q = fp8_case([5, 70], num_heads=4, q_scale=1.0)
    args = (q, *case.args[1:])
    for other in ({}, {"q_scale": None}):
        out, _ = mla_decode(*args, **case.options, **other)
        assert torch.equal(out, mla_decode(*args, **case.options, q_scale=1.0)[0])


@pytest.mark.parametrize("rescale", ["pow2", "amla", "flash"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_modes(rescale, deterministic):
    case, q = fp8_case([70, 300], num_heads=4)
    options = {**case.options, "rescale": rescale, "deterministic": deterministic}
    out, _ = mla_decode(q, *case.args[1:], **options, q_scale=0.03)
    want, _ = mla_decode_reference(*case.args, **case.options, causal=True)
    assert metrics.measure(out, want).fro < 2e-3


def test_rows_of_tokens():
    case, q = fp8_case([70, 5], num_heads=4, s_q=2)
    plan = plan_mla_decode(case.seq_lens, num_heads=4, s_q=2, dtype=FP8, kv_cache_dtype=FP8)
    options = {**case.options, "q_scale": torch.tensor(0.03), "plan": plan}
    out, lse = mla_decode_tokens(q.flatten(0, 1), *case.args[1:], **options)
    want, want_lse = mla_decode(q, *case.args[1:], **options)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, want.flatten(0, 1)) and torch.equal(lse, want_lse.flatten(0, 1))


REFUSED = {
    "parts": (lambda q: {"q": (q[..., :512], q[..., 512:])}, "as one tensor, got its two parts"),
    "e5m2": (lambda q: {"q": q.to(torch.float8_e5m2)}, r"q.dtype in .*float8_e4m3fn.*e5m2"),
    "scale of bf16": (
        lambda q: {"q": q.bfloat16()},
        r"q_scale=None for q of torch.bfloat16, got 0.03",
    ),
    "scale of parts": (
        lambda q: {"q": (q[..., :512].bfloat16(), q[..., 512:].bfloat16())},
        "q_scale=None for q of torch.bfloat16",
    ),
    "zero": (lambda q: {"q_scale": 0.0}, "finite q_scale above 0, got 0.0"),
    "NaN": (lambda q: {"q_scale": torch.tensor(torch.nan)}, "finite q_scale above 0, got nan"),
    "text": (lambda q: {"q_scale": "1"}, "finite q_scale above 0, got '1'"),
    "fp64": (lambda q: {"q_scale": torch.ones(1).double()}, r"q_scale.dtype in .*float64"),
    "a scale a head": (lambda q: {"q_scale": torch.ones(4)}, r"q_scale with 1 element, got \[4\]"),
    "elsewhere": (
        lambda q: {"q_scale": torch.ones(1, device="meta")},
        "q_scale on cpu, like q, got meta",
    ),
    "out in fp8": (lambda q: {"out": q[..., :512]}, r"out.dtype in .*bfloat16.*got .*float8"),
    "triton": (lambda q: {"impl": "triton"}, "'triton' .* takes q of bfloat16 or float16, got fl"),
    "hopper": (lambda q: {"impl": "hopper"}, "'hopper' .* needs an sm_90 GPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    case, q = fp8_case([5, 70], num_heads=4)
    change, message = REFUSED[name]
    call = dict(zip(("kv_cache", "block_table", "seq_lens"), case.args[1:], strict=True))
    call |= {"q": q, "q_scale": 0.03, **case.options, **change(q)}
    with pytest.raises(ValueError, match=message):
        mla_decode(**call)


def test_the_sparse_attention_takes_none():
    from mla_kernels import mla_sparse_attention

    case, q = fp8_case([70], num_heads=4)
    slots = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"q.dtype in .*got torch.float8_e4m3fn"):
        mla_sparse_attention(q[:, 0], case.kv_cache, slots, scale=0.1, kv_scale=0.02)


def choose(impl="auto", **changes):
    known = {"dtype": FP8, "kv_cache_dtype": FP8} | changes
    return choice.choose_decode_impl(impl, GPU, **known)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_cache_dtype": torch.bfloat16}, "needs a cache of the same dtype, got .*bfloat16"),
        ({"kv_cache_dtype": torch.uint8}, "needs a cache of the same dtype, got torch.uint8"),
        ({"block_size": 32}, "needs blocks of 64 tokens, got 32"),
        ({"rescale": "amla"}, "rescales by 'pow2', got 'amla'"),
        ({"contiguous": False}, "needs q, kv_cache and out contiguous"),
    ],
)
def test_nothing_stands_in_on_a_gpu(gpu, changes, why):
    gpu(90)
    with pytest.raises(ValueError, match=f"'hopper' .*{why}"):
        choose("hopper", **changes)
    with pytest.raises(ValueError, match=f"for the Hopper kernel alone: .*{why}.*torch"):
        choose(**changes)
    with pytest.raises(ValueError, match="takes q of bfloat16 or float16"):
        choose("triton", **changes)
    assert choose("torch", **changes).impl == "torch"


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_other_gpus_are_refused(gpu, sm):
    gpu(sm)
    with pytest.raises(ValueError, match=f"Hopper kernel alone: .* needs an sm_90 GPU.*sm_{sm}"):
        choose()


def test_a_hopper_gpu_takes_its_kernel(gpu):
    gpu(90)
    assert choose().impl == choose("hopper").impl == "hopper"
    assert "fp8 queries" in choose().reason


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (16, 1), (64, 1), (65, 2), (128, 2), (512, 8)])
def test_parts_are_for_tiles_of_64_rows(monkeypatch, rows, tiles):
    pytest.importorskip("triton")
    from types import SimpleNamespace

    from mla_kernels.decode.hopper.parts import parts_for

    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert parts_for(rows, GPU, FP8, FP8) == 132 // tiles
