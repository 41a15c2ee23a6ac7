# SPDX-License-Identifier: Apache-2.0
"""Calls of a kind that was seen before: replayed, with the addresses of the new tensors."""

import pytest
import torch
from mla_kernels import (
    indexer_lengths,
    indexer_topk,
    indexer_topk_workspace,
    mla_decode,
    mla_sparse_attention,
    mla_sparse_workspace,
    plan_mla_decode,
    positions_to_slots,
    write_indexer_cache,
    write_kv_cache,
)
from mla_kernels.cache import api as cache_api
from mla_kernels.cache.torch_impl import write_kv_cache_torch
from mla_kernels.decode.tokens import mla_decode_tokens
from mla_kernels.indexer import api as indexer_api
from mla_kernels.indexer import cache as indexer_cache_api
from mla_kernels.indexer import slots as slots_api
from mla_kernels.sparse import api as sparse_api
from mla_kernels.testing.cases import decode_case
from mla_kernels.triton_common.direct import Replay
from mla_kernels.triton_common.record import Recordings
from triton import knobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CACHES = {
    "bf16": {},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "kv_scale": 0.02},
    "fp8_ds_mla": {"cache_dtype": torch.uint8},
}


@pytest.fixture
def replays(monkeypatch):
    """Grows by one with each replay; nothing is recorded yet."""
    seen, call = [], Replay.__call__

    def counted(self, *args):
        seen.append(self)
        call(self, *args)

    monkeypatch.setattr(Replay, "__call__", counted)
    for module in (cache_api, sparse_api, slots_api, indexer_api, indexer_cache_api):
        monkeypatch.setattr(module, "_RECORDINGS", Recordings())
    return seen


@pytest.fixture(params=["hopper", "triton"])
def impl(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    return request.param


def cases(heads, s_q, cache):
    """Three batches of one shape: other lengths, tokens, pages and addresses."""
    lengths = [[0, 70, 1, 3000], [3000, 1, 70, 0], [1, 3000, 0, 70]]
    shared = {"num_heads": heads, "s_q": s_q, "q_std": 0.5, "device": "cuda", **CACHES[cache]}
    return [decode_case(of, seed=7 * i, **shared) for i, of in enumerate(lengths)]


def query_of(case, form):
    if form == "whole":
        return case.q
    latent, rope = case.q[..., :512], case.q[..., 512:]
    if form == "by head":
        flat = latent.flatten(0, 1).transpose(0, 1).contiguous().transpose(0, 1)
        return flat.unflatten(0, latent.shape[:2]), rope
    return latent.contiguous(), rope


def decode(case, q, plan, **options):
    out = case.poisoned_out()
    lse = out.new_full(out.shape[:3], torch.nan, dtype=torch.float32)
    rest = case.kv_cache, case.block_table, case.seq_lens
    return mla_decode(q, *rest, plan=plan, out=out, lse=lse, **case.options, **options)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("heads", "s_q"), [(128, 1), (128, 2), (16, 1), (8, 2), (6, 5)])
@pytest.mark.parametrize("form", ["whole", "parts", "by head"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_decode(impl, cache, heads, s_q, form, deterministic, replays):
    options = {"impl": impl, "deterministic": deterministic}
    shape = {"num_heads": heads, "s_q": s_q, "deterministic": deterministic, "max_seq_len": 4096}
    batches = cases(heads, s_q, cache)
    of = {"impl": impl, "kv_cache_dtype": batches[0].kv_cache.dtype}
    plan = plan_mla_decode(batches[0].seq_lens, **shape, **of)
    for i, case in enumerate(batches):
        if cache == "fp8":
            case.options["kv_scale"] = torch.tensor([0.02], device="cuda")
        alone = plan_mla_decode(case.seq_lens, **shape, **of)
        want, want_lse = decode(case, query_of(case, form), alone, **options)
        plan.update(case.seq_lens)
        before = len(replays)
        got, lse = decode(case, query_of(case, form), plan, **options)
        assert len(replays) - before == (i > 0)
        assert torch.equal(got, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("requests", [4, 2])
def test_update_of_a_plan(deterministic, requests, replays):
    """Of a whole plan and of a narrowed one: as a plan that is made for these lengths."""
    lengths = [case.seq_lens[:requests] for case in cases(16, 1, "bf16")]
    shape = {"num_heads": 16, "s_q": 1, "deterministic": deterministic, "max_seq_len": 4096}
    plan = plan_mla_decode(torch.zeros(4, dtype=torch.int32, device="cuda"), **shape)
    plan = plan.narrow(requests)
    for i, seq_lens in enumerate(lengths):
        plan.update(seq_lens)
        assert len(replays) == i
        got, want = plan.device_plan, plan_mla_decode(seq_lens, **shape).device_plan
        assert torch.equal(got.parts[:, :6], want.parts[:, :6])  # two columns are never written
        assert torch.equal(got.requests, want.requests)
        assert torch.equal(got.outgrown, want.outgrown)
    for wrong, words in ((lengths[0].long(), "int32"), (lengths[0][:1], "seq_lens of shape")):
        with pytest.raises(ValueError, match=words):
            plan.update(wrong)
    assert len(replays) == len(lengths) - 1


@pytest.mark.parametrize(("heads", "s_q"), [(128, 1), (16, 4)])
@pytest.mark.parametrize("by_head", [False, True])
def test_rows_of_tokens(impl, heads, s_q, by_head, replays):
    """q [T, H, ...] as a layer has it; some parts have to be joined."""
    options = {"impl": impl, "num_heads": heads, "s_q": s_q, "max_seq_len": 4096}
    batches = cases(heads, s_q, "bf16")
    plan = plan_mla_decode(batches[0].seq_lens, **options)
    for i, case in enumerate(batches):
        want, want_lse = decode(case, case.q, plan_mla_decode(case.seq_lens, **options), impl=impl)
        latent, rope = case.q.flatten(0, 1).split([512, 64], -1)
        if by_head:
            latent = latent.transpose(0, 1).contiguous().transpose(0, 1)
        plan.update(case.seq_lens)
        before = len(replays)
        got, lse = mla_decode_tokens(
            (latent, rope), *case.args[1:], plan=plan, impl=impl, **case.options
        )
        assert len(replays) - before == (i > 0)
        assert torch.equal(got, want.flatten(0, 1)) and torch.equal(lse, want_lse.flatten(0, 1))


def test_what_changes_the_launch_is_recorded_anew(replays):
    """Of one plan: strides, alignment, table width, scales and modes."""
    case = cases(128, 1, "bf16")[0]
    plan = plan_mla_decode(case.seq_lens, num_heads=128, s_q=1)
    wide = torch.nn.functional.pad(case.block_table, (0, 5))
    odd = torch.empty(case.q.numel() + 1, dtype=case.q.dtype, device="cuda")[1:].view_as(case.q)
    odd.copy_(case.q)
    latent, rope = query_of(case, "by head")
    calls = [
        ({}, {}),
        ({"block_table": wide}, {}),
        ({"q": (latent, rope)}, {}),
        ({"q": (latent.contiguous(), rope)}, {}),
        ({"q": odd, "impl": "auto"}, {}),
        ({}, {"scale": 0.01}),
        ({}, {"rescale": "amla"}),
        ({"impl": "triton"}, {}),
    ]
    for n in range(2):
        for change, options in calls:
            args = {"q": case.q, "kv_cache": case.kv_cache, "block_table": case.block_table}
            call = args | {"seq_lens": case.seq_lens} | change
            out, lse = mla_decode(
                **call, **case.options | options, plan=plan, out=case.poisoned_out()
            )
            fresh = plan_mla_decode(case.seq_lens, num_heads=128, s_q=1)
            want, want_lse = mla_decode(**call, **case.options | options, plan=fresh)
            assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert len(replays) == n * len(calls)


def test_bad_arguments_after_a_good_call(replays):
    case = cases(128, 1, "bf16")[0]
    plan = plan_mla_decode(case.seq_lens, num_heads=128, s_q=1)
    call = {"q": case.q, "kv_cache": case.kv_cache, "block_table": case.block_table}
    call |= {"seq_lens": case.seq_lens, "plan": plan, **case.options}
    for _ in range(2):
        mla_decode(**call)
    before = len(replays)
    for bad, words in [
        ({"seq_lens": case.seq_lens[:3]}, "seq_lens of shape"),
        ({"seq_lens": case.seq_lens.cpu()}, "seq_lens on cuda"),
        ({"seq_lens": case.seq_lens.long()}, "int32"),
        ({"block_table": case.block_table.T.contiguous().T}, "contiguous last dimension"),
        ({"kv_cache": case.kv_cache.half()}, "one dtype"),
        ({"kv_lora_rank": 512.0}, "kv_lora_rank"),
        ({"scale": float("nan")}, "finite softmax scale"),
        ({"scale": [1.0]}, "finite softmax scale"),
        ({"kv_scale": 1.0}, "kv_scale=None"),
        ({"deterministic": True}, "deterministic=True"),
        ({"impl": "cuda"}, "Expected impl"),
        ({"rescale": []}, "Expected rescale"),
        ({"out": case.poisoned_out().float()}, "out.dtype"),
        ({"out": case.poisoned_out().requires_grad_()}, "out without requires_grad"),
    ]:
        with pytest.raises(ValueError, match=words):
            mla_decode(**call | bad)
    assert len(replays) == before


def test_a_profiler_sees_every_launch(replays):
    case = cases(128, 1, "bf16")[0]
    plan = plan_mla_decode(case.seq_lens, num_heads=128, s_q=1)
    for _ in range(2):
        decode(case, case.q, plan)
    names = []
    hook = lambda meta: names.append(meta.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        decode(case, case.q, plan)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(names) == 2 and names[1] == "merge_kernel"
    assert len(replays) == 1


@pytest.mark.parametrize("cache", CACHES)
def test_cache_write(cache, replays):
    """Any number of tokens is one kind; another stride is another."""
    dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}[cache]
    width = 656 if cache == "fp8_ds_mla" else 576
    scale = torch.tensor([0.5], device="cuda") if cache == "fp8" else None
    for i, (tokens, padded) in enumerate([(3, 4), (77, 80), (5, 5), (300, 300)]):
        pages = torch.zeros(8, 64, width, dtype=torch.uint8, device="cuda")
        pages = pages.to(dtype) if dtype != torch.uint8 else pages
        want = pages.clone()
        rows = torch.randn(padded, 576, device="cuda").bfloat16()
        latent, rope = rows[:, :512].contiguous(), rows[:, 512:]
        slots = torch.randperm(512, device="cuda")[:tokens]
        slots[tokens // 2] = -1
        write_kv_cache(latent, rope, pages, slots, kv_scale=scale)
        write_kv_cache_torch(latent, rope, want, slots, kv_scale=scale)
        assert torch.equal(pages.view(torch.uint8), want.view(torch.uint8))
        assert len(replays) == i
        write_kv_cache(latent, rope, pages, slots[:0], kv_scale=scale)
        with pytest.raises(ValueError, match="length of slot_mapping"):
            write_kv_cache(latent, rope, pages, slots.repeat(81), kv_scale=scale)
        with pytest.raises(ValueError, match="k_pe of shape"):
            write_kv_cache(latent, rope[1:], pages, slots, kv_scale=scale)
        assert torch.equal(pages.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens", [1, 20])
def test_sparse(heads, deterministic, tokens, replays):
    workspace = mla_sparse_workspace(tokens, heads, 512, device=torch.device("cuda"))
    for i in range(3):
        g = torch.Generator("cuda").manual_seed(i)
        q = torch.randn(tokens, heads, 576, generator=g, device="cuda").bfloat16()
        pages = torch.randn(16, 64, 576, generator=g, device="cuda").bfloat16()
        slots = torch.randint(0, 1024, (tokens, 512), generator=g, device="cuda").int()
        options = {"scale": 0.05, "deterministic": deterministic}
        out = q.new_full((tokens, heads, 512), torch.nan)
        replays.clear()
        got, lse = mla_sparse_attention(q, pages, slots, workspace=workspace, out=out, **options)
        assert len(replays) == (i > 0)
        want, want_lse = mla_sparse_attention(q, pages, slots, **options)
        assert torch.equal(got, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("ragged", [False, True])
def test_slots(ragged, replays):
    for i in range(3):
        g = torch.Generator("cuda").manual_seed(i)
        positions = torch.randint(-1, 200, (6, 100), generator=g, device="cuda").int()
        table = torch.randint(0, 50, (3, 4), generator=g, device="cuda").int()
        ids = torch.randint(-1, 3, (6,), generator=g, device="cuda").int() if ragged else None
        got = positions_to_slots(positions, table, request_ids=ids)
        assert len(replays) == i
        assert torch.equal(got, positions_to_slots(positions, table, request_ids=ids, impl="torch"))


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_indexer_cache_write(scale_format, replays):
    """Any number of tokens is one kind."""
    for i, (tokens, padded) in enumerate([(3, 4), (77, 80), (5, 5), (300, 300)]):
        pages = torch.zeros(8, 64, 132, dtype=torch.uint8, device="cuda")
        want = pages.clone()
        k = torch.randn(padded, 128, device="cuda").bfloat16()
        slots = torch.randperm(512, device="cuda")[:tokens]
        slots[tokens // 2] = -1
        write_indexer_cache(k, pages, slots, scale_format=scale_format)
        write_indexer_cache(k, want, slots, scale_format=scale_format, impl="torch")
        assert torch.equal(pages, want) and len(replays) == i
        write_indexer_cache(k, pages, slots[:0], scale_format=scale_format)
        with pytest.raises(ValueError, match="length of slot_mapping"):
            write_indexer_cache(k, pages, slots.repeat(81), scale_format=scale_format)
        assert torch.equal(pages, want)


@pytest.mark.parametrize("fp8_products", [None, False, True])  # None: the portable kernel
@pytest.mark.parametrize("requests", [[9, 4000, 70], [1] * 5 + [40000], [30000] * 200])
@pytest.mark.parametrize("values", [False, True])
def test_indexer_topk(values, requests, fp8_products, replays):
    """Rows of a prompt's end behind decoding ones: of few programs, of many and in turns."""
    if fp8_products is not None and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    how = {"impl": "triton"} if fp8_products is None else {"fp8_products": fp8_products}
    of, device = {"dtype": torch.int32, "device": "cuda"}, torch.device("cuda")
    B, new = len(requests), 3
    ids = torch.tensor([*range(B), *[B - 1] * new], **of)
    workspace = indexer_topk_workspace(len(ids), 640, device)
    for i in range(3):
        g = torch.Generator("cuda").manual_seed(i)
        seq_lens = torch.tensor(requests, **of) - i
        positions = seq_lens[ids.long()] - 1
        lengths = indexer_lengths(seq_lens, len(ids), positions=positions, request_ids=ids)
        q = torch.randn(len(ids), 64, 128, generator=g, device="cuda").to(torch.float8_e4m3fn)
        k = torch.randn(64 * 64, 128, generator=g, device="cuda").bfloat16()
        pages = torch.zeros(64, 64, 132, dtype=torch.uint8, device="cuda")
        write_indexer_cache(k, pages, torch.arange(len(k), device="cuda"))
        weights = torch.rand(len(ids), 64, generator=g, device="cuda")
        table = torch.randint(0, 64, (B, 640), generator=g, device="cuda").int()
        args = q, pages, weights, table, seq_lens, 2048
        named = {"request_ids": ids, "lengths": lengths, **how}
        out = torch.full((len(ids), 2048), -7, **of)
        got = torch.full((len(ids), 2048), torch.nan, device="cuda") if values else None
        replays.clear()
        indexer_topk(*args, out=out, values=got, workspace=workspace, **named)
        assert len(replays) == (i > 0)
        want = torch.empty_like(got) if values else None
        knobs.runtime.launch_enter_hook.add(ignore := lambda metadata: None)  # so all by Triton
        try:
            assert torch.equal(out, indexer_topk(*args, values=want, **named))
        finally:
            knobs.runtime.launch_enter_hook.remove(ignore)
        assert len(replays) == (i > 0) and (not values or torch.equal(got, want))
