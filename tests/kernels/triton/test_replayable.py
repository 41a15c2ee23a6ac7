# SPDX-License-Identifier: Apache-2.0
"""Calls that a GPU replays (triton_common/record.py) do nothing around their launches that a replay
would leave out: one such read, in a check that was new, once had every step of an engine outside a
graph go the long way, which only a GPU showed (test_replay_gpu.py)."""

import importlib
import pkgutil
import sys
from types import SimpleNamespace

import mla_kernels
import pytest
import torch
from mla_kernels import (
    indexer_topk,
    indexer_topk_workspace,
    mla_decode,
    mla_sparse_attention,
    plan_mla_decode,
    positions_to_slots,
    write_indexer_cache,
    write_kv_cache,
)
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.indexer import api as indexer_api
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


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8])
def test_indexer_cache_writes(cache, device, recorded):
    k = torch.zeros(3, 128, dtype=torch.bfloat16, device=device)
    pages = torch.zeros(2, 64, 132 if cache.itemsize == 1 else 128, device=device).to(cache)
    write_indexer_cache(k, pages, torch.arange(3, device=device), impl="triton")
    assert len(recorded) == 1


@pytest.mark.parametrize("pages", [4, 20, 600])  # rows held, with levels, and of many programs
@pytest.mark.parametrize("rows", [2, 3, 40])
@pytest.mark.parametrize("given", [False, True])
def test_indexer_topk(given, rows, pages, device, recorded):
    """As the plugin calls it, and with nothing that is not needed."""
    of = {"dtype": torch.int32, "device": device}
    q = torch.zeros(rows, 4, 128, dtype=torch.bfloat16, device=device)
    weights = torch.zeros(rows, 4, device=device)
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8, device=device)
    table, seq_lens = torch.zeros(1, pages, **of), torch.ones(1, **of)
    named = {}
    if given:
        lengths, ids = torch.ones(rows, **of), torch.zeros(rows, **of)
        workspace = indexer_topk_workspace(rows, pages, torch.device(device))
        out = torch.zeros(rows, 5, **of)
        named = {"lengths": lengths, "request_ids": ids, "out": out, "workspace": workspace}
    indexer_topk(q, cache, weights, table, seq_lens, 5, impl="triton", **named)
    assert len(recorded) >= 2


@pytest.mark.parametrize("rows", [2, 300])
@pytest.mark.parametrize("fp8_products", [False, True])
def test_indexer_topk_by_the_hopper_kernel(fp8_products, rows, device, recorded, monkeypatch):
    if device == "cpu":
        sms = SimpleNamespace(multi_processor_count=4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sms)
        monkeypatch.setattr(indexer_api, "_choose", lambda *_: SimpleNamespace(impl="hopper"))
    of = {"dtype": torch.int32, "device": device}
    q = torch.zeros(rows, 64, 128, device=device).to(torch.float8_e4m3fn)
    weights, ids = torch.zeros(rows, 64, device=device), torch.zeros(rows, **of)
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8, device=device)
    args = q, cache, weights, torch.zeros(1, 20, **of), torch.ones(1, **of), 5
    indexer_topk(*args, request_ids=ids, lengths=ids + 1, fp8_products=fp8_products)
    assert len(recorded) >= 2
