# SPDX-License-Identifier: Apache-2.0
"""mla_sparse_attention against its definition, and against dense attention over the same rows."""

import pytest
import torch
from mla_kernels import mla_decode, mla_sparse_attention, mla_sparse_workspace
from mla_kernels.layouts import MlaDims
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.metrics import MIRROR_BAR, SHORT_BAR, measure

FORMATS = {"bf16": None, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}


def sparse_case(
    lengths=(300, 64, 1), K=96, *, heads=16, cache="bf16", seed=0, dims=MlaDims(), **options
):
    """(q [T, H, Dk], cache, slots [T, K], keyword arguments): one token a request, random slots of
    its own rows, a tail of -1 where it has fewer than K. Everything else in the cache is NaN."""
    kv_scale = 0.02 if cache == "fp8" else None
    dtype = FORMATS[cache]
    case = decode_case(
        list(lengths), num_heads=heads, cache_dtype=dtype, kv_scale=kv_scale, seed=seed, dims=dims,
        **options,
    )  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    block = case.kv_cache.shape[1]
    slots = torch.full((len(lengths), K), -1, dtype=torch.int32)
    for t, n in enumerate(lengths):
        position = torch.randperm(n, generator=g)[:K]
        page = case.block_table[t, position // block]
        slots[t, : len(position)] = page * block + position % block
    return case.q[:, 0], case.kv_cache, slots, case.options


def attend(q, cache, slots, options, **more):
    """mla_sparse_attention into a NaN-filled output."""
    out = q.new_full((*q.shape[:2], options["kv_lora_rank"]), torch.nan)
    result, lse = mla_sparse_attention(q, cache, slots, out=out, **options, **more)
    assert result is out
    return result, lse


def assert_close(got, want, bar=SHORT_BAR):
    assert bar.failures(measure(got[0], want[0])) == []
    torch.testing.assert_close(got[1].double(), want[1].double(), atol=4e-3, rtol=0)


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("heads", [1, 8, 128])
def test_matches_the_definition(cache, heads):
    q, kv, slots, options = sparse_case(heads=heads, cache=cache)
    got = attend(q, kv, slots, options, impl="torch")
    assert_close(got, mla_sparse_attention(q, kv, slots, impl="reference", **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    q, kv, slots, options = sparse_case(dtype=dtype)
    got = attend(q, kv, slots, options)
    want = mla_sparse_attention(q, kv, slots, impl="reference", **options)
    bar = SHORT_BAR if dtype == torch.float16 else MIRROR_BAR
    assert bar.failures(measure(got[0], want[0])) == []


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_all_tokens_as_slots_is_dense_attention(cache, impl, device):
    lengths = [130, 64, 5, 0]
    kv_scale = 0.02 if cache == "fp8" else None
    case = decode_case(
        lengths, num_heads=8, cache_dtype=FORMATS[cache], kv_scale=kv_scale,
        device=device if impl == "triton" else "cpu",
    )  # fmt: skip
    position = torch.arange(max(lengths), device=case.q.device)
    page = case.block_table[:, position // 64]
    slots = torch.where(position < case.seq_lens[:, None], page * 64 + position % 64, -1).int()
    out, lse = mla_sparse_attention(case.q[:, 0], case.kv_cache, slots, impl=impl, **case.options)
    dense, dense_lse = mla_decode(*case.args, impl=impl, **case.options)
    if impl == "torch" and cache == "bf16":
        assert torch.equal(out, dense[:, 0]) and torch.equal(lse, dense_lse[:, 0])
    # Two kernels round their weights by references of tiles of different sizes.
    bar = SHORT_BAR if impl == "triton" else MIRROR_BAR
    assert_close((out[:3], lse[:3]), (dense[:3, 0], dense_lse[:3, 0]), bar)
    assert not out[3].any() and bool((lse[3] == -torch.inf).all())


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_minus_one_may_stand_anywhere(cache, impl):
    q, kv, slots, options = sparse_case((300, 300), K=64, cache=cache)
    spread = torch.full((2, 256), -1, dtype=torch.int32)
    spread[0, torch.randperm(256)[:64].sort().values] = slots[0]
    spread[1, 192:] = slots[1]  # whole tiles of -1 before the first slot
    got = attend(q, kv, spread, options, impl=impl)
    assert_close(got, attend(q, kv, slots, options, impl=impl), MIRROR_BAR)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_numbers_outside_the_cache_are_no_slots(impl):
    q, kv, slots, options = sparse_case(K=8)
    wide = torch.cat(
        [slots, torch.full_like(slots, 2**31 - 1), torch.full_like(slots, -(2**31))], 1
    )
    wide[:, 8] = kv.shape[0] * kv.shape[1]
    got, want = attend(q, kv, wide, options, impl=impl), attend(q, kv, slots, options, impl=impl)
    assert_close(got, want, MIRROR_BAR)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_slot_named_twice_counts_twice(impl):
    q, kv, slots, options = sparse_case((40,), K=4)
    once = attend(q, kv, slots, options, impl="reference")
    twice = attend(q, kv, torch.cat([slots, slots], 1), options, impl=impl)
    assert SHORT_BAR.failures(measure(twice[0], once[0])) == []
    torch.testing.assert_close(twice[1], once[1] + torch.log(torch.tensor(2.0)), atol=4e-3, rtol=0)
    uneven = torch.cat([slots, slots[:, :1]], 1)
    got = attend(q, kv, uneven, options, impl=impl)
    assert measure(got[0], once[0]).fro > 0.05
    assert_close(got, attend(q, kv, uneven, options, impl="reference"))


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_lengths_cut_rows_off(impl):
    q, kv, slots, options = sparse_case((300, 300, 300, 300), K=96)
    lengths = torch.tensor([0, 1, 65, 96], dtype=torch.int32)
    got = attend(q, kv, slots, options, impl=impl, lengths=lengths)
    for t, n in enumerate(lengths.tolist()):
        if n == 0:
            assert not got[0][t].any() and bool((got[1][t] == -torch.inf).all())
        else:
            part = (q[t : t + 1], kv, slots[t : t + 1, :n].contiguous(), options)
            assert_close((got[0][t : t + 1], got[1][t : t + 1]), attend(*part, impl="reference"))


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_sink_takes_weight_and_no_value(impl):
    q, kv, slots, options = sparse_case((300, 1, 0), K=32, heads=4)
    plain, lse = attend(q, kv, slots, options, impl="reference")
    sink = torch.tensor([-torch.inf, torch.inf, 0.7, 90.0])
    out, same = attend(q, kv, slots, options, impl=impl, sink=sink)
    torch.testing.assert_close(same, lse, atol=4e-3, rtol=0)
    factor = 1 / (1 + torch.exp(sink.double() - lse.double()))
    assert SHORT_BAR.failures(measure(out[:2], plain[:2] * factor[:2, :, None])) == []
    assert not out[:2, 1].any() and not out[2].any(), "an infinite sink, and a token without slots"


def test_results_do_not_depend_on_the_batch():
    q, kv, slots, options = sparse_case((300, 200, 150, 7), K=128)
    out, lse = attend(q, kv, slots, options)
    for t in range(4):
        alone, alone_lse = attend(q[t : t + 1], kv, slots[t : t + 1], options)
        assert torch.equal(alone[0], out[t]) and torch.equal(alone_lse[0], lse[t])


def test_more_slots_than_a_tile_and_none_at_all():
    q, kv, slots, options = sparse_case((2500, 2100), K=2500, heads=2)
    assert_close(attend(q, kv, slots, options), attend(q, kv, slots, options, impl="reference"))
    out, lse = attend(q, kv, slots[:, :0], options)
    assert not out.any() and bool((lse == -torch.inf).all())
    out, lse = attend(q[:0], kv, slots[:0], options)
    assert out.shape == (0, 2, 512) and lse.shape == (0, 2)


@pytest.mark.parametrize("cache", FORMATS)
def test_strided_cache_and_query(cache):
    q, kv, slots, options = sparse_case(cache=cache)
    gaps = torch.full((kv.shape[0], 65, kv.shape[2]), 127).to(kv.dtype)[:, :64]
    gaps.copy_(kv)
    wide = torch.cat([q, torch.full_like(q, torch.nan)], 2)[..., : q.shape[2]]
    got = attend(wide, gaps, slots, options)
    want = attend(q, kv, slots, options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_dims_256_32():
    q, kv, slots, options = sparse_case(dims=MlaDims(256, 32))
    assert_close(attend(q, kv, slots, options), attend(q, kv, slots, options, impl="reference"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cpu"}, "device of type device, got str"),
        ({"device": None}, "device of type device, got NoneType"),
        ({"num_tokens": -1}, r"num_tokens in 0\.\.2147483647, got -1"),
        ({"num_heads": 129}, r"num_heads in 1\.\.128, got 129"),
        ({"num_slots": -1}, r"num_slots in 0\.\.1048576, got -1"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank in 1.*got '512'"),
    ],
)
def test_workspaces_that_are_refused(change, message):
    good = {"num_tokens": 2, "num_heads": 4, "num_slots": 8, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match=message):
        mla_sparse_workspace(**good | change)


@pytest.mark.parametrize("size", ["num_tokens", "num_slots"])
def test_the_workspace_of_nothing_is_empty(size, device):
    sizes = {"num_tokens": 2, "num_heads": 4, "num_slots": 4096} | {size: 0}
    assert not mla_sparse_workspace(**sizes, device=torch.device(device), impl="triton").numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 576)}, r"q of shape \[T, H, Dk\]"),
        ({"q": torch.zeros(2, 129, 576)}, "heads .* in 1..128, got 129"),
        ({"q": torch.zeros(2, 4, 576, dtype=torch.float64)}, "q.dtype"),
        ({"q": torch.zeros(2, 4, 576, dtype=torch.float16)}, "one dtype"),
        ({"slots": torch.zeros(3, 8, dtype=torch.int32)}, r"slots of shape \[2, K\], got \[3, 8\]"),
        ({"slots": torch.zeros(2, 8, dtype=torch.int64)}, "slots.dtype"),
        ({"slots": torch.zeros(8, 2, dtype=torch.int32).T}, "slots with a contiguous last"),
        ({"kv_cache": torch.zeros(1, 64, 576).expand(2**25 + 1, -1, -1)}, "2147483712: split"),
        ({"scale": 0.0}, "softmax scale above 0, got 0.0"),
        ({"scale": float("nan")}, "softmax scale above 0, got nan"),
        ({"scale": None}, "softmax scale above 0, got None"),
        ({"scale": True}, "softmax scale above 0, got True"),
        ({"scale": torch.tensor(0.1)}, "softmax scale above 0, got tensor"),
        ({"kv_scale": 1.0}, "kv_scale=None"),
        ({"kv_cache": torch.zeros(1, 64, 576).to(torch.float8_e4m3fn)}, "kv_scale for"),
        ({"kv_cache": torch.zeros(1, 64, 576, dtype=torch.uint8)}, "656"),
        ({"kv_lora_rank": 576}, "kv_lora_rank in 1..575, got 576"),
        ({"lengths": torch.zeros(2)}, "lengths.dtype"),
        ({"lengths": torch.zeros(1, dtype=torch.int32)}, r"lengths of shape \[2\]"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)[::2]}, r"lengths with a contiguous.*\(2,\)"),
        ({"sink": torch.zeros(5)}, r"sink of shape \[4\]"),
        ({"sink": torch.zeros(1).expand(4)}, r"sink with a contiguous.*\(0,\)"),
        ({"sink": torch.zeros(4, dtype=torch.bfloat16)}, "sink.dtype"),
        ({"out": torch.zeros(2, 4, 576)}, r"out of shape \[2, 4, 512\]"),
        ({"impl": "cuda"}, "impl in"),
        ({"deterministic": torch.tensor(True)}, r"deterministic in \[True, False\], got tensor"),
        ({"deterministic": torch.ones(2)}, r"deterministic in \[True, False\], got tensor"),
        ({"impl": "hopper"}, "mla_sparse_attention"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {
        "q": torch.zeros(2, 4, 576),
        "kv_cache": torch.zeros(1, 64, 576),
        "slots": torch.zeros(2, 8, dtype=torch.int32),
        "scale": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        mla_sparse_attention(**(arguments | change))


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cache_without_blocks(impl, deterministic, device):
    q, cache = torch.ones(2, 4, 576).bfloat16(), torch.zeros(0, 64, 576).bfloat16()
    slots = torch.tensor([[0, -1, 64]] * 2, dtype=torch.int32)
    out, lse = mla_sparse_attention(
        q.to(device), cache.to(device), slots.to(device),
        scale=0.1, impl=impl, deterministic=deterministic,
    )  # fmt: skip
    assert not out.any() and (lse == -torch.inf).all()


def test_queries_that_want_gradients():
    q, kv, slots, options = sparse_case()
    want = attend(q, kv, slots, options, max_logits=(top := torch.empty(3, 16)))
    q.requires_grad_()
    again = torch.full_like(top, torch.nan)
    got = mla_sparse_attention(q, kv, slots, **options, max_logits=again)
    assert not got[0].requires_grad
    assert all(map(torch.equal, (*got, again), (*want, top)))


def test_deterministic_wherever_the_rows_of_q_start():
    """Products of fp32 depend on it: those of 103 columns start at all multiples of 4 bytes."""
    g = torch.Generator().manual_seed(0)
    q, kv_cache = torch.randn(6, 3, 103, generator=g), torch.randn(2, 64, 103, generator=g)
    slots = torch.stack([torch.randperm(128, generator=g)[:90] for _ in range(6)]).int()
    options = {"scale": 0.1, "kv_lora_rank": 100, "impl": "torch", "deterministic": True}
    out, lse = mla_sparse_attention(q, kv_cache, slots, **options)
    for t in range(6):
        alone = mla_sparse_attention(q[t : t + 1].clone(), kv_cache, slots[t : t + 1], **options)
        assert torch.equal(alone[0][0], out[t]) and torch.equal(alone[1][0], lse[t])


@pytest.mark.parametrize("rescale", ["pow2", "flash"])
def test_deterministic_with_a_sink(rescale):
    """A CPU's sigmoid has other bits in a vector than behind the last one."""
    g = torch.Generator().manual_seed(0)
    q, kv_cache = torch.randn(40, 17, 192, generator=g), torch.randn(1, 64, 192, generator=g)
    slots = torch.randint(64, (40, 9), generator=g, dtype=torch.int32)
    options = {
        "scale": 0.1, "kv_lora_rank": 128, "impl": "torch", "deterministic": True,
        "rescale": rescale, "sink": torch.randn(17, generator=g),
    }  # fmt: skip
    out, lse = mla_sparse_attention(q, kv_cache, slots, **options)
    for t in range(40):
        alone = mla_sparse_attention(q[t : t + 1], kv_cache, slots[t : t + 1], **options)
        assert torch.equal(alone[0][0], out[t]) and torch.equal(alone[1][0], lse[t])


def test_nothing_is_recorded_for_gradients():
    q = torch.randn(2, 3, 576).requires_grad_()
    slots = torch.arange(2).view(2, 1).int()
    for impl in ("torch", "reference"):
        results = mla_sparse_attention(q, torch.randn(1, 64, 576), slots, scale=0.1, impl=impl)
        assert not any(x.requires_grad for x in results)
