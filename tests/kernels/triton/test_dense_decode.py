# SPDX-License-Identifier: Apache-2.0
"""The portable decode kernel: every branch against the definition, exact cases to the bit."""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from mla_kernels import mla_decode, plan_mla_decode
from mla_kernels.arch import ARCHS
from mla_kernels.decode.plan.api import MlaDecodePlan
from mla_kernels.decode.plan.kernel import PLAN_TILE
from mla_kernels.decode.plan.launcher import build_plan
from mla_kernels.decode.triton import launcher
from mla_kernels.decode.triton import parts as portable_parts
from mla_kernels.decode.triton.specs import ALIGNMENTS
from mla_kernels.decode.triton.support import DIMS
from mla_kernels.decode.triton.tiles import choose_tile, tile_rows
from mla_kernels.layouts import MlaDims
from mla_kernels.testing.cases import decode_case, random_tokens
from mla_kernels.testing.decoded import assert_decoded
from mla_kernels.testing.structured import integer_ramp, uniform_weights
from mla_kernels.testing.unaligned import unaligned
from mla_kernels.triton_common.alignment import row_alignment
from mla_kernels.triton_common.formats import scale_argument

LENGTHS = [0, 1, 63, 64, 65, 200, 0, 130]
RESCALES = ["pow2", "amla", "flash"]
# The reference rounds code times kv_scale, which the kernels for few rows do not: of a power of two
# there is nothing to round, so that the bars hold all of the kernels' own errors.
CACHES = {
    "bf16": {},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "kv_scale": 2.0**-6},
    "fp8_ds_mla": {"cache_dtype": torch.uint8},
}


def decode(case, parts=None, **options):
    """Over a poisoned workspace, cut into `parts`."""
    if parts is not None:
        B, s_q, H, _ = case.q.shape
        deterministic = options.get("deterministic", False)
        rank = case.options["kv_lora_rank"]
        device_plan = build_plan(
            case.seq_lens,
            num_heads=H,
            s_q=s_q,
            kv_lora_rank=rank,
            deterministic=deterministic,
            num_parts=parts,
        )
        device_plan.acc.fill_(torch.nan)
        device_plan.sums.fill_(torch.nan)
        options["plan"] = MlaDecodePlan(B, s_q, H, rank, deterministic, case.q.device, device_plan)
    return mla_decode(*case.args, **case.options, **options, impl="triton", out=case.poisoned_out())


def check(case, parts=None, **options):
    out, lse = decode(case, parts, **options)
    assert_decoded(case, out, lse, causal=options.get("causal", True))


@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize(("heads", "s_q"), [(1, 1), (6, 3), (16, 1), (12, 2), (8, 4), (33, 2)])
def test_ragged_batches(device, heads, s_q, parts):
    case = decode_case(LENGTHS, num_heads=heads, s_q=s_q, q_std=0.5, device=device)
    check(case, parts)


def test_many_heads(device):
    check(decode_case([70, 0, 129], num_heads=128, q_std=0.5, device=device), 3)


def test_every_new_token_sees_all_without_causal(device):
    check(decode_case([3, 66], num_heads=4, s_q=4, q_std=0.5, device=device), causal=False)


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("heads", [16, 32, 48])
def test_rescale_variants(device, rescale, heads):
    case = decode_case([300, 1, 90], num_heads=heads, k_std=2.0, device=device)
    check(case, 3, rescale=rescale)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rescale", RESCALES)
def test_nan_in_a_query_shows_in_its_row_alone(device, rescale, parts):
    """In lse too: minus infinity would say that the row sees no token."""
    case = decode_case([70, 300], num_heads=4, device=device)
    case.q[0, 0, 1, 3] = torch.nan
    out, lse = decode(case, parts, rescale=rescale)
    assert lse.isnan().nonzero().tolist() == [[0, 0, 1]]
    assert torch.equal(out.isnan(), lse.isnan()[..., None].expand_as(out))


@pytest.mark.parametrize("column", [3, 570])
@pytest.mark.parametrize("heads", [16, 64])
def test_what_is_no_number_or_huge_leaves_the_other_rows_their_digits(device, heads, column):
    """Queries are fp16 beside fp8 caches, over a power of two that a tile's rows share."""
    case = decode_case(
        [70, 300], num_heads=heads, cache_dtype=torch.float8_e4m3fn, kv_scale=1.0, device=device
    )
    want, want_lse = decode(case)
    for number in (torch.inf, -torch.inf, torch.nan):
        case.q[0, 0, 1, column] = number
        out, lse = decode(case)
        assert lse.isnan().nonzero().tolist() == [[0, 0, 1]]
        assert torch.equal(out.isnan(), lse.isnan()[..., None].expand_as(out))
        others = torch.arange(heads, device=device) != 1
        assert torch.equal(out[0, 0, others], want[0, 0, others])
        assert torch.equal(lse[0, 0, others], want_lse[0, 0, others])
    # Of what is far above all others these have nothing left, but the row itself its weights.
    case.q[0, 0, 1] = 0
    case.q[0, 0, 1, column] = 2.5e38
    case.options["scale"] = 2.0**-126
    case.kv_cache.copy_(case.kv_cache.float().sign().to(case.kv_cache.dtype))
    out, lse = decode(case)
    want, want_lse = mla_decode(*case.args, **case.options, impl="reference")
    assert lse[0, 0, 1].item() == pytest.approx(want_lse[0, 0, 1].item(), abs=2e-2)
    assert (out[0, 0, 1] - want[0, 0, 1]).float().norm() < 1e-2 * want[0, 0, 1].float().norm()


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("heads", [16, 24, 64])
@pytest.mark.parametrize("cache", CACHES)
def test_tiles_of_other_gpus(monkeypatch, cache, heads, s_q, rescale):
    """Those of sm_80: the interpreter, which runs any, gets those of sm_90 in all other tests."""
    if torch.cuda.is_available():
        pytest.skip("a GPU takes its own tiles")
    for module in (launcher, portable_parts):
        monkeypatch.setattr(module, "arch_of", lambda device: ARCHS[80])
    case = decode_case([70, 0, 33], num_heads=heads, s_q=s_q, q_std=0.5, **CACHES[cache])
    check(case, 2, rescale=rescale)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("cache", CACHES)
def test_dims_and_caches(device, cache, heads, dims):
    """fp8_ds_mla rows too: layouts.py describes them for any multiple of its group."""
    case = decode_case([5, 130, 0], num_heads=heads, dims=dims, device=device, **CACHES[cache])
    check(case, 2)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_dtypes_dims_and_block_sizes(device, dims, dtype, block_size):
    case = decode_case([5, 300], dims=dims, dtype=dtype, block_size=block_size, device=device)
    check(case, 2)


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("kv_scale", [0.02, torch.tensor([0.02])])
def test_fp8_cache(device, heads, kv_scale):
    case = decode_case(
        [5, 130, 0],
        num_heads=heads,
        cache_dtype=torch.float8_e4m3fn,
        kv_scale=0.02,
        device=device,
    )
    if isinstance(kv_scale, torch.Tensor):
        case.options["kv_scale"] = kv_scale.to(device)
    check(case, 2)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
@pytest.mark.parametrize("number", [Fraction, np.float32, int])
def test_scales_of_any_type_of_number(device, impl, number):
    """As they are to Triton: a float is."""
    fp8 = {"cache_dtype": torch.float8_e4m3fn, "kv_scale": 1.0, "scale": 1.0}
    case = decode_case([70], q_std=0.03, device=device, **fp8)
    want = mla_decode(*case.args, **case.options, impl=impl)
    scales = {"scale": number(1), "kv_scale": number(1)}
    got = mla_decode(*case.args, **case.options | scales, impl=impl)
    assert all(map(torch.equal, got, want))
    assert type(scale_argument(number(1))) is float


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_scale_is_multiplied_in_the_precision_of_a_float(device, impl):
    """In fp16 the product with log2(e) is off by up to 2^-11, or infinite."""
    case = decode_case([70], num_heads=4, device=device)
    for scale in (np.float16(0.1), np.float16(60000.0)):
        case.options["scale"] = scale
        got = mla_decode(*case.args, **case.options, impl=impl)
        case.options["scale"] = float(scale)
        want = mla_decode(*case.args, **case.options, impl=impl)
        assert all(map(torch.equal, got, want))


def test_sizes_that_are_integers_of_numpy(device):
    case = decode_case([70], device=device)
    want = mla_decode(*case.args, **case.options, impl="triton")
    sizes = {"num_heads": np.int64(16), "s_q": np.int64(1), "kv_lora_rank": np.int64(512)}
    plan = plan_mla_decode(case.seq_lens, **sizes, impl="triton")
    assert type(plan.device_plan.rows) is type(plan.device_plan.kv_lora_rank) is int
    options = case.options | {"kv_lora_rank": np.int64(512), "impl": "triton", "plan": plan}
    assert all(map(torch.equal, mla_decode(*case.args, **options), want))
    # They are sizes like others where shapes are checked, not names of free ones.
    for out in (case.q.new_empty(2, 1, 16, 512), case.q.new_empty(1, 1, 16, 256)):
        with pytest.raises(ValueError, match="out of shape"):
            mla_decode(*case.args, **options, out=out)
    with pytest.raises(ValueError, match="kv_cache of shape"):
        wide = torch.nn.functional.pad(case.kv_cache, (0, 64))
        mla_decode(case.q, wide, *case.args[2:], **options)


@pytest.mark.parametrize("size", [1e-20, 1e4])
def test_fp8_dots_take_queries_of_any_size(device, size):
    """They are in fp16, which holds neither."""
    case = decode_case(
        [130], cache_dtype=torch.float8_e4m3fn, kv_scale=2.0**-6, q_std=size, device=device
    )
    case.options["scale"] = case.options["scale"] / size
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [16, 128])
def test_fp8_ds_mla_cache(device, heads, dtype):
    case = decode_case(
        [5, 130, 0], num_heads=heads, dtype=dtype, cache_dtype=torch.uint8, device=device
    )
    check(case, 2)


@pytest.mark.parametrize("junk", [torch.nan, 3e38])
@pytest.mark.parametrize("heads", [16, 64])
def test_junk_in_unused_rows_changes_no_bit(device, junk, heads):
    clean = decode(decode_case(LENGTHS, num_heads=heads, junk=0.0, device=device))
    dirty = decode(decode_case(LENGTHS, num_heads=heads, junk=junk, device=device))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("heads", [16, 64])
def test_exact_sums(device, heads):
    cases = [
        uniform_weights(2**9, device=device),
        integer_ramp(torch.arange(512) // 64 * 12, device=device),
        integer_ramp((torch.arange(512) == 511) * 20, device=device),
    ]
    for case, exact in cases:
        case.q = case.q.repeat(1, 1, heads, 1)[:, :, :heads].contiguous()
        out, _ = decode(case)
        assert torch.equal(out, exact[:, :, :1].expand_as(out))


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("heads", [16, 64])
def test_zeros_and_tiny_sums_survive_every_rescale(device, rescale, heads):
    """AMLA's integer add, unguarded, makes huge numbers of them. Scores rise with the tokens."""
    tokens = random_tokens([200], MlaDims())
    tokens[0][:, 512:] = torch.linspace(0, 8, 200)[:, None]
    tokens[0][:, 7] = 0.0
    tokens[0][:64, 8:128] = 0.0
    tokens[0][:64, 128:256] *= 1e-38
    q = torch.zeros(1, 1, heads, 576)
    q[..., 512:] = 1.0
    case = decode_case([200], tokens=tokens, q=q, scale=1 / 24, device=device)
    check(case, 1, rescale=rescale)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("score", [200.0, 3000.0])
def test_a_score_far_above_the_first_tile(device, heads, score):
    """The reference comes from the first tile; a row that outgrows it is done again."""
    dims, n = MlaDims(), 300
    tokens = random_tokens([n, 100], dims)
    q = torch.randn(2, 1, heads, dims.head_dim, generator=torch.Generator().manual_seed(5))
    q[0, 0, 1:, 512] = 0.0
    q[0, 0, 0, 512] = 8.0
    tokens[0][:, 512] = 0.0
    tokens[0][n - 7, 512] = score
    tokens[0][n - 5, 512] = score - 1.0
    case = decode_case([n, 100], tokens=tokens, q=q, scale=1 / 24, device=device)
    check(case, 1)


@pytest.mark.parametrize("heads", [16, 64])
def test_deterministic_is_the_same_bits_alone_and_in_any_batch(device, heads):
    lengths = [2200, 17, 0, 4100, 1]
    tokens = random_tokens(lengths, MlaDims())
    q = torch.randn(5, 1, heads, 576, generator=torch.Generator().manual_seed(9))
    case = decode_case(lengths, tokens=tokens, q=q, device=device)
    whole, whole_lse = decode(case, 3, deterministic=True)
    other, _ = decode(case, 7, deterministic=True)
    assert torch.equal(whole, other)
    for b in (0, 3, 4):
        alone = decode_case([lengths[b]], tokens=[tokens[b]], q=q[b : b + 1], device=device)
        out, lse = decode(alone, 2, deterministic=True)
        assert torch.equal(out[0], whole[b]) and torch.equal(lse[0], whole_lse[b])


def test_a_longer_request_than_was_planned_for_keeps_to_its_workspace(device):
    case = decode_case([90, 2112], num_heads=4, device=device)
    options = {"num_heads": 4, "s_q": 1, "impl": "triton", "deterministic": True}
    plan = plan_mla_decode(case.seq_lens.clamp(max=2048), max_seq_len=2048, **options)
    held = plan.device_plan.acc
    slots, memory = held.shape[0], held.new_full((held.numel() + 4096,), 7.0)
    plan = replace(plan, device_plan=replace(plan.device_plan, acc=memory[:-4096].view(held.shape)))
    plan.update(case.seq_lens)
    assert plan.device_plan.requests[:, 1].sum() <= slots
    out, lse = mla_decode(*case.args, **case.options, impl="triton", deterministic=True, plan=plan)
    assert_decoded(case, out, lse)
    assert (memory[-4096:] == 7).all()


def test_a_table_without_columns_has_room_for_empty_requests(device):
    case = decode_case([0, 0], num_heads=4, device=device)
    rest = case.kv_cache, case.block_table[:, :0], case.seq_lens
    out, lse = mla_decode(case.q, *rest, **case.options, impl="triton", out=case.poisoned_out())
    assert not out.any() and (lse == -torch.inf).all()


def test_fp8_new_tokens_see_no_later_ones(device):
    case = decode_case(
        [3, 140],
        num_heads=8,
        s_q=4,
        cache_dtype=torch.float8_e4m3fn,
        kv_scale=0.02,
        device=device,
    )
    check(case, 3)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_whose_rows_start_anywhere(device, cache, heads):
    """Triton, asynchronous copies and the L2 prefetch want multiples of 16 bytes."""
    case = decode_case([100, 65, 1000], num_heads=heads, device=device, **CACHES[cache])
    whole, results = case.kv_cache, []
    for align in ALIGNMENTS["float" if cache == "bf16" else cache]:
        case.kv_cache = unaligned(whole, align)
        results.append(decode(case, 3))
        assert torch.equal(results[-1][0], results[0][0])
    assert_decoded(case, *results[0])


@pytest.mark.parametrize("heads", [6, 32])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"dims": MlaDims(256, 32)}, {}),
        ({"dtype": torch.float16}, {}),
        ({"s_q": 2}, {}),
        ({"block_size": 16}, {"deterministic": True}),
        ({}, {"rescale": "amla"}),
        ({}, {"rescale": "flash"}),
    ],
)
def test_other_modes_with_rows_that_start_anywhere(device, cache, heads, shape, options):
    case = decode_case(LENGTHS, num_heads=heads, q_std=0.5, device=device, **shape, **CACHES[cache])
    case.kv_cache = unaligned(case.kv_cache, ALIGNMENTS["float" if cache == "bf16" else cache][0])
    check(case, 3, **options)


def test_rows_that_start_anywhere_are_not_prefetched_and_not_on_the_m_side_of_wgmma():
    """Without asynchronous copies K's rope part has the place of P (kv_tile.in_registers)."""
    for arch, dims, rows in itertools.product(ARCHS.values(), DIMS, (16, 32, 64)):
        for kv_format, rescale in itertools.product(ALIGNMENTS, RESCALES):
            tile = choose_tile(rows, dims, kv_format, arch, rescale, aligned=False)
            assert tile.prefetch == 0
            assert tile.order == "rows"
            assert tile.rows >= tile_rows(rows, arch)


@pytest.mark.parametrize(
    ("dtype", "first", "page", "row", "align"),
    [
        (torch.bfloat16, 0, 64 * 576, 576, 16),
        (torch.bfloat16, 0, 64 * 584, 584, 16),
        (torch.bfloat16, 0, 64 * 576 + 16, 576, 16),
        (torch.bfloat16, 0, 64 * 576 + 8, 576, 8),  # 16 bytes, but Triton counts elements
        (torch.bfloat16, 0, 64 * 580, 580, 8),
        (torch.bfloat16, 2, 64 * 576, 576, 4),
        (torch.bfloat16, 0, 64 * 576 + 1, 576, 2),
        (torch.bfloat16, 0, 64 * 577, 577, 2),
        (torch.float8_e4m3fn, 0, 64 * 576, 576, 16),
        (torch.float8_e4m3fn, 0, 64 * 577, 577, 1),
        (torch.float8_e4m3fn, 0, 64 * 576 + 8, 576, 8),
        (torch.uint8, 4, 64 * 656, 656, 4),
        (torch.uint8, 0, 64 * 392, 392, 8),  # fp8_ds_mla of 256 + 64
    ],
)
def test_what_divides_the_start_of_every_row(dtype, first, page, row, align):
    memory = torch.empty(2 * page + first, dtype=dtype)
    assert row_alignment(memory.as_strided((2, 64, row), (page, row, 1), first)) == align


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_tiles_cover_the_rows_the_plan_counts_and_lie_within_pages(arch):
    """Fewer rows would need more programs, and more scratch, than the plan has."""
    for rows, dims, kv_format, rescale in itertools.product(
        (1, 16, 17, 32, 33, 512), DIMS, ("float", "fp8", "fp8_ds_mla"), RESCALES
    ):
        tile = choose_tile(rows, dims, kv_format, arch, rescale)
        assert tile.rows >= tile_rows(rows, arch)
        assert PLAN_TILE % tile.tokens == 0


def test_strided_query_and_cache(device):
    case = decode_case([100, 65], num_heads=16, device=device)
    want = decode(case)
    wide = torch.full((2, 1, 16, 600), torch.nan, dtype=case.q.dtype, device=device)
    wide[..., :576] = case.q
    case.q = wide[..., :576]
    pages = torch.full((case.kv_cache.shape[0], 70, 592), torch.nan, dtype=case.q.dtype)
    pages[:, :64, :576] = case.kv_cache.cpu()
    case.kv_cache = pages.to(device)[:, :64, :576]
    out, lse = decode(case)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"dims": MlaDims(128, 64)}, r"\(512, 64\), \(256, 64\), \(512, 32\)"),
    ],
)
def test_refusals(device, options, match):
    with pytest.raises(ValueError, match=match):
        decode(decode_case([10], **options, device=device))
