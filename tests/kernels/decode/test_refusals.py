# SPDX-License-Identifier: Apache-2.0
"""Arguments that do not fit: a ValueError that names the value and what is allowed."""

import numpy as np
import pytest
import torch
from mla_kernels import mla_decode, plan_mla_decode
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.testing.cases import decode_case


def fp8(case, kv_scale):
    return {"kv_cache": case.kv_cache.to(torch.float8_e4m3fn), "kv_scale": kv_scale}


def ds_mla(case, start, stride):
    """A cache of fp8_ds_mla rows, `stride` bytes apart from byte `start` on."""
    blocks = case.kv_cache.shape[0]
    memory = torch.zeros(start + blocks * 64 * stride, dtype=torch.uint8)
    return memory[start:].view(blocks, 64, stride)[..., :656]


BAD = {
    "q without heads": (lambda c: {"q": c.q[:, 0]}, r"q of shape \[B, s_q, H, Dk\], got \[2, 16"),
    "integer q": (lambda c: {"q": c.q.int()}, r"q.dtype in .*bfloat16.*got torch.int32"),
    "s_q of 9": (lambda c: {"q": c.q.expand(2, 9, 16, 576)}, r"s_q .* in 1\.\.8, got 9"),
    "129 heads": (lambda c: {"q": c.q[:, :, :1].expand(2, 1, 129, 576)}, r"1\.\.128, got 129"),
    "rank above Dk": (lambda c: {"kv_lora_rank": 576}, r"kv_lora_rank in 1\.\.575, got 576"),
    "other cache width": (lambda c: {"kv_cache": c.kv_cache[..., :500]}, r"576\], got .*500\]"),
    "flat cache": (lambda c: {"kv_cache": c.kv_cache.flatten(0, 1)}, r"kv_cache of shape"),
    "block of 48": (
        lambda c: {"kv_cache": c.kv_cache[:, :48]},
        r"block size .*\[16, 32, 64, 128\]",
    ),
    "int8 cache": (lambda c: {"kv_cache": c.kv_cache.to(torch.int8)}, r"kv_cache.dtype in .*int8"),
    "mixed dtypes": (lambda c: {"kv_cache": c.kv_cache.half()}, r"one dtype, got .*bfloat16 and"),
    "fp8 without scale": (
        lambda c: {"kv_cache": c.kv_cache.to(torch.float8_e4m3fn)},
        r"kv_scale for a float8_e4m3fn cache, got None",
    ),
    "scale without fp8": (lambda c: {"kv_scale": 0.5}, r"kv_scale=None for .*got 0.5"),
    "long table": (lambda c: {"block_table": c.block_table.long()}, r"int32.*got torch.int64"),
    "table of 3 rows": (
        lambda c: {"block_table": c.block_table[[0, 1, 1]]},
        r"block_table of shape \[2, max_blocks\], got \[3",
    ),
    "lengths apart": (
        lambda c: {"seq_lens": c.seq_lens.repeat_interleave(2)[::2]},
        r"seq_lens with a contiguous last dimension, got strides \(2,\)",
    ),
    "lengths of 3": (lambda c: {"seq_lens": c.seq_lens[[0, 1, 1]]}, r"seq_lens of shape \[2\]"),
    "table elsewhere": (
        lambda c: {"block_table": c.block_table.to("meta")},
        r"block_table on cpu.*got meta",
    ),
    "scale of zero": (lambda c: {"scale": 0.0}, r"softmax scale above 0, got 0.0"),
    "scale beyond fp32": (lambda c: {"scale": 1e39}, r"softmax scale .*got 1e\+39 .*2\^127"),
    "scale beyond fp32 times log2 e": (lambda c: {"scale": 1.5 * 2.0**127}, "softmax scale .*127"),
    "scale that is 0 in fp32": (lambda c: {"scale": 1e-46}, r"softmax scale .*got 1e-46 .*2\^-126"),
    "scale beyond a float": (lambda c: {"scale": 10**400}, r"softmax scale .*got 1000"),
    "scale of zero in 16 bits": (lambda c: {"scale": np.float16(0)}, "softmax scale above 0"),
    "scale of inf in 16 bits": (lambda c: {"scale": np.float16("inf")}, "finite softmax scale"),
    "scale of NaN": (lambda c: {"scale": float("nan")}, r"finite softmax scale.*nan"),
    "rescale": (lambda c: {"rescale": "pow3"}, r"rescale in .*'pow2'.*got 'pow3'"),
    "impl": (lambda c: {"impl": "cuda"}, r"impl in .*'auto'.*got 'cuda'"),
    "hopper on a CPU": (lambda c: {"impl": "hopper"}, r"impl.*hopper"),
    "out of another shape": (
        lambda c: {"out": c.poisoned_out()[..., :256]},
        r"out of shape \[2, 1, 16, 512\]",
    ),
    "out that autograd watches": (
        lambda c: {"out": c.poisoned_out().requires_grad_()},
        "out without requires_grad, as it is written to",
    ),
    "out of another dtype": (lambda c: {"out": c.poisoned_out().float()}, r"out.dtype.*float32"),
    "no tensor": (lambda c: {"seq_lens": [5, 70]}, r"seq_lens to be a tensor, got list"),
    "scale of a tensor": (lambda c: {"scale": torch.tensor(0.1)}, r"softmax scale.*tensor"),
    "no scale": (lambda c: {"scale": None}, r"softmax scale above 0, got None"),
    "rank as a float": (lambda c: {"kv_lora_rank": 512.0}, r"kv_lora_rank in 1\.\.575, got 512\.0"),
    "kv_scale of NaN": (lambda c: fp8(c, float("nan")), r"finite kv_scale above 0, got nan"),
    "kv_scale of zero in 16 bits": (lambda c: fp8(c, np.float16(0)), "finite kv_scale above 0"),
    "kv_scale of zero": (lambda c: fp8(c, torch.zeros(1)), r"finite kv_scale above 0, got 0\.0"),
    "kv_scale beyond fp32": (lambda c: fp8(c, 1e39), r"finite kv_scale .*got 1e\+39 .*2\^127"),
    "kv_scale that is 0 in fp32": (lambda c: fp8(c, 1e-46), r"finite kv_scale .*got 1e-46"),
    "kv_scale below zero": (lambda c: fp8(c, -1.0), r"finite kv_scale above 0, got -1\.0"),
    "kv_scale in fp64": (lambda c: fp8(c, torch.ones(1).double()), r"kv_scale.dtype.*float64"),
    "kv_scale of 2": (lambda c: fp8(c, torch.ones(2)), r"kv_scale with 1 element, got \[2\]"),
    "kv_scale elsewhere": (
        lambda c: fp8(c, torch.ones(1, device="meta")),
        r"kv_scale on cpu, like kv_cache, got meta",
    ),
    "rank as a bool": (lambda c: {"kv_lora_rank": True}, r"kv_lora_rank in 1\.\.575, got True"),
    "rank as a tensor": (lambda c: {"kv_lora_rank": LENGTHS[0]}, r"1\.\.575, got tensor\(5"),
    "fp8_ds_mla at an odd address": (
        lambda c: {"kv_cache": ds_mla(c, 1, 656)},
        "address .* multiples of 4 bytes, got 0x",
    ),
    "fp8_ds_mla with odd strides": (
        lambda c: {"kv_cache": ds_mla(c, 0, 657)},
        r"multiples of 4 bytes, got .*\[42048, 657\]",
    ),
    "fp8_ds_mla with an odd rope dim": (
        lambda c: {"q": c.q[..., :-1], "kv_cache": ds_mla(c, 0, 654)},
        "an even rope dim for fp8_ds_mla rows, got 63",
    ),
    "queries in a list": (
        lambda c: {"q": [c.q[..., :512], c.q[..., 512:]]},
        "a tensor or a tuple of its two parts, got list",
    ),
    "negative length": (
        lambda c: {"seq_lens": torch.tensor([5, -3], dtype=torch.int32)},
        r"seq_lens\[1\] in 0\.\.192 .*got -3",
    ),
    "table too short": (
        lambda c: {"block_table": c.block_table[:, :1]},
        r"seq_lens\[1\] in 0\.\.64 \(1 blocks of 64 .*got 70",
    ),
    "block that the cache has not": (
        lambda c: {"block_table": torch.full_like(c.block_table, 9999)},
        r"block_table entries in 0\.\.5, got 9999 in row 0, column 0",
    ),
    "block just past the cache": (
        lambda c: {"block_table": torch.full_like(c.block_table, len(c.kv_cache))},
        r"block_table entries in 0\.\.5, got 6 in row 0, column 0",
    ),
    "cache without blocks": (lambda c: {"kv_cache": c.kv_cache[:0]}, r"block_table entries in"),
    "rank as a type": (lambda c: {"kv_lora_rank": int}, r"kv_lora_rank in 1\.\.575, got <class"),
    "rank as an array": (
        lambda c: {"kv_lora_rank": np.ones(2)},
        r"kv_lora_rank in 1\.\.575, got ar",
    ),
    "rescale of a tensor": (lambda c: {"rescale": LENGTHS}, r"rescale in .*got tensor"),
    "impl of a list": (lambda c: {"impl": ["torch"]}, r"impl in .*got \['torch'\]"),
    "causal as a word": (lambda c: {"causal": "no"}, r"causal in \[True, False\], got 'no'"),
    "causal as an array": (lambda c: {"causal": np.ones(2)}, r"causal in \[True, False\], got ar"),
    "plan of another kind": (lambda c: {"plan": "x"}, r"plan from plan_mla_decode, got str"),
    "plan of another batch": (
        lambda c: {"plan": plan_mla_decode(c.seq_lens[:1], num_heads=16, s_q=1)},
        r"plan for .*\(2, 1, 16\), got one for \(1, 1, 16\)",
    ),
    "plan of the other mode": (
        lambda c: {"plan": plan_mla_decode(c.seq_lens, num_heads=16, s_q=1, deterministic=True)},
        "plan with deterministic=False, got True",
    ),
    "plan of a mode that was not asked of it": (
        lambda c: {
            "plan": plan_mla_decode(c.seq_lens, num_heads=16, s_q=1),
            "deterministic": True,
        },
        "plan with deterministic=True, got False",
    ),
    "plan of a larger rank": (
        lambda c: {"plan": plan_mla_decode(c.seq_lens, num_heads=16, s_q=1, kv_lora_rank=1024)},
        "plan with kv_lora_rank=512, got 1024",
    ),
    "plan of another rank": (
        lambda c: {"plan": plan_mla_decode(c.seq_lens, num_heads=16, s_q=1, kv_lora_rank=256)},
        "plan with kv_lora_rank=512, got 256",
    ),
    "plan of another device": (
        lambda c: {"plan": plan_mla_decode(c.seq_lens.to("meta"), num_heads=16, s_q=1)},
        "plan made on cpu, got one made on meta",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_refusal(name):
    case = decode_case([5, 70])
    change, message = BAD[name]
    call = {
        "q": case.q,
        "kv_cache": case.kv_cache,
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        **case.options,
        **change(case),
    }
    with pytest.raises(ValueError, match=message):
        mla_decode(**call)


@pytest.mark.parametrize(
    "name",
    [
        "negative length",
        "table too short",
        "block just past the cache",
        "cache without blocks",
    ],
)
def test_the_reference_refuses_wrong_contents_too(name):
    case = decode_case([5, 70])
    change, message = BAD[name]
    call = dict(zip(("q", "kv_cache", "block_table", "seq_lens"), case.args, strict=True))
    with pytest.raises(ValueError, match=message):
        mla_decode(**call | case.options | change(case), impl="reference")


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("s_q", [1, 2])
def test_an_empty_batch(impl, planned, s_q, monkeypatch):
    case = decode_case([5, 70], s_q=s_q)
    q, kv_cache, block_table, seq_lens = case.args
    none = (q[:0], kv_cache, block_table[:0], seq_lens[:0])
    plan = plan_mla_decode(seq_lens[:0], num_heads=16, s_q=s_q) if planned else None
    if impl == "triton":  # nothing may be launched: a grid or a TMA box of 0 is an error on a GPU
        from mla_kernels import dispatch
        from mla_kernels.decode.triton import launcher

        monkeypatch.setattr(dispatch, "triton_refusal", lambda device: None)
        monkeypatch.setattr(launcher, "mla_decode_triton", None)
    out, lse = mla_decode(*none, **case.options, impl=impl, plan=plan)
    assert out.shape == (0, s_q, 16, 512) and lse.shape == (0, s_q, 16)
    if planned:
        tokens = {"plan": plan, "kv_lora_rank": 512, "impl": impl, "scale": 0.1}
        out, lse = mla_decode_tokens(none[0].flatten(0, 1), *none[1:], **tokens)
        assert out.shape == (0, 16, 512) and lse.shape == (0, 16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("requests, blocks", [(0, 4), (2, 0)])
def test_nothing_to_read_on_a_device_whose_lengths_are_not_read(requests, blocks, deterministic):
    q = torch.empty(requests, 1, 16, 576, device="meta")
    cache = torch.empty(blocks, 64, 576, device="meta")
    table = torch.empty(requests, 2, dtype=torch.int32, device="meta")
    options = {"scale": 0.1, "impl": "torch", "deterministic": deterministic}
    out, lse = mla_decode(q, cache, table, table[:, 0].contiguous(), **options)
    assert out.shape == (requests, 1, 16, 512) and lse.shape == (requests, 1, 16)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_a_cache_without_blocks_has_room_for_empty_requests(impl, monkeypatch):
    case = decode_case([0, 0])
    if impl == "triton":  # nothing may be launched: TMA takes no cache of 0 rows
        from mla_kernels import dispatch
        from mla_kernels.decode.triton import launcher

        monkeypatch.setattr(dispatch, "triton_refusal", lambda device: None)
        monkeypatch.setattr(launcher, "mla_decode_triton", None)
    call = case.q, case.kv_cache[:0], case.block_table, case.seq_lens
    out, lse = mla_decode(*call, **case.options, impl=impl, out=case.poisoned_out())
    assert not out.any() and (lse == -torch.inf).all()


LENGTHS = torch.tensor([5, 70], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": [5, 70]}, "seq_lens to be a tensor, got list"),
        ({"seq_lens": LENGTHS.long()}, r"seq_lens.dtype in .*int32.*got torch.int64"),
        ({"seq_lens": LENGTHS[None]}, r"seq_lens of shape \[B\], got \[1, 2\]"),
        ({"seq_lens": LENGTHS[:1].expand(2)}, r"seq_lens with a contiguous.*got strides \(0,\)"),
        ({"num_heads": 0}, r"num_heads in 1\.\.128, got 0"),
        ({"num_heads": 129}, r"num_heads in 1\.\.128, got 129"),
        ({"s_q": 0}, r"s_q in 1\.\.8, got 0"),
        ({"s_q": 9}, r"s_q in 1\.\.8, got 9"),
        ({"kv_lora_rank": 0}, "kv_lora_rank in 1"),
        ({"rope_dim": -1}, "rope_dim in 1"),
        ({"max_seq_len": -1}, "max_seq_len in 0"),
        ({"dtype": torch.int32}, "dtype in .*bfloat16.*got torch.int32"),
        ({"kv_cache_dtype": torch.int8}, "kv_cache_dtype in .*got torch.int8"),
        ({"block_size": 48}, r"block_size in \[16, 32, 64, 128\], got 48"),
        ({"rescale": "pow3"}, "rescale in .*got 'pow3'"),
        ({"impl": "cuda"}, "impl in .*got 'cuda'"),
        ({"deterministic": torch.tensor(True)}, r"deterministic in \[True, False\], got tensor"),
        ({"block_size": LENGTHS}, r"block_size in \[16, 32, 64, 128\], got tensor"),
        ({"lender": "x"}, "lender from plan_mla_decode, got str"),
        (
            {"lender": plan_mla_decode(LENGTHS.to("meta"), num_heads=16, s_q=1)},
            "lender on cpu, got one on meta",
        ),
    ],
)
def test_plans_that_fit_no_decode(change, message):
    with pytest.raises(ValueError, match=message):
        plan_mla_decode(**{"seq_lens": LENGTHS, "num_heads": 16, "s_q": 1} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 16, 576)}, "tokens of 2 requests, as many of each, got 3"),
        ({"seq_lens": LENGTHS[:0]}, "tokens of 0 requests, as many of each, got 2"),
        ({"out": torch.zeros(3, 16, 512)}, r"out of shape \[2, H, .*\], got \[3, 16, 512\]"),
        ({"out": torch.zeros(2, 16, 511)}, r"out of shape \[2, 1, 16, 512\], got .*511\]"),
        ({"lse": torch.zeros(1, 2, 16)}, r"lse of shape \[2, H\], got \[1, 2, 16\]"),
        ({"lse": 1.0}, "lse to be a tensor, got float"),
        ({"q": None}, "q to be a tensor or a tuple of its two parts, got NoneType"),
        ({"q": torch.zeros(2, 1, 16, 576)}, r"q of shape \[T, H, Dk\], got \[2, 1, 16, 576\]"),
        ({"q": ([1], [2])}, r"q\[0\] to be a tensor, got list"),
        ({"seq_lens": [5, 70]}, "seq_lens to be a tensor, got list"),
        ({"seq_lens": LENGTHS[0]}, r"seq_lens of shape \[B\], got \[\]"),
        ({"block_table": [[0]]}, "block_table to be a tensor, got list"),
        ({"kv_cache": None}, "kv_cache to be a tensor, got NoneType"),
        ({"kv_lora_rank": None}, r"kv_lora_rank in 1\.\.575, got None"),
        ({"plan": None}, "plan from plan_mla_decode, got NoneType"),
    ],
)
def test_tokens_that_are_not_those_of_the_requests(change, message):
    case = decode_case([5, 70], dtype=torch.float32)
    call = dict(zip(("q", "kv_cache", "block_table", "seq_lens"), case.args, strict=True))
    call |= {"q": case.q[:, 0], "plan": plan_mla_decode(LENGTHS, num_heads=16, s_q=1)}
    with pytest.raises(ValueError, match=message):
        mla_decode_tokens(**call | case.options | change)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (LENGTHS[[0, 1, 1]], r"seq_lens of shape \[2\], got \[3\]"),
        (LENGTHS[:1], r"seq_lens of shape \[2\], got \[1\]"),
        (LENGTHS.long(), "seq_lens.dtype in .*got torch.int64"),
        (LENGTHS[:1].expand(2), r"seq_lens with a contiguous.*got strides \(0,\)"),
        (LENGTHS.to("meta"), "seq_lens on cpu.*got meta"),
    ],
)
def test_a_plan_is_updated_with_lengths_of_its_batch_only(lengths, message):
    plan = plan_mla_decode(LENGTHS, num_heads=16, s_q=1)
    with pytest.raises(ValueError, match=message):
        plan.update(lengths)


@pytest.mark.parametrize("name", ["causal", "deterministic", "validate"])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_flag_is_no_tensor(name, impl, device):
    """With a plan of the kernels too, where calls are replayed: its value would have to be read,
    which one on "meta" does not allow."""
    case = decode_case([5, 70], num_heads=1, device=device)
    plan = plan_mla_decode(case.seq_lens, num_heads=1, s_q=1, impl=impl)
    call = {"plan": plan, "impl": impl, **case.options}
    for flag in (torch.tensor(True), torch.ones(2), torch.tensor(True, device="meta")):
        with pytest.raises(ValueError, match=rf"{name} in \[True, False\], got tensor"):
            mla_decode(*case.args, **call, **{name: flag})
        tokens = case.q[:, 0], *case.args[1:]
        with pytest.raises(ValueError, match=rf"{name} in \[True, False\], got tensor"):
            mla_decode_tokens(*tokens, **call, **{name: flag})


def test_flags_are_numbers_too():
    case = decode_case([5, 70])
    want, _ = mla_decode(*case.args, **case.options)
    plan = plan_mla_decode(case.seq_lens, num_heads=16, s_q=1, deterministic=0)
    flags = {"causal": np.bool_(True), "deterministic": np.bool_(False), "validate": 1}
    got, _ = mla_decode(*case.args, **case.options, **flags, plan=plan)
    assert plan.deterministic is False and torch.equal(got, want)


def test_a_plan_keeps_no_numbers_of_numpy(device):
    """Triton takes none."""
    sizes = {"num_heads": 16, "s_q": 2, "kv_lora_rank": 512, "max_seq_len": 4096}
    numbers = {name: np.int64(size) for name, size in sizes.items()}
    lengths = LENGTHS.to(device)
    plan = plan_mla_decode(lengths, impl="triton", deterministic=True, **numbers)
    held = (*vars(plan).values(), *vars(plan.device_plan).values())
    assert not any(isinstance(x, np.generic) for x in held)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
def test_scales_at_the_ends_are_allowed(scale):
    """Which the refusals name."""
    case = decode_case([5])
    mla_decode(*case.args, **case.options | {"scale": scale})


def test_scale_is_never_guessed():
    case = decode_case([5])
    del case.options["scale"]
    with pytest.raises(TypeError, match="scale"):
        mla_decode(*case.args, **case.options)


def test_checked_mode_names_the_entry_and_the_request():
    case = decode_case([5, 70])
    case.block_table[1, 1] = 99
    with pytest.raises(ValueError, match=r"0\.\.\d+, got 99 in row 1, column 1"):
        mla_decode(*case.args, **case.options, validate=True)
    case.block_table[1, 1] = -1
    with pytest.raises(ValueError, match="got -1 in row 1, column 1"):
        mla_decode(*case.args, **case.options, validate=True)


@pytest.mark.parametrize("length", [-1, 10_000])
def test_checked_mode_names_the_length(length):
    case = decode_case([5, 70])
    case.seq_lens[1] = length
    with pytest.raises(ValueError, match=rf"seq_lens\[1\] in 0\.\.\d+ .*got {length}"):
        mla_decode(*case.args, **case.options, validate=True)


def test_checked_mode_accepts_what_is_right():
    case = decode_case([0, 5, 70])
    mla_decode(*case.args, **case.options, validate=True)


def test_strides_of_one_element_do_not_matter():
    case = decode_case([5])
    q, kv_cache, block_table, seq_lens = case.args
    apart = block_table[:, :1].repeat(2, 2)[::2, ::2][:1, :1], seq_lens.repeat(2)[::2]
    got, _ = mla_decode(q, kv_cache, *apart, **case.options)
    assert torch.equal(got, mla_decode(*case.args, **case.options)[0])
