# SPDX-License-Identifier: Apache-2.0
"""What tells calls apart that may be replayed: everything that a launch may depend on."""

import contextlib

import pytest
import torch
from mla_kernels import (
    indexer_topk,
    mla_decode,
    mla_sparse_attention,
    plan_mla_decode,
    positions_to_slots,
    write_indexer_cache,
    write_kv_cache,
)
from mla_kernels.cache import api as cache_api
from mla_kernels.decode.api import operands_of
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.indexer import api as indexer_api
from mla_kernels.indexer import cache as indexer_cache_api
from mla_kernels.indexer import slots as slots_api
from mla_kernels.sparse import api as sparse_api
from mla_kernels.testing.cases import decode_case
from mla_kernels.triton_common.record import Recordings
from mla_kernels.triton_common.runtime import INTERPRET


class Keys(Recordings):
    """Finds nothing and does nothing, but notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.keys, self.operands = [], []

    def find(self, key):
        self.keys.append(key)

    def record(self, key, operands, call):
        assert key == self.keys[-1]
        self.operands = operands


def check(function, keys, call, changes):
    """Clones have the key of the call; every change, alone, has one of its own."""

    def key_of(**change):
        with contextlib.suppress(ValueError):  # only asked for the key
            function(**call | change)
        return keys.keys[-1]

    clones = {k: copy_of(x) for k, x in call.items() if not isinstance(x, (str, int, float))}
    clones = {k: x for k, x in clones.items() if x is not None}
    found = [key_of(), *(key_of(**{name: value}) for name, value in changes)]
    assert key_of() == key_of(**clones) == found[0]
    assert len(set(found)) == len(found)


def copy_of(x):
    """The same kind of tensor elsewhere."""
    if isinstance(x, tuple):
        return tuple(map(copy_of, x))
    if not isinstance(x, torch.Tensor):
        return None
    whole = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8)
    base = whole.view(x.dtype)[x.storage_offset() :]
    return base.as_strided(x.shape, x.stride()).copy_(x)


def other_forms(x):
    """Of x: fewer rows, other strides, another dtype, another device, another alignment."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype)[..., : x.shape[-1]]
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    forms = [x[:1], odd, x.double(), x.to("meta")]
    return forms if x.dim() == 1 else [*forms, wide]  # a vector is one whatever it was cut from


@pytest.mark.skipif(not INTERPRET, reason="device plans on a CPU need the interpreter")
@pytest.mark.parametrize("tokens", [False, True])
def test_decode(tokens):
    case = decode_case([70, 5, 3], num_heads=4)
    fp8 = case.kv_cache.to(torch.float8_e4m3fn)
    plan = plan_mla_decode(case.seq_lens, num_heads=4, s_q=1, impl="triton")
    keys = Keys()
    object.__setattr__(plan, "recordings", keys)
    q = case.q[:, 0] if tokens else case.q
    out, lse = q.new_empty(*q.shape[:-1], 512), q.new_empty(q.shape[:-1], dtype=torch.float32)
    call = {
        "q": q,
        "kv_cache": case.kv_cache,
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        "plan": plan,
        "impl": "triton",
        "rescale": "pow2",
        "causal": True,
        "deterministic": False,
        "scale": 0.5,
        "out": out,
        "lse": lse,
    }
    tensors = ("q", "kv_cache", "block_table", "seq_lens", "out", "lse")
    changes = [(name, x) for name in tensors for x in other_forms(call[name])]
    changes += [("q", (q[..., :512], q[..., 512:])), ("kv_cache", fp8), ("out", None)]
    changes += [("lse", None), ("scale", 0.25), ("scale", 1), ("kv_lora_rank", 256)]
    changes += [("kv_lora_rank", 512.0), ("kv_scale", 1.0), ("kv_scale", torch.ones(1))]
    changes += [("q_scale", 1.0), ("q_scale", 0.5), ("q_scale", torch.ones(1))]
    changes += [("q", q.to(torch.float8_e4m3fn))]
    changes += [("rescale", "amla"), ("causal", False), ("deterministic", True)]
    changes += [("impl", "auto")]
    check(mla_decode_tokens if tokens else mla_decode, keys, call, changes)
    rest = {name: x for name, x in call.items() if name not in ("causal", "deterministic")}
    for name in ("causal", "deterministic"):  # the same values by other names
        (mla_decode_tokens if tokens else mla_decode)(**rest | {name: False})
    assert keys.keys[-1] != keys.keys[-2]
    (mla_decode_tokens if tokens else mla_decode)(**call)
    given = (q, case.kv_cache, case.block_table, case.seq_lens, out, lse)
    assert all(any(x is y for y in keys.operands) for x in (*given, *plan.device_plan.buffers))


@pytest.mark.skipif(not INTERPRET, reason="device plans on a CPU need the interpreter")
def test_update_of_a_plan():
    lengths = torch.tensor([70, 5, 3], dtype=torch.int32)
    plan = plan_mla_decode(lengths, num_heads=4, s_q=1, impl="triton")
    keys = Keys()
    object.__setattr__(plan, "updates", keys)
    changes = [("seq_lens", x) for x in [*other_forms(lengths), lengths.repeat(2)[::2]]]
    check(plan.update, keys, {"seq_lens": lengths}, changes)
    plan.update(lengths)
    written = plan.device_plan.updated
    assert [id(x) for x in keys.operands] == [id(x) for x in (lengths, *written)]


@pytest.mark.skipif(not INTERPRET, reason="device plans on a CPU need the interpreter")
def test_both_scales_of_fp8_are_operands():
    """Else a replay would read another layer's."""
    case = decode_case([70, 5], num_heads=4, cache_dtype=torch.float8_e4m3fn, kv_scale=0.5)
    plan = plan_mla_decode(case.seq_lens, num_heads=4, s_q=1, impl="triton")
    scales = torch.ones(1), torch.ones(())
    out, lse = case.poisoned_out(), case.q.new_empty(2, 1, 4, dtype=torch.float32)
    operands = operands_of(*case.args, *scales, out, lse, plan)
    assert all(any(x is y for y in operands) for x in (*case.args, *scales, out, lse))
    assert len(operands_of(*case.args, 1.0, None, out, lse, plan)) == len(operands) - 2


def test_another_plan_has_other_recordings():
    """A narrowed one too."""
    lengths = torch.tensor([5, 6], dtype=torch.int32)
    plan = plan_mla_decode(lengths, num_heads=4, s_q=1)
    assert plan.recordings is not plan.narrow(1).recordings
    assert plan.recordings is not plan_mla_decode(lengths, num_heads=4, s_q=1).recordings
    assert plan.updates is not plan.narrow(1).updates


def test_a_device_plan_names_all_its_tensors():
    from mla_kernels.decode.plan.launcher import DevicePlan

    names = [name for name, of in DevicePlan.__annotations__.items() if of is torch.Tensor]
    tensors = {name: torch.zeros(1) for name in names}
    sizes = dict.fromkeys(("rows", "kv_lora_rank", "chunk", "max_chunks", "spare"), 1)
    plan = DevicePlan(**sizes, **tensors)
    assert len(names) >= 5 and [id(x) for x in plan.buffers] == [id(x) for x in tensors.values()]


@pytest.fixture
def keys(monkeypatch):
    found = Keys()
    for module in (cache_api, sparse_api, slots_api, indexer_api, indexer_cache_api):
        monkeypatch.setattr(module, "_RECORDINGS", found)
    return found


def test_cache_write(keys):
    rows = torch.zeros(4, 576).bfloat16()
    call = {
        "kv_c": rows[:, :512],
        "k_pe": rows[:, 512:],
        "kv_cache": torch.zeros(2, 64, 576).bfloat16(),
        "slot_mapping": torch.arange(4),
        "impl": "torch",
    }
    changes = [("kv_cache", x) for x in other_forms(call["kv_cache"])]
    for name in ("kv_c", "k_pe", "slot_mapping"):  # of any number of rows
        changes += [(name, x) for x in other_forms(call[name])[1:]]
    changes += [("kv_c", rows[:, :256]), ("k_pe", rows[:, 512:544]), ("kv_c", rows[:, :512] * 1)]
    changes += [("kv_scale", 1.0), ("kv_scale", torch.ones(1)), ("impl", "auto")]
    check(write_kv_cache, keys, call, changes)


def test_a_recorded_cache_write_is_replayed_for_slots_that_fit_only(keys, monkeypatch):
    """Its key has their stride, which of a single slot is any, but not their number."""
    rows = torch.zeros(4, 576).bfloat16()
    call = {"kv_c": rows[:, :512], "k_pe": rows[:, 512:], "kv_cache": rows.new_zeros(2, 16, 576)}
    apart, replayed = torch.arange(8)[::2], []
    monkeypatch.setattr(keys, "find", lambda key: lambda operands, grid: replayed.append(grid))
    write_kv_cache(**call, slot_mapping=apart[:1])
    assert replayed == [(1, 1, 1)]
    with pytest.raises(ValueError, match=r"slot_mapping with a contiguous.*\(2,\)"):
        write_kv_cache(**call, slot_mapping=apart)
    with pytest.raises(ValueError, match=r"length of slot_mapping in 0\.\.4, got 5"):
        write_kv_cache(**call, slot_mapping=torch.arange(5))
    write_kv_cache(**call, slot_mapping=torch.arange(0))  # a grid of 0 is an error on a GPU
    assert len(replayed) == 1


def test_sparse_attention(keys):
    q = torch.zeros(3, 4, 576).bfloat16()
    call = {
        "q": q,
        "kv_cache": torch.zeros(2, 64, 576).bfloat16(),
        "slots": torch.zeros(3, 7, dtype=torch.int32),
        "scale": 0.5,
        "lengths": torch.ones(3, dtype=torch.int32),
        "sink": torch.zeros(4),
        "out": torch.zeros(3, 4, 512).bfloat16(),
        "lse": torch.zeros(3, 4),
        "max_logits": torch.zeros(3, 4),
        "workspace": torch.zeros(64, dtype=torch.uint8),
        "impl": "torch",
    }
    tensors = [name for name, x in call.items() if isinstance(x, torch.Tensor)]
    changes = [(name, x) for name in tensors for x in (None, *other_forms(call[name]))]
    changes = [(n, x) for n, x in changes if x is not None or n not in ("q", "kv_cache", "slots")]
    changes += [("q", (q[..., :512], q[..., 512:])), ("scale", 0.25), ("kv_lora_rank", 256)]
    changes += [("kv_scale", 1.0), ("deterministic", True), ("impl", "auto")]
    check(mla_sparse_attention, keys, call, changes)


def test_slots(keys):
    call = {
        "positions": torch.zeros(4, 7, dtype=torch.int32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "request_ids": torch.zeros(4, dtype=torch.int32),
        "block_size": 64,
        "impl": "torch",
    }
    changes = [(n, x) for n in ("positions", "block_table") for x in other_forms(call[n])]
    changes += [("request_ids", None), ("block_size", 32), ("impl", "auto")]
    changes += [("out", torch.zeros(4, 7, dtype=torch.int32))]
    check(positions_to_slots, keys, call, changes)


def test_indexer_cache_write(keys, monkeypatch):
    """Of any number of tokens, but none, and slots side by side."""
    call = {
        "k": torch.zeros(4, 128).bfloat16(),
        "k_cache": torch.zeros(2, 64, 132, dtype=torch.uint8),
        "slot_mapping": torch.arange(4),
        "impl": "torch",
    }
    changes = [("k_cache", x) for x in other_forms(call["k_cache"])]
    for name in ("k", "slot_mapping"):
        changes += [(name, x) for x in other_forms(call[name])[1:]]
    changes += [("scale_format", "fp32"), ("impl", "auto")]
    check(write_indexer_cache, keys, call, changes)
    slots, replayed = call.pop("slot_mapping"), []
    monkeypatch.setattr(keys, "find", lambda key: lambda operands, grid: replayed.append(grid))
    write_indexer_cache(**call, slot_mapping=slots[:3])
    assert replayed == [(3, 1, 1)]
    with pytest.raises(ValueError, match=r"slot_mapping with a contiguous.*\(2,\)"):
        write_indexer_cache(**call, slot_mapping=slots[::2])
    with pytest.raises(ValueError, match=r"length of slot_mapping in 0\.\.4, got 5"):
        write_indexer_cache(**call, slot_mapping=torch.arange(5))
    write_indexer_cache(**call, slot_mapping=slots[:0])
    assert len(replayed) == 1


def test_indexer_topk(keys):
    of = {"dtype": torch.int32}
    call = {
        "q": torch.zeros(4, 2, 128).bfloat16(),
        "k_cache": torch.zeros(3, 64, 132, dtype=torch.uint8),
        "weights": torch.zeros(4, 2),
        "block_table": torch.zeros(2, 3, **of),
        "seq_lens": torch.ones(2, **of),
        "k": 5,
        "positions": torch.zeros(4, **of),
        "request_ids": torch.zeros(4, **of),
        "lengths": torch.ones(4, **of),
        "out": torch.zeros(4, 5, **of),
        "values": torch.zeros(4, 5),
        "workspace": torch.zeros(8192, dtype=torch.uint8),
        "impl": "torch",
    }
    tensors = [name for name, x in call.items() if isinstance(x, torch.Tensor)]
    changes = [(name, x) for name in tensors for x in other_forms(call[name])]
    given = ("positions", "request_ids", "lengths", "out", "values", "workspace")
    changes += [(name, None) for name in given]
    changes += [("k", 6), ("fp8_products", True), ("deterministic", True), ("impl", "auto")]
    check(indexer_topk, keys, call, changes)


@pytest.mark.skipif(not INTERPRET, reason="kernels on a CPU need the interpreter")
@pytest.mark.parametrize("lengths", [False, True])
def test_operands_of_indexer_topk(lengths, keys):
    """All that a launch is given. Lengths may be the very tensor of the requests' lengths."""
    q, of = torch.zeros(2, 4, 128).bfloat16(), {"dtype": torch.int32}
    pages, weights = torch.zeros(3, 64, 132, dtype=torch.uint8), torch.zeros(2, 4)
    table, seq_lens = torch.zeros(2, 3, **of), torch.ones(2, **of)
    more = {"out": torch.zeros(2, 5, **of), "values": torch.zeros(2, 5)}
    more |= {"workspace": torch.zeros(8192, dtype=torch.uint8)}
    named = {"lengths": seq_lens} if lengths else {}
    indexer_topk(q, pages, weights, table, seq_lens, 5, impl="triton", **more, **named)
    want = {id(x) for x in (q, pages, weights, table, seq_lens, *more.values())}
    assert {id(x) for x in keys.operands} == want and len(keys.operands) == len(want)
