# SPDX-License-Identifier: Apache-2.0
"""`mla_layer` against a plain layer in fp32 that rebuilds every key and value."""

import copy
import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from mla_kernels import mla_layer, plan_mla_decode
from mla_kernels.layer import MlaLayerBuffers, MlaLayerConfig, MlaLayerWeights, rope_table
from mla_kernels.testing.naive_layer import NaiveMlaLayer

PAGE = 16
CONFIG = MlaLayerConfig(
    dim=64, q_lora_rank=40, kv_lora_rank=256, num_heads=5, nope_dim=24, rope_dim=32, v_dim=20
)


def relative_error(x, want):
    return ((x.double() - want.double()).norm() / want.double().norm()).item()


def make_layer(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layer = NaiveMlaLayer(CONFIG).requires_grad_(False)
    for name, weight in layer.named_parameters():
        # Scores of standard deviation 3: every head looks at a few tokens, none at one alone.
        gain = {"q_down.weight": 1.3, "q_up.weight": 1.2, "kv_down.weight": 2.0}.get(name, 1.0)
        weight.copy_(torch.randn_like(weight) * gain * weight.shape[1] ** -0.5)
    return layer.to(dtype).float()


def paged(rows, max_blocks, dtype=torch.float32, seed=0):
    """(cache, block table) holding rows [B, L, D] in shuffled pages; NaN elsewhere."""
    B, L, D = rows.shape
    cache = torch.full((B * max_blocks + 3, PAGE, D), torch.nan, dtype=dtype)
    order = torch.randperm(cache.shape[0], generator=torch.Generator().manual_seed(seed))
    table = order[: B * max_blocks].view(B, max_blocks).int()
    for b in range(B):
        for t in range(L):
            cache[table[b, t // PAGE], t % PAGE] = rows[b, t].to(dtype)
    return cache, table


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 37])
def test_three_steps_equal_the_plain_layer(prefix):
    layer, weights = make_layer(), make_layer().absorbed_weights()
    B, table = 3, rope_table(CONFIG, 64)
    past = torch.randn(B, prefix, CONFIG.cache.head_dim) * 2
    cache, block_table = paged(layer.rotated_rows(past), 4)
    for step in range(3):
        x = torch.randn(B, 1, CONFIG.dim)
        want, past = layer(x, past)
        seq_lens = torch.full((B,), prefix + step + 1, dtype=torch.int32)
        got = mla_layer(x, cache, block_table, seq_lens, weights, table)
        # The grid of the pow2 softmax moves each score by up to 2^-13.
        assert relative_error(got, want) < 2e-4
    rows = cache[block_table.long()].flatten(1, 2)[:, : prefix + 3]
    torch.testing.assert_close(rows, layer.rotated_rows(past), rtol=1e-5, atol=1e-5)


def test_ragged_batch_equals_each_request_alone():
    layer, weights = make_layer(), make_layer().absorbed_weights()
    lens, table = [1, 40, 17, 64], rope_table(CONFIG, 64)
    past = torch.randn(4, 63, CONFIG.cache.head_dim)
    cache, block_table = paged(layer.rotated_rows(past), 4)
    x = torch.randn(4, 1, CONFIG.dim)
    got = mla_layer(x, cache, block_table, torch.tensor(lens, dtype=torch.int32), weights, table)
    for b, n in enumerate(lens):
        want, _ = layer(x[b : b + 1], past[b : b + 1, : n - 1])
        assert relative_error(got[b : b + 1], want) < 2e-4


def test_bf16_error_is_that_of_a_plain_bf16_layer():
    layer = make_layer(torch.bfloat16)
    past = (torch.randn(4, 50, CONFIG.cache.head_dim) * 2).bfloat16()
    x = torch.randn(4, 1, CONFIG.dim).bfloat16()
    want, _ = layer(x.float(), past.float())
    plain, _ = layer.bfloat16()(x, past)
    cache, block_table = paged(layer.rotated_rows(past), 4, torch.bfloat16)
    seq_lens = torch.full((4,), 51, dtype=torch.int32)
    weights, table = layer.absorbed_weights(), rope_table(CONFIG, 64)
    got = mla_layer(x, cache, block_table, seq_lens, weights, table)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, want) < 2 * relative_error(plain, want)


@pytest.mark.parametrize(
    ("dtype", "kv_scale"), [(torch.float8_e4m3fn, 0.05), (torch.uint8, None)], ids=["fp8", "ds_mla"]
)
def test_quantised_caches_are_written_and_read(dtype, kv_scale):
    """From an empty cache: every row was appended by the layer itself."""
    layer, weights = make_layer(), make_layer().absorbed_weights()
    width = 328 if dtype == torch.uint8 else CONFIG.cache.head_dim
    cache = torch.full((4, PAGE, width), 0x7F, dtype=torch.uint8).view(dtype)
    block_table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    past, table = torch.zeros(2, 0, CONFIG.cache.head_dim), rope_table(CONFIG, 32)
    for step in range(20):
        x = torch.randn(2, 1, CONFIG.dim)
        want, past = layer(x, past)
        seq_lens = torch.full((2,), step + 1, dtype=torch.int32)
        got = mla_layer(x, cache, block_table, seq_lens, weights, table, kv_scale=kv_scale)
        assert relative_error(got, want) < 0.1


def test_padding_requests_write_nothing_and_give_zeros():
    layer, weights = make_layer(), make_layer().absorbed_weights()
    cache, block_table = paged(torch.zeros(3, 0, CONFIG.cache.head_dim), 1)
    block_table[1] = 10**9
    x, table = torch.randn(3, 1, CONFIG.dim), rope_table(CONFIG, 16)
    seq_lens = torch.tensor([1, 0, 1], dtype=torch.int32)
    got = mla_layer(x, cache, block_table, seq_lens, weights, table)
    want, _ = layer(x, torch.zeros(3, 0, CONFIG.cache.head_dim))
    assert relative_error(got[::2], want[::2]) < 2e-4
    assert not got[1].any()
    assert cache.isfinite().any(-1).sum() == 2


def test_buffers_are_reused_and_returned():
    weights, table = make_layer().absorbed_weights(), rope_table(CONFIG, 16)
    buffers = MlaLayerBuffers.allocate(CONFIG, 2, dtype=torch.float32, device="cpu")
    cache, block_table = paged(torch.zeros(2, 0, CONFIG.cache.head_dim), 1)
    seq_lens = torch.ones(2, dtype=torch.int32)
    for _ in range(2):
        for tensor in vars(buffers).values():
            tensor.fill_(torch.nan)
        x = torch.randn(2, 1, CONFIG.dim)
        args = (x, cache, block_table, seq_lens, weights, table)
        got = mla_layer(*args, buffers=buffers)
        assert got is buffers.out and buffers.lse.isfinite().all()
        assert torch.equal(got, mla_layer(*args))


def test_a_contiguous_cache_serves_as_a_paged_one():
    layer, weights = make_layer(), make_layer().absorbed_weights()
    past = torch.randn(2, 20, CONFIG.cache.head_dim)
    flat = torch.full((2, 32, CONFIG.cache.head_dim), torch.nan)
    flat[:, :20] = layer.rotated_rows(past)
    cache, block_table = flat.view(-1, PAGE, flat.shape[-1]), torch.arange(4).view(2, 2).int()
    x, seq_lens = torch.randn(2, 1, CONFIG.dim), torch.full((2,), 21, dtype=torch.int32)
    got = mla_layer(x, cache, block_table, seq_lens, weights, rope_table(CONFIG, 32))
    assert relative_error(got, layer(x, past)[0]) < 2e-4


def good_arguments():
    cache, block_table = paged(torch.zeros(2, 0, CONFIG.cache.head_dim), 1)
    return {
        "x": torch.randn(2, 1, CONFIG.dim),
        "kv_cache": cache,
        "block_table": block_table,
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "weights": make_layer().absorbed_weights(),
        "table": rope_table(CONFIG, 16),
    }


def transposed(name):
    """Buffers of which one lies the other way round."""
    buffers = MlaLayerBuffers.allocate(CONFIG, 2, dtype=torch.float32, device="cpu")
    shape = getattr(buffers, name).shape
    other = torch.empty(shape[::-1]).permute(*range(len(shape))[::-1])
    return dataclasses.replace(buffers, **{name: other})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 2, 64)}, r"x of shape \[B, 1, 64\], got \[2, 2, 64\]"),
        ({"x": torch.zeros(2, 1, 64).half()}, r"x.dtype in .*float32.*, got torch.float16"),
        (
            {"kv_cache": torch.full((5, PAGE, 9), torch.nan)},
            r"kv_cache of shape .*288.*, got \[5, 16, 9\]",
        ),
        ({"block_table": torch.zeros(3, 1).int()}, r"block_table of shape .*got \[3, 1\]"),
        ({"seq_lens": torch.ones(3).int()}, r"seq_lens of shape \[2\], got \[3\]"),
        ({"seq_lens": torch.ones(2).long()}, "seq_lens.dtype in .*int32.*got torch.int64"),
        ({"table": rope_table(CONFIG, 15)}, "at least 16 positions.*got 15"),
        ({"table": rope_table(CONFIG, 16).double()}, "table.dtype in .*float32"),
        ({"table": rope_table(CONFIG, 32)[::2]}, "contiguous"),
        ({"table": rope_table(CONFIG, 16, "meta")}, "table on cpu.*got meta"),
        ({"weights": make_layer().to("meta").absorbed_weights()}, "weights on cpu.*got meta"),
        (
            {"buffers": MlaLayerBuffers.allocate(CONFIG, 2, dtype=torch.float32, device="meta")},
            r"buffers.down on cpu.*got meta",
        ),
        (
            {"buffers": MlaLayerBuffers.allocate(CONFIG, 3, dtype=torch.float32, device="cpu")},
            r"buffers.down of shape \[2, 328\], got \[3, 328\]",
        ),
        (
            {"buffers": MlaLayerBuffers.allocate(CONFIG, 2, dtype=torch.half, device="cpu")},
            r"buffers.down.dtype in .*float32.*got torch.float16",
        ),
        *(
            ({"buffers": transposed(name)}, rf"contiguous buffers\.{name}, got strides")
            for name in ("down", "q_up", "q", "latent", "lse", "v", "out")
        ),
        ({"seq_lens": torch.tensor([17, 3]).int()}, r"seq_lens\[0\] in 0\.\.16 .*got 17"),
        ({"seq_lens": torch.tensor([-1, 3]).int()}, r"seq_lens\[0\] in 0\.\.16 .*got -1"),
        ({"block_table": torch.full((2, 1), 9).int()}, "block_table entries in 0.*got 9 in row 0"),
        ({"block_table": torch.zeros(2, 1, device="meta").int()}, "block_table on cpu.*got meta"),
        ({"kv_scale": 1.0}, "kv_scale=None"),
        ({"kv_cache": torch.full((5, PAGE, 288), torch.nan).half()}, "q and kv_cache of one dtype"),
        (
            {"kv_cache": torch.full((1, PAGE, 288), torch.nan).expand(5, PAGE, 288)},
            "kv_cache without overlapping rows",
        ),
        ({"impl": "cuda"}, "impl in .*got 'cuda'"),
        ({"impl": "triton"}, "q in bfloat16 or float16 for triton, got torch.float32"),
        (
            {"plan": plan_mla_decode(torch.ones(3).int(), num_heads=5, s_q=1, kv_lora_rank=256)},
            r"plan for .*\(2, 1, 5\), got one for \(3, 1, 5\)",
        ),
        ({"seq_lens": torch.ones(1).int().expand(2)}, r"seq_lens with a contiguous.*\(0,\)"),
        (
            {"block_table": torch.ones(2, 2).int().T, "table": rope_table(CONFIG, 32)},
            r"block_table with a contiguous.*\(1, 2\)",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(change, message):
    if change.get("impl") == "triton":
        pytest.importorskip("triton")
    arguments = good_arguments()
    with pytest.raises(ValueError, match=message):
        mla_layer(**(arguments | change))
    assert (arguments | change)["kv_cache"].isnan().all()


@pytest.mark.parametrize("wrong", [None, "x", CONFIG])
def test_what_is_no_part_of_a_layer(wrong):
    if wrong is not None:
        with pytest.raises(ValueError, match="buffers of type MlaLayerBuffers, got "):
            mla_layer(**good_arguments() | {"buffers": wrong})
    with pytest.raises(ValueError, match="weights of type MlaLayerWeights, got "):
        mla_layer(**good_arguments() | {"weights": wrong})


@pytest.mark.parametrize("wrong", [None, "x", {"dim": 64}])
def test_what_is_no_config(wrong):
    names = ("q_down", "kv_down", "q_up", "kv_up", "out")
    weights = {name: getattr(make_layer(), name).weight for name in names}
    message = "config of type MlaLayerConfig, got "
    with pytest.raises(ValueError, match=message):
        MlaLayerWeights.from_projections(wrong, **weights)
    with pytest.raises(ValueError, match=message):
        MlaLayerBuffers.allocate(wrong, 2, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=message):
        rope_table(wrong, 32)
    with pytest.raises(ValueError, match="out to be a tensor, got "):
        MlaLayerWeights.from_projections(CONFIG, **weights | {"out": wrong})


def test_weights_of_a_wrong_shape_or_dtype_are_refused():
    c, layer = CONFIG, make_layer()
    names = ("q_down", "kv_down", "q_up", "kv_up", "out")
    good = {name: getattr(layer, name).weight for name in names}
    with pytest.raises(ValueError, match=r"kv_up of shape \[220, 256\], got \[219, 256\]"):
        MlaLayerWeights.from_projections(c, **(good | {"kv_up": good["kv_up"][:-1]}))
    sizes = {name: np.int64(value) for name, value in vars(c).items() if name != "rope_theta"}
    with pytest.raises(ValueError, match=r"kv_up of shape \[220, 256\], got \[219, 256\]"):
        MlaLayerWeights.from_projections(
            MlaLayerConfig(**sizes), **(good | {"kv_up": good["kv_up"][:-1]})
        )
    with pytest.raises(ValueError, match=r"q_up in torch.float32.*got torch.bfloat16"):
        MlaLayerWeights.from_projections(c, **(good | {"q_up": good["q_up"].bfloat16()}))


def test_buffers_of_no_batch():
    with pytest.raises(ValueError, match=r"batch_size in 0\.\..*got -1"):
        MlaLayerBuffers.allocate(CONFIG, -1, dtype=torch.float32, device="cpu")


def test_an_empty_batch():
    arguments = good_arguments()
    for name in ("x", "block_table", "seq_lens"):
        arguments[name] = arguments[name][:0]
    assert mla_layer(**arguments).shape == (0, 1, 64)
    assert arguments["kv_cache"].isnan().all()


def test_padding_without_a_block_table():
    arguments = good_arguments() | {
        "seq_lens": torch.zeros(2).int(),
        "table": rope_table(CONFIG, 0),
    }
    arguments["block_table"] = arguments["block_table"][:, :0]
    assert not mla_layer(**arguments).any()


def test_weights_and_states_that_want_gradients():
    arguments = good_arguments()
    want = mla_layer(**arguments)
    weights = {
        k: v.requires_grad_() for k, v in vars(arguments["weights"]).items() if k != "config"
    }
    arguments["weights"] = MlaLayerWeights(CONFIG, **weights)
    arguments["x"].requires_grad_()
    got = mla_layer(**arguments)
    assert not got.requires_grad and torch.equal(got, want)


def test_weights_keep_no_parameter_alive_that_they_copied():
    """Down-projections and keys' up-projections of all layers are gigabytes."""
    linear = {
        name.removesuffix(".weight"): torch.nn.Parameter(weight.detach().clone())
        for name, weight in make_layer().named_parameters()
    }
    copied = [weakref.ref(linear[name]) for name in ("q_down", "kv_down", "kv_up")]
    weights = MlaLayerWeights.from_projections(CONFIG, **linear)
    del linear
    gc.collect()
    assert not any(original() is not None for original in copied)
    assert torch.equal(copy.deepcopy(weights).down, weights.down)


BAD_CONFIGS = [
    {"rope_dim": 33},
    {"num_heads": "5"},
    {"v_dim": 20.0},
    {"rope_theta": "1e4"},
    {"rope_theta": True},
    {"num_heads": 0},
    {"dim": -1},
    {"rope_theta": float("nan")},
]


@pytest.mark.parametrize("change", BAD_CONFIGS)
def test_bad_dimensions_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        MlaLayerConfig(**change)


def test_defaults_are_those_of_deepseek_v3():
    c = MlaLayerConfig()
    assert (c.qk_dim, c.down_dim, c.cache.head_dim) == (192, 2112, 576)
    assert c.scale == pytest.approx(192**-0.5)
