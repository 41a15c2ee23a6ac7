# SPDX-License-Identifier: Apache-2.0
"""Arguments that do not fit: a ValueError that names the value and what is allowed."""

import pytest
import torch
from mla_kernels import mla_decode, plan_mla_decode
from mla_kernels.testing.cases import decode_case

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
    "lengths of 3": (lambda c: {"seq_lens": c.seq_lens[[0, 1, 1]]}, r"seq_lens of shape \[2\]"),
    "table elsewhere": (
        lambda c: {"block_table": c.block_table.to("meta")},
        r"block_table on cpu.*got meta",
    ),
    "scale of zero": (lambda c: {"scale": 0.0}, r"softmax scale above 0, got 0.0"),
    "scale of NaN": (lambda c: {"scale": float("nan")}, r"finite softmax scale.*nan"),
    "rescale": (lambda c: {"rescale": "pow3"}, r"rescale in .*'pow2'.*got 'pow3'"),
    "impl": (lambda c: {"impl": "cuda"}, r"impl in .*'auto'.*got 'cuda'"),
    "hopper on a CPU": (lambda c: {"impl": "hopper"}, r"impl.*hopper"),
    "out of another shape": (
        lambda c: {"out": c.poisoned_out()[..., :256]},
        r"out of shape \[2, 1, 16, 512\]",
    ),
    "out of another dtype": (lambda c: {"out": c.poisoned_out().float()}, r"out.dtype.*float32"),
    "plan of another batch": (
        lambda c: {"plan": plan_mla_decode(c.seq_lens[:1], num_heads=16, s_q=1)},
        r"plan for .*\(2, 1, 16\), got one for \(1, 1, 16\)",
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
