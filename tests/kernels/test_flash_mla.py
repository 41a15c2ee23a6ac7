# SPDX-License-Identifier: Apache-2.0
"""mla_kernels.flash_mla keeps FlashMLA's conventions: shapes, layouts, infinities, refusals."""

import functools
import inspect
from pathlib import Path

import pytest
import torch
from mla_kernels import checks, flash_mla, mla_decode, plan_mla_decode
from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.flash_mla import decode as decoding
from mla_kernels.flash_mla import prefill
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse.hopper import support
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.metrics import SHORT_BAR, measure

LENGTHS = [130, 64, 0]
ROOT = Path(__file__).parents[2]


def metadata(*args):
    return flash_mla.get_mla_metadata(*args)


def decode(case, head_dim_v=512, **options):
    meta, num_splits = metadata()
    k_cache = case.kv_cache.unsqueeze(2)
    return flash_mla.flash_mla_with_kvcache(
        case.q, k_cache, case.block_table, case.seq_lens, head_dim_v, meta, num_splits, **options
    )


def all_slots(case, s_q=1):
    position = torch.arange(max(LENGTHS))
    page = case.block_table[:, position // 64]
    slots = torch.where(position < case.seq_lens[:, None], page * 64 + position % 64, -1).int()
    return slots[:, None].expand(-1, s_q, -1).contiguous()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_decode(causal):
    case = decode_case(LENGTHS, num_heads=4, s_q=2)
    out, lse = decode(case, softmax_scale=case.options["scale"], causal=causal)
    want, want_lse = mla_decode(*case.args, causal=causal, **case.options)
    assert torch.equal(out, want) and out.shape == (3, 2, 4, 512)
    assert lse.shape == (3, 4, 2) and torch.equal(lse[:2], want_lse[:2].transpose(1, 2))
    assert not out[2].any() and bool((lse[2] == torch.inf).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [8, 9, 19])
def test_as_many_new_tokens_as_a_kernel_takes_and_more(causal, s_q):
    """vLLM sends up to 128 in one call. Each token is as it would be alone. The second request has
    12 tokens in all, so that the first of 19 new ones see none."""
    case = decode_case([130, 12, 0, 64], num_heads=4)
    q = torch.randn(4, s_q, 4, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    meta, _ = metadata()
    args = (q, case.kv_cache.unsqueeze(2), case.block_table, case.seq_lens, 512, meta)
    poisoned = torch.full((4, s_q, 4, 512), torch.nan).bfloat16()
    out, lse = flash_mla.flash_mla_with_kvcache(*args, softmax_scale=0.1, causal=causal)
    again, _ = flash_mla.flash_mla_with_kvcache(
        *args, softmax_scale=0.1, causal=causal, out=poisoned
    )
    assert again is poisoned and torch.equal(again, out)
    assert out.shape == (4, s_q, 4, 512) and lse.shape == (4, 4, s_q)
    for t in range(s_q):
        seen = (case.seq_lens - (s_q - 1 - t) * causal).clamp(min=0)
        want, want_lse = mla_decode(
            q[:, t : t + 1], case.kv_cache, case.block_table, seen, scale=0.1, kv_lora_rank=512
        )
        assert SHORT_BAR.failures(measure(out[:, t], want[:, 0])) == []
        some = seen > 0
        torch.testing.assert_close(lse[some, :, t], want_lse[some, 0], atol=4e-3, rtol=0)
        assert not out[~some, t].any() and bool((lse[~some, :, t] == torch.inf).all())


def test_parts_of_many_new_tokens_share_the_memory_for_partial_results(monkeypatch):
    """Sixteen parts of 128 new tokens of 128 heads would hold 470 MB on an H200."""
    for function in (plan_mla_decode, mla_decode):
        by_triton = functools.partial(function, impl="triton")
        monkeypatch.setattr(decoding, function.__name__, by_triton)
    case = decode_case([130, 12], num_heads=1, s_q=17, dims=MlaDims(256, 32))
    k_cache, (meta, _) = case.kv_cache.unsqueeze(2), metadata()
    args = case.q, k_cache, case.block_table, case.seq_lens, 256, meta
    out, _ = flash_mla.flash_mla_with_kvcache(*args, causal=True)
    first, *others = (plan.device_plan for plan in meta.plans)
    assert len(others) == 2
    assert all(x.acc.data_ptr() == first.acc.data_ptr() for x in others)
    monkeypatch.undo()
    meta, _ = metadata()
    want, _ = flash_mla.flash_mla_with_kvcache(*args[:-1], meta, causal=True)
    assert SHORT_BAR.failures(measure(out, want)) == []


def test_parts_of_many_new_tokens_are_for_the_kernel_that_the_plan_is_for(monkeypatch):
    contiguous = []

    def spy(q, *args, **options):
        contiguous.append(q.is_contiguous())
        return mla_decode(q, *args, **options)

    monkeypatch.setattr(decoding, "mla_decode", spy)
    decode(decode_case([130, 64], num_heads=4, s_q=17))
    assert contiguous == [True] * 3


def test_the_default_scale_is_that_of_the_cached_head():
    case = decode_case(LENGTHS, num_heads=4)
    assert torch.equal(decode(case)[0], decode(case, softmax_scale=576**-0.5)[0])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("view", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_sparse_decode_over_all_tokens_is_dense_decode(fp8, view):
    case = decode_case(LENGTHS, num_heads=4, s_q=2, cache_dtype=torch.uint8 if fp8 else None)
    k_cache = case.kv_cache.unsqueeze(2)
    k_cache = k_cache.view(view) if fp8 else k_cache
    args = (case.q, k_cache, None, None, 512)
    out, lse = flash_mla.flash_mla_with_kvcache(
        *args, metadata()[0], indices=all_slots(case, 2), is_fp8_kvcache=fp8
    )
    want, want_lse = decode(case, is_fp8_kvcache=fp8)
    assert SHORT_BAR.failures(measure(out, want)) == []
    torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=0)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [1, 8, 48, 96, 192, 256])
def test_sparse_decode_of_any_block_size(block_size, fp8, monkeypatch):
    """Indices number rows, so adjacent blocks are seen as others, without a copy."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, 4, 576, generator=g).bfloat16()
    cache = torch.randn(12 * 64, 576, generator=g).bfloat16()
    if fp8:
        cache = encode_rows(cache[:, :512], cache[:, 512:], torch.uint8, None)
    cache = cache.view(12, 64, -1)
    padded = torch.zeros(12, 64, cache.shape[2] + 16, dtype=cache.dtype)
    indices = torch.randint(0, 12 * 64, (3, 1, 40), generator=g, dtype=torch.int32)
    indices[0, 0, :2] = torch.tensor([12 * 64, -1])
    inner, seen = decoding.mla_sparse_attention, []

    def spy(q, kv_cache, *args, **options):
        seen.append(kv_cache.data_ptr())
        return inner(q, kv_cache, *args, **options)

    monkeypatch.setattr(decoding, "mla_sparse_attention", spy)

    def run(cache):
        return flash_mla.flash_mla_with_kvcache(
            q, cache.unsqueeze(2), None, None, 512, metadata()[0], indices=indices,
            is_fp8_kvcache=fp8,
        )  # fmt: skip

    want, want_lse = run(cache)
    padded[..., : cache.shape[2]] = cache
    for rows in (cache, padded):  # rows with a gap behind each, too
        other = rows.view(-1, block_size, rows.shape[2])[..., : cache.shape[2]]
        out, lse = run(other)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert seen[-1] == rows.data_ptr()


@pytest.mark.parametrize("many", [False, True])
def test_sparse_decode_of_blocks_that_are_adjacent_whatever_their_strides(many):
    """A single block has no next one, and blocks of one row no next row."""
    g = torch.Generator().manual_seed(0)
    q, cache = torch.randn(2, 1, 4, 576, generator=g), torch.randn(2, 96, 1, 576, generator=g)
    q, cache = q.bfloat16(), cache.bfloat16()
    blocks = cache[0, ::2, None] if many else cache[:1, :48]  # [48, 1, 1, 576] or [1, 48, 1, 576]
    indices = torch.randint(0, 48, (2, 1, 40), generator=g, dtype=torch.int32)
    args = (None, None, 512)
    out, _ = flash_mla.flash_mla_with_kvcache(q, blocks, *args, metadata()[0], indices=indices)
    plain = blocks.reshape(3, 16, 1, 576).clone()
    want, _ = flash_mla.flash_mla_with_kvcache(q, plain, *args, metadata()[0], indices=indices)
    assert torch.equal(out, want)


def test_topk_length_is_per_request_and_sink_scales_the_output():
    case = decode_case(LENGTHS, num_heads=4, s_q=2)
    args = (case.q, case.kv_cache.unsqueeze(2), None, None, 512)
    indices = all_slots(case, 2)
    run = flash_mla.flash_mla_with_kvcache
    length = torch.tensor([7, 0, 3], dtype=torch.int32)
    out, lse = run(*args, metadata()[0], indices=indices, topk_length=length)
    want, want_lse = run(*args, metadata()[0], indices=indices[..., :7].contiguous())
    assert torch.equal(out[0], want[0]) and torch.equal(lse[0], want_lse[0])
    assert not out[1].any() and bool((lse[1] == torch.inf).all())
    sink = torch.tensor([0.3, 3.0, torch.inf, -torch.inf])
    scaled, same = run(*args, metadata()[0], indices=indices, topk_length=length, attn_sink=sink)
    assert torch.equal(same, lse)
    factor = 1 / (1 + torch.exp(sink[:, None] - lse[0].double()))
    assert SHORT_BAR.failures(measure(scaled[0], out[0] * factor.T[..., None])) == []


@pytest.mark.parametrize("s_kv", [96, 101])
def test_sparse_prefill(s_kv):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(5, 4, 576, generator=g).bfloat16()
    kv = torch.randn(s_kv, 1, 576, generator=g).bfloat16()
    indices = torch.randint(-1, s_kv + 3, (5, 1, 40), generator=g, dtype=torch.int32)
    indices[3] = s_kv + 5
    indices[0, 0, :4] = torch.tensor([s_kv, s_kv + 2, -1, -7])  # just outside, on both sides
    length = torch.tensor([40, 9, 1, 40, 0], dtype=torch.int32)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, topk_length=length)
    for t, n in enumerate(length.tolist()):
        mine = indices[t, 0, :n].long()
        keys = kv[mine[(mine >= 0) & (mine < s_kv)], 0].double()
        if len(keys) == 0:
            assert not out[t].any()
            assert bool((lse[t] == torch.inf).all() and (max_logits[t] == -torch.inf).all())
            continue
        scores = q[t].double() @ keys.T * 0.1
        assert SHORT_BAR.failures(measure(out[t], scores.softmax(-1) @ keys[:, :512])) == []
        torch.testing.assert_close(lse[t].double(), scores.logsumexp(-1), atol=4e-3, rtol=0)
        torch.testing.assert_close(max_logits[t].double(), scores.amax(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_plan_is_for_what_will_run(dtype, fp8, monkeypatch):
    seen = {}

    def plan(seq_lens, **arguments):
        seen.update(arguments)

    monkeypatch.setattr(decoding, "plan_mla_decode", plan)
    case = decode_case(
        LENGTHS, num_heads=4, s_q=2, dtype=dtype, cache_dtype=torch.uint8 if fp8 else None
    )
    decode(case, is_fp8_kvcache=fp8)
    cache = torch.uint8 if fp8 else dtype
    assert seen == {
        "num_heads": 4,
        "s_q": 2,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "dtype": dtype,
        "kv_cache_dtype": cache,
        "block_size": 64,
        "lender": None,
    }


def test_output_buffers_are_written_in_place():
    case = decode_case(LENGTHS, num_heads=4)
    out = case.poisoned_out()
    assert decode(case, out=out)[0] is out and bool(torch.isfinite(out).all())
    sparse = case.poisoned_out()
    args = (case.q, case.kv_cache.unsqueeze(2), None, None, 512)
    flash_mla.flash_mla_with_kvcache(*args, metadata()[0], indices=all_slots(case), out=sparse)
    assert SHORT_BAR.failures(measure(sparse, out)) == []


def test_metadata_takes_the_old_arguments_and_remembers_the_shapes():
    meta, none = metadata(torch.zeros(3, dtype=torch.int32), 4, 1)
    assert none is None
    first, second = decode_case(LENGTHS, num_heads=4), decode_case(LENGTHS, num_heads=8)
    for case, ok in ((first, True), (first, True), (second, False)):
        args = (case.q, case.kv_cache.unsqueeze(2), case.block_table, case.seq_lens, 512, meta)
        if ok:
            flash_mla.flash_mla_with_kvcache(*args)
        else:
            with pytest.raises(ValueError, match="first used with"):
                flash_mla.flash_mla_with_kvcache(*args)
    args = (first.q, first.kv_cache.unsqueeze(2), first.block_table, first.seq_lens)
    for change in ({"causal": True}, {"indices": all_slots(first)}, {"head_dim_v": 500}):
        with pytest.raises(ValueError, match="first used with"):
            more = {"head_dim_v": 512, "tile_scheduler_metadata": meta, **change}
            flash_mla.flash_mla_with_kvcache(*args, **more)


def test_parameters_are_those_of_flash_mla():
    names = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    assert names[:10] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata",
        "num_splits", "softmax_scale", "causal", "is_fp8_kvcache",
    ]  # fmt: skip
    names = list(inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters)
    assert names[:8] == [
        "q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "indexer_topk",
    ]  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch):
    """What is refused here has not reached an op, which would name its own arguments."""

    def reached(*args, **options):
        raise AssertionError("an op was called")

    for name in ("mla_decode", "plan_mla_decode", "mla_sparse_attention"):
        monkeypatch.setattr(decoding, name, reached)
    monkeypatch.setattr(prefill, "mla_sparse_attention", reached)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_k_cache": torch.zeros(1)}, "no extra_k_cache .*got Tensor"),
        ({"extra_topk_length": torch.zeros(1)}, "no extra_topk_length .*got Tensor"),
        ({"attn_sink": torch.zeros(4)}, "attn_sink with indices only"),
        ({"topk_length": torch.zeros(3)}, "topk_length with indices only"),
        ({"cache_seqlens": None}, "cache_seqlens where there are no indices, got None"),
        ({"block_table": None}, "block_table where there are no indices, got None"),
        ({"cache_seqlens": torch.zeros(2).int()}, r"cache_seqlens of shape \[3\], got \[2\]"),
        ({"cache_seqlens": torch.zeros(3).long()}, r"cache_seqlens.dtype in .*got torch.int64"),
        ({"cache_seqlens": [1, 2, 3]}, "cache_seqlens to be a tensor, got list"),
        ({"cache_seqlens": torch.zeros(6).int()[::2]}, "cache_seqlens with a contiguous"),
        ({"cache_seqlens": torch.tensor([1, 999, 0]).int()}, r"cache_seqlens\[1\] in 0.*got 999"),
        ({"cache_seqlens": torch.zeros(3, device="meta").int()}, "cache_seqlens on cpu.*got meta"),
        ({"block_table": torch.zeros(3, 4)}, "block_table.dtype in .*got torch.float32"),
        ({"block_table": torch.full((3, 4), 77).int()}, r"got 77 .*\(cache_seqlens\[0\] = 130\)"),
        ({"q": torch.zeros(3, 4, 576).bfloat16()}, r"q of shape \[B, s_q, H, Dk\], got"),
        ({"q": torch.zeros(3, 1, 4, 576).to(torch.float8_e4m3fn)}, "q.dtype in .*got .*e4m3fn"),
        (
            {"q": torch.zeros(3, 1, 129, 576).bfloat16()},
            r"heads \(q.shape\[2\]\) in 1..128, got 129",
        ),
        ({"q": torch.zeros(3, 0, 4, 576).bfloat16()}, r"s_q \(q.shape\[1\]\) in 1.*, got 0"),
        ({"k_cache": torch.zeros(4, 8, 1, 576).bfloat16()}, r"k_cache.shape\[1\]\) in .*got 8"),
        ({"k_cache": torch.zeros(4, 64, 1, 512).bfloat16()}, r"k_cache of shape .* 1, 576\], got"),
        ({"k_cache": torch.zeros(4, 64, 576).bfloat16()}, r"k_cache of shape .* 1, 576\], got"),
        ({"k_cache": torch.zeros(4, 64, 1, 576)}, "k_cache.dtype in .*bfloat16.*got torch.float32"),
        ({"k_cache": torch.zeros(4, 64, 1, 1152).bfloat16()[..., ::2]}, "k_cache with a contig"),
        ({"k_cache": torch.zeros(4, 64, 1, 576, device="meta").bfloat16()}, "k_cache on cpu.*meta"),
        ({"out": [0.0]}, "out to be a tensor, got list"),
        ({"out": torch.zeros(3, 1, 4, 500).bfloat16()}, r"out of shape \[3, 1, 4, 512\]"),
        ({"out": torch.zeros(3, 1, 512, 4).bfloat16().mT}, "contiguous out, got strides"),
        ({"out": torch.zeros(3, 1, 4, 512)}, "out.dtype in .*bfloat16.*got torch.float32"),
        ({"out": torch.zeros(3, 1, 4, 512).bfloat16().requires_grad_()}, "out without requires_gr"),
        ({"softmax_scale": 0.0}, "softmax_scale above 0, got 0.0"),
        ({"head_dim_v": None}, r"head_dim_v in 1\.\.575, got None"),
        ({"head_dim_v": 576}, r"head_dim_v in 1\.\.575, got 576"),
        ({"is_fp8_kvcache": True}, "k_cache.dtype"),
        (
            {"is_fp8_kvcache": True, "k_cache": torch.zeros(4, 64, 1, 584).byte()},
            r"k_cache of shape \[num_blocks, block_size, 1, 656\], got .*584",
        ),
        (
            {
                "is_fp8_kvcache": True,
                "head_dim_v": 500,
                "k_cache": torch.zeros(4, 64, 1, 656).byte(),
            },
            "head_dim_v to be a multiple of 128 .*got 500",
        ),
    ],
)
def test_what_is_not_supported_is_refused(options, message, nothing_runs):
    case = decode_case(LENGTHS, num_heads=4)
    call = {"q": case.q, "k_cache": case.kv_cache.unsqueeze(2), "block_table": case.block_table}
    call |= {"cache_seqlens": case.seq_lens, "head_dim_v": 512}
    with pytest.raises(ValueError, match=message):
        flash_mla.flash_mla_with_kvcache(
            **call | options, tile_scheduler_metadata=flash_mla.FlashMLASchedMeta()
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, "causal=False with indices, got True"),
        ({"indices": torch.zeros(3, 8).int()}, r"indices of shape \[3, 1, topk\], got \[3, 8\]"),
        ({"indices": [1, 2]}, "indices to be a tensor, got list"),
        ({"indices": torch.zeros(3, 1, 8).long()}, "indices.dtype in .*got torch.int64"),
        ({"indices": torch.zeros(3, 1, 8).int()[..., ::2]}, "indices with a contiguous last"),
        ({"topk_length": torch.zeros(4).int()}, r"topk_length of shape \[3\], got \[4\]"),
        ({"topk_length": torch.zeros(3)}, "topk_length.dtype in .*got torch.float32"),
        ({"topk_length": 5}, "topk_length to be a tensor, got int"),
        ({"topk_length": torch.zeros(3, device="meta").int()}, "topk_length on cpu.*got meta"),
        ({"attn_sink": torch.zeros(3)}, r"attn_sink of shape \[4\], got \[3\]"),
        (
            {"k_cache": torch.zeros(4, 64, 1, 576).bfloat16()[:, :48]},
            r"k_cache.shape\[1\]\) in .* one behind the other .*got 4 blocks of 48 with strides",
        ),
        ({"k_cache": torch.zeros(5, 5, 1, 576).bfloat16()}, "multiple of 16 rows .*got 5 blocks"),
        ({"attn_sink": torch.zeros(4).bfloat16()}, "attn_sink.dtype in .*got torch.bfloat16"),
        ({"attn_sink": torch.zeros(8)[::2]}, "attn_sink with a contiguous last dimension"),
        ({"softmax_scale": torch.ones(1)}, "softmax_scale above 0, got tensor"),
        ({"causal": torch.zeros(2)}, r"causal in \[True, False\], got tensor"),
        ({"is_fp8_kvcache": "no"}, r"is_fp8_kvcache in \[True, False\], got 'no'"),
        ({"out": torch.zeros(3, 1, 4, 512).half()}, "out.dtype in .*bfloat16.*got torch.float16"),
    ],
)
def test_a_sparse_decode_that_is_refused(options, message, nothing_runs):
    case = decode_case(LENGTHS, num_heads=4)
    options = {"indices": torch.zeros(3, 1, 8).int()} | options
    k_cache = options.pop("k_cache", case.kv_cache.unsqueeze(2))
    args = (case.q, k_cache, None, None, 512, metadata()[0])
    with pytest.raises(ValueError, match=message):
        flash_mla.flash_mla_with_kvcache(*args, **options)


def test_a_refused_call_leaves_the_metadata_for_the_next():
    case, meta = decode_case(LENGTHS, num_heads=4), metadata()[0]
    args = (case.q, case.kv_cache.unsqueeze(2), case.block_table, case.seq_lens, 512, meta)
    with pytest.raises(ValueError, match="with indices only"):
        flash_mla.flash_mla_with_kvcache(*args, causal=True, topk_length=case.seq_lens)
    fewer = (*args[:3], case.seq_lens[:2], *args[4:])
    for _ in range(2):  # before a call that was checked and went well, and after it
        with pytest.raises(ValueError, match="cache_seqlens of shape"):
            flash_mla.flash_mla_with_kvcache(*fewer)
        flash_mla.flash_mla_with_kvcache(*args)


@pytest.mark.parametrize("lengths", [LENGTHS, []])
def test_an_empty_batch(lengths):
    case = decode_case(LENGTHS, num_heads=4)
    n = len(lengths)
    args = (case.q[:n], case.kv_cache.unsqueeze(2), case.block_table[:n], case.seq_lens[:n], 512)
    out, lse = flash_mla.flash_mla_with_kvcache(*args, metadata()[0])
    assert out.shape == (n, 1, 4, 512) and lse.shape == (n, 4, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(0, 1, 576).bfloat16()}, r"s_kv \(kv.shape\[0\]\) in 1.*got 0"),
        ({"kv": None}, "kv to be a tensor, got NoneType"),
        ({"indices": None}, "indices to be a tensor, got NoneType"),
        ({"indices": torch.zeros(5, 1, 8).long()}, "indices.dtype in .*int32.*got torch.int64"),
        ({"indices": torch.zeros(4, 1, 8).int()}, r"indices of shape \[5, 1, topk\], got \[4"),
        ({"kv": torch.zeros(96, 576).bfloat16()}, r"kv of shape \[s_kv, 1, 576\], got \[96, 576\]"),
        ({"topk_length": torch.zeros(4).int()}, r"topk_length of shape \[5\], got \[4\]"),
        ({"topk_length": torch.zeros(5)}, "topk_length.dtype in .*got torch.float32"),
        ({"attn_sink": torch.zeros(5)}, r"attn_sink of shape \[4\], got \[5\]"),
        ({"attn_sink": torch.zeros(4).half()}, "attn_sink.dtype in .*got torch.float16"),
        ({"sm_scale": float("nan")}, "finite sm_scale above 0, got nan"),
        ({"kv": torch.zeros(96, 1, 576)}, "kv.dtype in .*bfloat16.*got torch.float32"),
        ({"kv": torch.zeros(96, 1, 576, device="meta").bfloat16()}, "kv on cpu.*got meta"),
        ({"kv": torch.zeros(96, 1, 1152).bfloat16()[..., ::2]}, "kv with a contiguous last"),
        ({"q": torch.zeros(5, 129, 576).bfloat16()}, r"heads \(q.shape\[1\]\) in 1..128, got 129"),
        ({"q": torch.zeros(5, 4, 576).int()}, "q.dtype in .*got torch.int32"),
        ({"d_v": 576}, r"d_v in 1..575, got 576"),
        ({"out": torch.zeros(5, 4, 512)}, "out.dtype in .*bfloat16.*got torch.float32"),
        ({"out": torch.zeros(5, 4, 511).bfloat16()}, r"out of shape \[5, 4, 512\], got"),
        ({"indexer_topk": 512}, r"indexer_topk=0 \(no other is supported\), got 512"),
        ({"indexer_topk": torch.zeros(5, 4, 512)}, r"got tensor \[5, 4, 512\]: out goes by name"),
    ],
)
def test_a_prefill_that_is_refused(change, message, nothing_runs):
    call = {"q": torch.zeros(5, 4, 576).bfloat16(), "kv": torch.zeros(96, 1, 576).bfloat16()}
    call |= {"indices": torch.zeros(5, 1, 8).int(), "sm_scale": 0.1}
    with pytest.raises(ValueError, match=message):
        flash_mla.flash_mla_sparse_fwd(**call | change)


@pytest.mark.parametrize("none", [0, None])
def test_a_prefill_without_the_sums_of_an_indexer(none):
    q, kv = torch.ones(2, 4, 576).bfloat16(), torch.ones(16, 1, 576).bfloat16()
    results = flash_mla.flash_mla_sparse_fwd(
        q, kv, torch.zeros(2, 1, 8).int(), 0.1, indexer_topk=none
    )
    assert len(results) == 3 and bool((results[0] == 1).all())


def test_foreign_metadata_is_refused():
    case = decode_case(LENGTHS, num_heads=4)
    args = (case.q, case.kv_cache.unsqueeze(2), case.block_table, case.seq_lens, 512)
    with pytest.raises(ValueError, match="get_mla_metadata, got Tensor"):
        flash_mla.flash_mla_with_kvcache(*args, torch.zeros(1))
    with pytest.raises(ValueError, match="num_splits=None"):
        flash_mla.flash_mla_with_kvcache(*args, metadata()[0], torch.zeros(1))


def test_the_prefill_asks_for_largest_logits_of_a_batch_that_the_hopper_kernel_takes(monkeypatch):
    seen = {}

    def spy(q, kv_cache, slots, **options):
        seen.update(options, kv_cache=kv_cache)
        return q[..., :512], q.new_zeros(q.shape[:2], dtype=torch.float32)

    monkeypatch.setattr(prefill, "mla_sparse_attention", spy)
    q, kv = torch.zeros(2, 4, 576).bfloat16(), torch.zeros(16, 1, 576).bfloat16()
    _, max_logits, _ = flash_mla.flash_mla_sparse_fwd(q, kv, torch.zeros(2, 1, 8).int(), 0.1)
    assert seen["max_logits"] is max_logits
    aligned = checks.rows_aligned(seen["kv_cache"])
    assert support.refusal(MlaDims(), q.dtype, kv.dtype, q.is_contiguous(), aligned) is None


def test_the_documented_times_of_the_prefill_are_the_measured_ones():
    text = " ".join((ROOT / "docs/flash_mla.md").read_text().split())
    page = (ROOT / "benchmarks/results/h200/sparse.md").read_text()
    names = next(line for line in page.splitlines() if line.startswith("| case | floor"))
    drop_in, peer = (names.split("|").index(f" {name} ") for name in ("drop-in", "FlashMLA"))
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| prefill_")]
    ratios = [float(row[peer]) / float(row[drop_in]) for row in rows]
    assert len(ratios) == 3
    assert f"`flash_mla_sparse_fwd` has {min(ratios):.2f} to {max(ratios):.2f} in a prefill" in text


def test_functions_of_flash_mla_that_are_not_here_are_named():
    """The README claims FlashMLA's names but for these."""
    assert not any(name.startswith("flash_attn_varlen") for name in dir(flash_mla))
    assert "package, without `flash_attn_varlen_*`" in (ROOT / "README.md").read_text()
