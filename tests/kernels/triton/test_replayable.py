# SPDX-License-Identifier: Apache-2.0
"""Calls that a GPU replays (triton_common/record.py) do nothing around their launches that a replay
would leave out: one such read, in a check that was new, once had every step of an engine outside a
graph go the long way, which only a GPU showed (test_replay_gpu.py)."""

import importlib
import pkgutil
import sys

import mla_kernels
import pytest
import torch
from mla_kernels import (
    mla_decode,
    mla_sparse_attention,
    plan_mla_decode,
    positions_to_slots,
    write_kv_cache,
)
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.testing.cases import decode_case
from mla_kernels.triton_common import record
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.record import Recording, Recordings


@pytest.fixture
def recorded(monkeypatch):
    """Launches that were recorded, none of which is done."""

    class Unspoilt(Recording):
        def spoil(self):
            raise AssertionError("a replay would leave something out")

    def note(kernel, *_, **__):
        if record.recording() is not None:
            launched.append(kernel)

    for module in pkgutil.walk_packages(mla_kernels.__path__, "mla_kernels."):
        if "launcher" in module.name:  # public functions import these with their first call
            importlib.import_module(module.name)
    launched, modules = [], [m for n, m in sys.modules.items() if n.startswith("mla_kernels.")]
    for module in modules:
        if getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", note)
        if isinstance(getattr(module, "_RECORDINGS", None), Recordings):
            monkeypatch.setattr(module, "_RECORDINGS", Recordings())
    monkeypatch.setattr(record, "Recording", Unspoilt)
    # The scale of an fp8 cache is looked at on a CPU alone (checks.check_fp8_scale).
    monkeypatch.setattr(record, "_READS", record._READS | {torch.Tensor.item})
    return launched


@pytest.mark.parametrize("cache", ["bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(("heads", "s_q"), [(128, 1), (16, 4)])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_decode(heads, s_q, parts, cache, deterministic, device, recorded):
    dtypes = {"fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}
    scale = 0.02 if cache == "fp8" else None
    of = {"cache_dtype": dtypes.get(cache), "kv_scale": scale, "device": device}
    case = decode_case([70, 0, 3], num_heads=heads, s_q=s_q, **of)
    options = {"impl": "triton", "deterministic": deterministic}
    of = {"kv_cache_dtype": case.kv_cache.dtype, "max_seq_len": 128}
    plan = plan_mla_decode(case.seq_lens, num_heads=heads, s_q=s_q, **of, **options)
    if cache == "fp8":
        case.options["kv_scale"] = torch.tensor([scale], device=device)
    parted = lambda q: q.split([512, 64], -1) if parts else q  # noqa: E731
    for decode, q in ((mla_decode, case.q), (mla_decode_tokens, case.q.flatten(0, 1))):
        for results in ({}, {"out": q.new_empty(*q.shape[:-1], 512)}):
            before = len(recorded)
            decode(parted(q), *case.args[1:], plan=plan, **case.options | options | results)
            assert len(recorded) > before
    plan.updates._found.clear()
    before = len(recorded)
    plan.update(case.seq_lens)
    assert len(recorded) == before + 1


@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.uint8])
def test_sparse_attention(heads, rows, device, recorded):
    q = torch.zeros(3, heads, 576, dtype=torch.bfloat16, device=device)
    width = 656 if rows == torch.uint8 else 576
    pages = torch.zeros(2, 64, width, dtype=rows, device=device)
    slots = torch.zeros(3, 64, dtype=torch.int32, device=device)
    mla_sparse_attention(q, pages, slots, scale=0.1, impl="triton", out=q.new_empty(3, heads, 512))
    assert recorded


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_cache_writes(cache, device, recorded):
    rows = torch.zeros(3, 576, dtype=torch.bfloat16, device=device)
    scale = torch.ones(1, device=device) if cache.itemsize == 1 else None
    pages = torch.zeros(2, 64, 576, device=device).to(cache)
    slots = torch.arange(3, device=device)
    write_kv_cache(rows[:, :512], rows[:, 512:], pages, slots, kv_scale=scale, impl="triton")
    assert len(recorded) == 1


@pytest.mark.parametrize("ragged", [False, True])
def test_slots(ragged, device, recorded):
    of = {"dtype": torch.int32, "device": device}
    positions, table = torch.zeros(2, 64, **of), torch.zeros(2, 4, **of)
    ids = torch.arange(2, **of) if ragged else None
    positions_to_slots(positions, table, request_ids=ids, impl="triton")
    assert len(recorded) == 1
