# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels: ragged, poisoned batches; CUDA graphs; the same bits in any batch."""

import math

import pytest
import torch
from mla_kernels import mla_decode, plan_mla_decode
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.layouts import MlaDims
from mla_kernels.numerics import LOG2E
from mla_kernels.testing import metrics
from mla_kernels.testing.cases import decode_case, random_tokens, scales_to_powers_of_two
from mla_kernels.testing.decoded import assert_decoded
from mla_kernels.testing.graphs import captured
from mla_kernels.testing.structured import integer_ramp, uniform_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LENGTHS = [0, 1, 63, 64, 65, 200, 0, 1000, 5000, 33]
CACHES = {
    "bf16": {},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "kv_scale": 0.02},
    "fp8_ds_mla": {"cache_dtype": torch.uint8},
}


def unrounded_case(lengths, cache, **options):
    """A case of large scores, where it would show that the reference rounds code times scale to
    bf16 and some kernels do not (docs/numerics.md): with scales that are powers of two."""
    options = CACHES[cache] | options | ({"kv_scale": 2.0**-6} if cache == "fp8" else {})
    case = decode_case(lengths, device="cuda", **options)
    if cache == "fp8_ds_mla":
        scales_to_powers_of_two(case.kv_cache)
    return case


@pytest.fixture(params=["hopper", "triton"])
def impl(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    return request.param


def check(case, impl, **options):
    out, lse = mla_decode(*case.args, **case.options, impl=impl, out=case.poisoned_out(), **options)
    assert_decoded(case, out, lse)


@pytest.mark.parametrize("heads", [1, 6, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("s_q", [1, 2, 4, 8])
@pytest.mark.parametrize("deterministic", [False, True])
def test_ragged_batches(impl, heads, s_q, deterministic):
    case = decode_case(LENGTHS, num_heads=heads, s_q=s_q, q_std=0.5, device="cuda")
    check(case, impl, deterministic=deterministic)


@pytest.mark.parametrize("heads", [4, 32, 64])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [3, 570])
def test_what_is_no_number_in_a_query_shows_in_its_row_alone(impl, heads, cache, number, column):
    """Of requests that are split, and that are not; in lse too."""
    case = unrounded_case([70, 9000], cache, num_heads=heads)
    check(case, impl)
    case.q[:, 0, 1, column] = number
    out, lse = mla_decode(*case.args, **case.options, impl=impl, out=case.poisoned_out())
    assert lse.isnan().nonzero().tolist() == [[0, 0, 1], [1, 0, 1]]
    assert torch.equal(out.isnan(), lse.isnan()[..., None].expand_as(out))


@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [1, 6, 16, 64, 128])
@pytest.mark.parametrize("s_q", [1, 2, 5])
@pytest.mark.parametrize("deterministic", [False, True])
def test_ragged_batches_of_fp8_caches(impl, cache, heads, s_q, deterministic):
    case = decode_case(LENGTHS, num_heads=heads, s_q=s_q, q_std=0.5, device="cuda", **CACHES[cache])
    check(case, impl, deterministic=deterministic)


@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 48, 64, 128])
def test_splits_of_fp8_caches(impl, cache, heads):
    case = decode_case(
        [20000, 0, 1, 6401], num_heads=heads, q_std=0.5, device="cuda", **CACHES[cache]
    )
    check(case, impl)
    q, *rest = case.args
    whole, _ = mla_decode(q, *rest, **case.options, impl=impl)
    parts = q[..., :512].contiguous(), q[..., 512:]
    split, _ = mla_decode(parts, *rest, **case.options, impl=impl, out=case.poisoned_out())
    assert torch.equal(split, whole)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [16, 64])
def test_results_from_an_odd_element_on(impl, cache, heads):
    case = decode_case([65, 1000], num_heads=heads, q_std=0.5, device="cuda", **CACHES[cache])
    shape = case.poisoned_out().shape
    out = torch.full((shape.numel() + 1,), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = out[1:].view(shape)
    if impl == "hopper" and cache != "bf16":
        with pytest.raises(ValueError, match="q, kv_cache and out contiguous, from a multiple of"):
            mla_decode(*case.args, **case.options, impl=impl, out=out)
        impl = "auto"
    mla_decode(*case.args, **case.options, impl=impl, out=out)
    want, _ = mla_decode_reference(*case.args, **case.options, causal=True)
    assert not metrics.SHORT_BAR.failures(metrics.measure(out, want))


@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_references_that_move_in_every_tile_of_fp8_caches(impl, cache, heads):
    """Scores grow from tile to tile, so that some row's reference moves in each: two warpgroups
    that take tiles in turn must agree on all of them."""
    lengths = [64 * 9, 64 * 4 + 1, 130]
    tokens = random_tokens(lengths, MlaDims(), std=0.2, device="cuda")
    for rows in tokens:
        rows *= (1 + torch.arange(len(rows), device="cuda") // 64)[:, None]
    case = unrounded_case(lengths, cache, tokens=tokens, num_heads=heads, q_std=20.0)
    check(case, impl)
    check(case, impl, deterministic=True)


@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_short_requests_of_fp8_caches(impl, cache, heads, deterministic):
    """Programs with several requests, many of one tile: the next query is on its way while the last
    scores of the one before become probabilities."""
    lengths = torch.randint(0, 500, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    case = decode_case(lengths, num_heads=heads, q_std=0.5, device="cuda", **CACHES[cache])
    check(case, impl, deterministic=deterministic)


@pytest.mark.parametrize("heads", [32, 64])
def test_small_weights_beside_a_large_scale(impl, heads):
    """One token weighs as much as 2047 others and has 2^9 of their scales: without headroom the P
    that has M in it would be 8.5 times the least number of fp16 (decode/hopper/scales.py)."""
    if impl == "triton":
        pytest.skip("weights have the scale of their token's largest there, and no headroom")
    tokens = torch.rand(2048, 576, device="cuda") + 0.5
    tokens[:, 0] = 1.0  # what the query looks at
    tokens[:, 1:512:128] = 1.75
    tokens[0, :512] = 0.0
    tokens[0, 0], tokens[0, 1] = 128.0, 896.0
    case = unrounded_case([2048], "fp8_ds_mla", tokens=[tokens], num_heads=heads)
    case.q.zero_()
    case.q[..., 0] = 0.0875 / (case.options["scale"] * LOG2E)
    check(case, impl, deterministic=True)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("deterministic", [False, True])
def test_scales_of_any_size(impl, heads, deterministic):
    """Tiles of rows as large as 2^14 and as small as 2^-28, and of zeros, behind each other;
    requests of small ones alone. What lies behind a request has scales of any size, too."""
    if impl == "triton" and heads > 32:
        pytest.skip("this many rows are converted to bf16 first")
    lengths = [64 * 13 + 5, 64 * 3, 1, 64 * 40, 190, 65]
    case = unrounded_case(lengths, "fp8_ds_mla", num_heads=heads, q_std=2.0**-9)
    sizes = [-28, 0, -12, 14, None, 4, 4, -3, -28, -28]
    scales = case.kv_cache[..., 512:528].view(torch.float32)
    for b, pages in enumerate(case.block_table.tolist()):
        for tile, page in enumerate(pages[: -(-lengths[b] // 64)]):
            size = sizes[0 if b == 1 else tile % 10]
            if size is None:
                case.kv_cache[page, :, :512] = 0
                scales[page] = 2.0**-126
            else:
                scales[page] *= 2.0**size
    check(case, impl, deterministic=deterministic)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("size", [1e-5, 1e4])
def test_queries_of_any_size_for_fp8_caches(impl, heads, size):
    """fp16 alone would hold neither."""
    scale = 2.0 ** -round(math.log2(size * 64))
    case = decode_case(
        [300, 65, 5, 1000], num_heads=heads, q_std=size, k_std=1 / size, device="cuda",
        cache_dtype=torch.float8_e4m3fn, kv_scale=scale,
    )  # fmt: skip
    check(case, impl)


@pytest.mark.parametrize(
    ("heads", "scale"), [(32, 2.0**-6), (32, 0.02), (32, 3.0), (64, 2.0**-6), (64, 4.0)]
)
def test_fp8_scale_on_the_device(impl, heads, scale):
    case = decode_case(
        LENGTHS, num_heads=heads, k_std=scale * 20, q_std=0.05 / scale, device="cuda",
        cache_dtype=torch.float8_e4m3fn, kv_scale=scale,
    )  # fmt: skip
    check(case, impl)
    whole, _ = mla_decode(*case.args, **case.options, impl=impl)
    case.options["kv_scale"] = torch.tensor(scale, device="cuda")
    check(case, impl)
    assert torch.equal(whole, mla_decode(*case.args, **case.options, impl=impl)[0])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("std", [1.0, 3.0, 10.0])
def test_peaky_scores(impl, std, cache):
    check(unrounded_case([4096, 777], cache, num_heads=64, q_std=std, k_std=std), impl)


@pytest.mark.parametrize(
    ("cache", "heads"),
    [
        *(("fp8", heads) for heads in (8, 16, 32, 64, 128)),
        *(("fp8_ds_mla", heads) for heads in (8, 16, 32, 64, 128)),
    ],
)
@pytest.mark.parametrize("std", [1.0, 3.0, 10.0])
def test_codes_times_scale_are_not_rounded(impl, cache, heads, std):
    """At any scale, against values of fp32. That they are not those of bf16 shows in large scores,
    so the ordinary reference is further off there. The Hopper kernel rounds keys of fp8_ds_mla, and
    the scale of a group, to fp16."""
    if impl == "triton" and heads > 32:
        pytest.skip("this many rows are converted to bf16 first")
    case = decode_case(
        [4096, 777, 65], num_heads=heads, q_std=std, k_std=std, device="cuda", **CACHES[cache]
    )
    out, lse = mla_decode(*case.args, **case.options, impl=impl, out=case.poisoned_out())
    q, *rest = case.args
    values, rounded = (
        mla_decode_reference(of, *rest, **case.options, causal=True) for of in (q.float(), q)
    )
    error, other = (metrics.measure(out, of[0]) for of in (values, rounded))
    off, other_off = ((lse - of[1]).abs().max() for of in (values, rounded))
    if impl == "triton" or cache == "fp8":
        assert not metrics.SHORT_BAR.failures(error)
        assert off < 2**-8
    if std > 1:
        assert error.fro < other.fro
        assert off < other_off


def test_exact_sums(impl):
    for case, exact in (
        uniform_weights(device="cuda"),
        integer_ramp(torch.arange(1024) // 64 % 100, device="cuda"),
        integer_ramp((torch.arange(1024) == 1023) * 20, device="cuda"),
    ):
        out, _ = mla_decode(*case.args, **case.options, impl=impl, out=case.poisoned_out())
        assert torch.equal(out, exact)


@pytest.mark.parametrize("rescale", ["pow2", "amla", "flash"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_rescales_and_caches(impl, rescale, cache, heads):
    if impl == "hopper" and rescale not in ("pow2", "amla" if cache == "bf16" else "pow2"):
        pytest.skip("the Hopper kernels have pow2 and, for bf16, amla")
    case = unrounded_case(LENGTHS, cache, num_heads=heads)
    check(case, impl, rescale=rescale)
    check(case, impl, rescale=rescale, deterministic=True)


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_scales_of_the_requests_before_change_no_bit(impl, heads):
    """Programs with several requests, every other of which has 2^7 of the others' scales."""
    count = 400
    lengths = [65 + b % 130 for b in range(count)]
    tokens = random_tokens(lengths, MlaDims(), device="cuda")
    for rows in tokens[::2]:
        rows *= 2.0**7
    q = torch.randn(count, 1, heads, 576, device="cuda") / 64
    shared = {"device": "cuda", "num_heads": heads, "cache_dtype": torch.uint8}
    options = {"impl": impl, "deterministic": True}
    case = decode_case(lengths, tokens=tokens, q=q, **shared)
    whole, whole_lse = mla_decode(*case.args, **case.options, **options)
    for b in range(1, count, 14):
        alone = decode_case([lengths[b]], tokens=[tokens[b]], q=q[b : b + 1], **shared)
        out, lse = mla_decode(*alone.args, **alone.options, **options)
        assert torch.equal(out[0], whole[b]) and torch.equal(lse[0], whole_lse[b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_portable_kernel_dtypes_dims_and_blocks(dtype, block_size):
    for dims in (MlaDims(), MlaDims(256, 32)):
        case = decode_case([5, 300], dims=dims, dtype=dtype, block_size=block_size, device="cuda")
        check(case, "triton")


@pytest.mark.parametrize("cache", CACHES)
def test_a_request_is_the_same_bits_alone_in_a_batch_and_every_time(impl, cache):
    lengths = [3000, 17, 0, 64, 9000, 2048, 1]
    tokens = random_tokens(lengths, MlaDims(), device="cuda")
    q = torch.randn(len(lengths), 1, 128, 576, device="cuda")
    shared = {"device": "cuda", **CACHES[cache]}
    case = decode_case(lengths, tokens=tokens, q=q, **shared)
    options = {"impl": impl, "deterministic": True}
    whole, whole_lse = mla_decode(*case.args, **case.options, **options)
    for b in range(len(lengths)):
        alone = decode_case([lengths[b]], tokens=[tokens[b]], q=q[b : b + 1], seed=b, **shared)
        out, lse = mla_decode(*alone.args, **alone.options, **options)
        assert torch.equal(out[0], whole[b]) and torch.equal(lse[0], whole_lse[b])
    for _ in range(20):
        again, _ = mla_decode(*case.args, **case.options, **options)
        assert torch.equal(again, whole)


class Step:
    """One decode step as a server runs it: the plan is updated, then a layer is computed."""

    PAGES = 62  # whole ones: no page has rows past its request's end, so any order of them will do

    def __init__(self, impl, heads=128, s_q=2, cache="bf16", deterministic=False):
        case = self.case = decode_case(
            [64 * self.PAGES] * 12,
            num_heads=heads,
            s_q=s_q,
            q_std=0.5,
            device="cuda",
            **CACHES[cache],
        )
        self.impl, self.deterministic = impl, deterministic
        self.plan = plan_mla_decode(
            case.seq_lens,
            num_heads=heads,
            s_q=s_q,
            impl=impl,
            deterministic=deterministic,
            max_seq_len=4096,
            kv_cache_dtype=case.kv_cache.dtype,
        )
        self.out = case.poisoned_out()
        self.lse = self.out.new_empty(self.out.shape[:-1], dtype=torch.float32)

    def __call__(self):
        self.plan.update(self.case.seq_lens)
        mla_decode(
            *self.case.args,
            **self.case.options,
            impl=self.impl,
            plan=self.plan,
            out=self.out,
            lse=self.lse,
            deterministic=self.deterministic,
        )

    def change(self, seed):
        """Other lengths and another order of blocks."""
        g = torch.Generator().manual_seed(seed)
        lens = torch.randint(2, 64 * self.PAGES + 1, (12,), generator=g, dtype=torch.int32)
        lens[seed % 12] = 0
        self.case.seq_lens.copy_(lens)
        used = self.case.block_table[:, : self.PAGES].flatten().cpu()
        order = used[torch.randperm(len(used), generator=g)].view(12, self.PAGES)
        self.case.block_table[:, : self.PAGES] = order.cuda()
        self.out.fill_(torch.nan)

    def check(self):
        assert_decoded(self.case, self.out, self.lse)


# One for each kernel that a step may take.
STEPS = [
    (heads, s_q, cache)
    for cache in CACHES
    for heads, s_q in ((16, 1), (32, 1), (64, 1), (128, 1), (128, 2))
]


@pytest.mark.parametrize(("heads", "s_q", "cache"), STEPS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_replays_with_other_lengths_and_tables(impl, heads, s_q, cache, deterministic):
    step = Step(impl, heads, s_q, cache, deterministic)
    graph, _ = captured(step)
    for seed in range(4):
        step.change(seed)
        graph.replay()
        step.check()


@pytest.mark.parametrize(("heads", "s_q", "cache"), STEPS)
def test_steps_neither_allocate_nor_sync_nor_compile(only_launches, impl, heads, s_q, cache):
    step = Step(impl, heads, s_q, cache)
    step()
    step.change(0)
    step()
    with only_launches():
        for _ in range(10):
            step()
    step.check()
