# SPDX-License-Identifier: Apache-2.0
"""Which sparse attention kernels "auto" may take: what a batch says of itself."""

from types import SimpleNamespace

import pytest
import torch
from mla_kernels import checks, mla_sparse_attention, mla_sparse_workspace
from mla_kernels.arch import get_arch
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse import api, choice
from mla_kernels.sparse.hopper import support
from mla_kernels.sparse.triton import tiles

GPU = torch.device("cuda:0")


@pytest.fixture
def refusals(monkeypatch):
    """Calls of choose_impl: why the Hopper kernel was not offered."""
    calls, choose = [], choice.choose_impl

    def record(*args, hopper_refusal, **options):
        calls.append(hopper_refusal)
        return choose(*args, hopper_refusal=hopper_refusal, **options)

    monkeypatch.setattr(choice, "choose_impl", record)
    return calls


@pytest.mark.parametrize(
    ("tokens", "heads", "cache", "options", "hopper"),
    [
        (1, 16, "bf16", {}, False),
        (1, 17, "bf16", {}, True),
        (2, 16, "bf16", {}, True),
        (1, 16, "bf16", {"deterministic": True}, True),
        (1, 16, "bf16", {"impl": "torch"}, True),
        (1, 32, "fp8_ds_mla", {}, False),
        (1, 33, "fp8_ds_mla", {}, True),
        (7, 16, "fp8_ds_mla", {}, False),
        (7, 17, "fp8_ds_mla", {}, True),
        (7, 16, "fp8_ds_mla", {"deterministic": True}, True),
        (7, 16, "fp8_ds_mla", {"max_logits": torch.empty(7, 16)}, True),
    ],
)
def test_few_rows_are_for_the_portable_kernel(refusals, tokens, heads, cache, options, hopper):
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    if cache == "bf16":
        cache = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    else:
        cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    slots = torch.zeros(tokens, 1, dtype=torch.int32)
    mla_sparse_attention(q, cache, slots, scale=1.0, **options)
    assert [why is None for why in refusals] == [hopper]


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_what_is_few_for_any_number_of_tokens(heads, cache):
    every = all(choice.is_few(tokens, heads, cache) for tokens in (1, 2, 64, 4096))
    assert choice.is_few(None, heads, cache) is every is (heads <= 16 and cache == torch.uint8)


def test_few_heads_on_an_sm_90(gpu):
    gpu(90)
    known = {"kv_cache_dtype": torch.uint8, "few": True}
    chosen = choice.choose_sparse_impl("auto", GPU, **known)
    assert chosen.impl == "triton"
    assert chosen.reason == (
        "portable kernel on sm_90; hopper: the portable kernel is faster for so few heads or tokens"
    )
    for asked in ("hopper", "triton"):
        assert choice.choose_sparse_impl(asked, GPU, **known).impl == asked
    assert choice.choose_sparse_impl("auto", GPU, kv_cache_dtype=torch.uint8).impl == "hopper"
    no_kernel = choice.choose_sparse_impl("auto", GPU, dims=MlaDims(128, 64), **known)
    assert no_kernel.impl == "torch" and "kv_lora_rank 512" in no_kernel.reason
    assert choice.choose_sparse_impl("auto", GPU, dtype=torch.float32).impl == "torch"


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"dims": MlaDims(256, 64)}, "it needs kv_lora_rank 512 and rope 64, got 256 and 64"),
        ({"dims": MlaDims(512, 32)}, "it needs kv_lora_rank 512 and rope 64, got 512 and 32"),
        ({"dtype": torch.float16}, "it needs q in bf16, got torch.float16"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "it needs a cache of"),
        ({"contiguous": False}, "it needs a contiguous q"),
        ({"aligned": False}, "it needs cache rows at multiples of 16 bytes"),
    ],
)
def test_what_the_kernel_of_an_sm_90_does_not_take(gpu, known, why):
    gpu(90)
    known = {"kv_cache_dtype": torch.uint8} | known
    chosen = choice.choose_sparse_impl("auto", GPU, **known)
    assert chosen.impl == "triton" and why in chosen.reason
    with pytest.raises(ValueError, match=f"impl='hopper' of .* cannot run here: {why}"):
        choice.choose_sparse_impl("hopper", GPU, **known)


@pytest.mark.parametrize("sm", [80, 100])
@pytest.mark.parametrize("few", [False, True])
def test_other_architectures(gpu, sm, few):
    gpu(sm)
    chosen = choice.choose_sparse_impl("auto", GPU, kv_cache_dtype=torch.uint8, few=few)
    assert chosen.impl == "triton"
    assert f"portable kernel on sm_{sm}; hopper: it needs an sm_90 GPU" in chosen.reason


@pytest.mark.parametrize("kind", ["whole", "strided", "parts", "start", "one of strided ones"])
def test_what_a_batch_says_of_itself(monkeypatch, kind):
    seen, choose = [], api.choose_sparse_impl

    def record(*args, **known):
        seen.append(known)
        return choose(*args, **known)

    monkeypatch.setattr(api, "choose_sparse_impl", record)
    q = torch.zeros(2, 20, 576, dtype=torch.bfloat16)[:, :: 2 if kind == "strided" else 1]
    if kind == "start":
        q = torch.nn.functional.pad(q.flatten(), (1, 0))[1:].view(q.shape)
    if kind == "one of strided ones":  # which torch calls contiguous
        q = torch.zeros(2, 24, 576, dtype=torch.bfloat16)[:1, :20]
    heads, tokens = q.shape[1], q.shape[0]
    results = {
        "out": torch.empty(tokens, heads, 512, dtype=torch.bfloat16),
        "lse": torch.empty(tokens, heads),
        "workspace": torch.empty(0, dtype=torch.uint8),
    }
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    slots = torch.zeros(tokens, 1, dtype=torch.int32)
    query = (q[..., :512], q[..., 512:]) if kind == "parts" else q
    mla_sparse_attention(query, cache, slots, scale=1.0, **results)
    assert seen == [
        {
            "dims": MlaDims(),
            "dtype": torch.bfloat16,
            "kv_cache_dtype": torch.uint8,
            "contiguous": kind in ("whole", "parts"),
            "aligned": True,
            "few": kind in ("strided", "one of strided ones"),
            "rescale": "pow2",
        }
    ]


def test_a_workspace_on_an_sm_90_is_enough_for_both_kernels(gpu, monkeypatch):
    from mla_kernels import arch

    gpu(90)
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    monkeypatch.setattr(arch, "device_arch", lambda device: get_arch(90))
    monkeypatch.setattr(torch, "empty", lambda size, **options: size)
    auto, hopper, portable = (
        mla_sparse_workspace(8, 16, 2048, device=GPU, impl=impl)
        for impl in ("auto", "hopper", "triton")
    )
    assert auto == portable > hopper > 0


@pytest.mark.parametrize("sms", [4, 132])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_workspace_for_the_kernel_of_an_sm_90_is_enough(sms, heads, monkeypatch):
    """For every number of tokens up to that asked for, and a token in deterministic mode."""
    properties = SimpleNamespace(multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for most in (0, 1, 3, 60, 5000):
        enough = support.largest_workspace(most, heads, 2048, GPU)
        needed = [
            tiles.partial_bytes(turn.stop - turn.start, heads, turn.split.splits, 512)
            for t in range(1, most + 1)
            for turn in support.choose_turns(t, heads, 2048, GPU)
        ]
        alone = tiles.partial_bytes(1, heads, tiles.fixed_split(2048).splits, 512)
        assert enough == max(*needed, alone, 0) if most else enough == 0


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_format", "splits", "grid"),
    [
        (4096, 128, "bf16", 1, (66, 2)),
        (4096, 16, "bf16", 1, (132, 1)),
        (4096, 130, "bf16", 1, (44, 3)),
        (60, 128, "bf16", 1, (60, 2)),
        (1, 64 * 200, "bf16", 1, (1, 200)),
        (4, 128, "bf16", 8, (8, 8)),
        (4096, 128, "fp8_ds_mla", 1, (8192, 1)),
    ],
)
def test_programs_of_the_hopper_kernel(tokens, heads, kv_format, splits, grid, monkeypatch):
    """With bf16 rows and whole tokens no more than run at once, and none without a token."""
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    split = tiles.Split(splits, 2048 // splits)
    assert support.choose_grid(tokens, heads, 2048, kv_format, split, GPU) == grid


@pytest.mark.parametrize(
    ("tokens", "heads", "launches"),
    [
        (64, 128, [(64, 1)]),
        (72, 128, [(64, 1), (8, 8)]),
        (96, 128, [(64, 1), (32, 2)]),
        (128, 128, [(128, 1)]),
        (144, 128, [(128, 1), (16, 4)]),
        (4096, 128, [(4096, 1)]),
        (128, 64, [(128, 1)]),
        (144, 64, [(128, 1), (16, 8)]),
        (40, 64 * 200, [(40, 1)]),  # a token of more programs than run at once
    ],
)
def test_launches_of_the_hopper_kernel(tokens, heads, launches, monkeypatch):
    """Tokens whose programs would leave most of the device idle, behind those that fill it."""
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    turns = support.choose_turns(tokens, heads, 2048, GPU)
    assert [(turn.stop - turn.start, turn.split.splits) for turn in turns] == launches


@pytest.mark.parametrize("heads", [16, 128, 320])
@pytest.mark.parametrize("slots", [1, 64, 2048, 5000])
def test_all_tokens_are_launched_once(heads, slots, monkeypatch):
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    several = 0
    for tokens in range(1, 700):
        turns = support.choose_turns(tokens, heads, slots, GPU)
        several += len(turns) > 1
        stops = [turn.stop for turn in turns]
        assert [turn.start for turn in turns] == [0, *stops[:-1]] and stops[-1] == tokens
        assert all(turn.start % 16 == 0 and turn.stop > turn.start for turn in turns)
        for turn in turns:
            if turn.split.shares:
                assert len(turns) == 1
                continue
            size, row_tiles = turn.stop - turn.start, -(-heads // 64)
            assert turn.split == tiles.even_split(size, row_tiles, slots, 64, 132)
            assert turn.split.splits * turn.split.span >= slots
    assert (several > 0) is (slots >= 2048)


def test_rows_that_start_between_16_bytes_are_not_aligned():
    row = torch.zeros(1, 64, 577, dtype=torch.bfloat16)
    assert checks.rows_aligned(row[..., :576].contiguous())
    assert not checks.rows_aligned(row[..., :576])
