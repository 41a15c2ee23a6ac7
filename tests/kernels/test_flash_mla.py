# SPDX-License-Identifier: Apache-2.0
"""mla_kernels.flash_mla keeps FlashMLA's conventions: shapes, layouts, infinities, refusals."""

import inspect

import pytest
import torch
from mla_kernels import flash_mla, mla_decode
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.metrics import SHORT_BAR, measure

LENGTHS = [130, 64, 0]


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

    monkeypatch.setattr(flash_mla, "plan_mla_decode", plan)
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
    args = (first.q, first.kv_cache.unsqueeze(2), first.block_table, first.seq_lens, 512, meta)
    for change in ({"causal": True}, {"indices": all_slots(first)}):
        with pytest.raises(ValueError, match="first used with"):
            flash_mla.flash_mla_with_kvcache(*args, **change)


def test_parameters_are_those_of_flash_mla():
    names = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    assert names[:10] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata",
        "num_splits", "softmax_scale", "causal", "is_fp8_kvcache",
    ]  # fmt: skip
    names = list(inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters)
    assert names[:7] == ["q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_k_cache": torch.zeros(1)}, "no extra_k_cache"),
        ({"attn_sink": torch.zeros(4)}, "with indices only"),
        ({"topk_length": torch.zeros(3)}, "with indices only"),
        ({"indices": torch.zeros(3, 1, 8, dtype=torch.int32), "causal": True}, "causal=False"),
        ({"indices": torch.zeros(3, 8, dtype=torch.int32)}, "indices of shape"),
        ({"indices": [1, 2]}, "indices to be a tensor, got list"),
        ({"out": torch.zeros(3, 1, 4, 500).bfloat16()}, r"out of shape \[3, 1, 4, 512\]"),
        ({"out": torch.zeros(3, 1, 512, 4).bfloat16().mT}, "contiguous out, got strides"),
        ({"softmax_scale": 0.0}, "softmax scale above 0, got 0.0"),
        ({"head_dim_v": None}, r"head_dim_v in 1\.\.575, got None"),
        ({"head_dim_v": 576}, r"head_dim_v in 1\.\.575, got 576"),
        ({"is_fp8_kvcache": True}, "k_cache.dtype"),
    ],
)
def test_what_is_not_supported_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        decode(decode_case(LENGTHS, num_heads=4), **options)


def test_a_refused_call_leaves_the_metadata_for_the_next():
    case, meta = decode_case(LENGTHS, num_heads=4), metadata()[0]
    args = (case.q, case.kv_cache.unsqueeze(2), case.block_table, case.seq_lens, 512, meta)
    with pytest.raises(ValueError, match="with indices only"):
        flash_mla.flash_mla_with_kvcache(*args, causal=True, topk_length=case.seq_lens)
    fewer = (*args[:3], case.seq_lens[:2], *args[4:])
    with pytest.raises(ValueError, match="seq_lens of shape"):
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
        ({"indices": torch.zeros(5, 1, 8).long()}, "indices.dtype in .*int32.*got torch.int64"),
        ({"indices": torch.zeros(4, 1, 8).int()}, r"indices of shape \[5, 1, topk\], got \[4"),
        ({"kv": torch.zeros(96, 576).bfloat16()}, r"kv of shape \[s_kv, 1, 576\], got \[96, 576\]"),
        ({"topk_length": torch.zeros(4).int()}, r"lengths of shape \[5\], got \[4\]"),
        ({"sm_scale": float("nan")}, "softmax scale above 0, got nan"),
    ],
)
def test_a_prefill_that_is_refused(change, message):
    call = {"q": torch.zeros(5, 4, 576).bfloat16(), "kv": torch.zeros(96, 1, 576).bfloat16()}
    call |= {"indices": torch.zeros(5, 1, 8).int(), "sm_scale": 0.1}
    with pytest.raises(ValueError, match=message):
        flash_mla.flash_mla_sparse_fwd(**call | change)


def test_foreign_metadata_is_refused():
    case = decode_case(LENGTHS, num_heads=4)
    args = (case.q, case.kv_cache.unsqueeze(2), case.block_table, case.seq_lens, 512)
    with pytest.raises(ValueError, match="get_mla_metadata, got Tensor"):
        flash_mla.flash_mla_with_kvcache(*args, torch.zeros(1))
    with pytest.raises(ValueError, match="num_splits=None"):
        flash_mla.flash_mla_with_kvcache(*args, metadata()[0], torch.zeros(1))
