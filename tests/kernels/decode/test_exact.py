# SPDX-License-Identifier: Apache-2.0
"""Cases with one right answer to the bit: structured weights, needles, block tables, poison."""

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.decode import torch_scratch
from mla_kernels.decode.torch_impl import mla_decode_torch
from mla_kernels.layouts import MlaDims
from mla_kernels.testing.cases import decode_case, random_tokens
from mla_kernels.testing.structured import integer_ramp, uniform_weights

RESCALES = ["pow2", "amla", "flash"]


def decode(case, **options):
    out, lse = mla_decode(*case.args, **case.options, **options, out=case.poisoned_out())
    return out, lse


def test_mean_of_integers():
    case, exact = uniform_weights()
    assert torch.equal(decode(case)[0], exact)


def test_the_mean_shows_a_dropped_token():
    case, exact = uniform_weights(2**13)
    case.seq_lens -= 1
    changed = (decode(case)[0] != exact).float().mean()
    assert changed > 0.5


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize(
    "exponents",
    [
        torch.arange(1024) // 64 % 100,
        torch.randint(-20, 1, (1024,), generator=torch.Generator().manual_seed(3)),
        (torch.arange(1024) >= 960) * 20,
        (torch.arange(1024) == 1023) * 20,
        torch.arange(1024).flip(0) // 64,
    ],
    ids=["ramp up", "random", "jump in the last block", "jump at the last token", "ramp down"],
)
def test_powers_of_two_as_weights(exponents, rescale):
    case, exact = integer_ramp(exponents)
    out, _ = decode(case, rescale=rescale)
    if rescale == "pow2":
        assert torch.equal(out, exact)
    else:  # exp2 of a large reference is not exact in these two
        assert (out.float() - exact.float()).abs().max() <= 2**-6 * exact.float().abs().max()


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_bits_do_not_follow_the_tiles(threads):
    """Rows whose weights range over more than fp16 has normal numbers for, where that is not so."""
    case = decode_case([3000, 1], q_std=3.0)
    how = {"causal": True, "rescale": "pow2"}
    outs = [
        mla_decode_torch(*case.args, **case.options, **how, tile_tokens=tokens)[0]
        for tokens in (64, 4096)
    ]
    assert torch.equal(*outs)


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# On several threads MKL may cut one sum in two, by the shape of the product.
@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize("distribution", [0.5, 1.0, 2.0, 4.0, 10.0])
def test_pow2_does_not_depend_on_tau_or_on_the_block(distribution, threads):
    case = decode_case([5, 300, 777], q_std=distribution, k_std=distribution, num_heads=8)
    from mla_kernels.decode import rescale

    def run(tau, chunk):
        def step(*args, first):
            return rescale.pow2_step(*args, first=first, tau=tau)

        saved = dict(rescale.STEPS)
        rescale.STEPS["pow2"] = step
        try:
            return mla_decode_torch(
                *case.args, **case.options, causal=True, rescale="pow2", tile_tokens=chunk
            )
        finally:
            rescale.STEPS.update(saved)

    first = run(8.0, 64)
    for tau in (0.0, 4.0, 8.0):
        for chunk in (64, 128, 256, 2048):
            out, lse = run(tau, chunk)
            assert torch.equal(out, first[0]), (tau, chunk)
            # k + log2(l) is rounded once more when k is another one.
            torch.testing.assert_close(lse, first[1], rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("rescale", RESCALES)
def test_needle_at_the_last_token_is_seen_and_the_next_is_not(rescale):
    dims = MlaDims()
    n = 130
    tokens = random_tokens([n + 1], dims)
    q = torch.zeros(1, 1, 4, dims.head_dim)
    q[..., 512] = 8.0
    tokens[0][:, 512:] = 0
    tokens[0][n - 1, 512] = 100.0
    tokens[0][n, 512] = 200.0
    case = decode_case([n + 1], tokens=tokens, q=q)
    case.seq_lens[0] = n
    out, _ = decode(case, rescale=rescale)
    assert torch.equal(out[0, 0, 0], tokens[0][n - 1, :512].to(torch.bfloat16))


def test_causal_limit_of_each_new_token():
    """Token i has value one-hot i: the output of a query lists the tokens that it saw."""
    dims, s_q = MlaDims(), 5
    lengths = [s_q, 9, 64, 67, 128]
    tokens = [torch.zeros(n, dims.head_dim) for n in lengths]
    for t in tokens:
        t[torch.arange(len(t)), torch.arange(len(t))] = 1.0
    q = torch.zeros(len(lengths), s_q, 3, dims.head_dim)
    case = decode_case(lengths, tokens=tokens, q=q)
    out, lse = decode(case)
    for b, n in enumerate(lengths):
        for j in range(s_q):
            seen = n - s_q + 1 + j
            assert (out[b, j, :, :seen] > 0).all() and (out[b, j, :, seen:] == 0).all()
            torch.testing.assert_close(lse[b, j], torch.full((3,), float(seen)).log())


def test_queries_before_the_first_token_see_nothing():
    case = decode_case([2, 0], s_q=4, num_heads=3)
    out, lse = decode(case)
    assert (out[0, :2] == 0).all() and (lse[0, :2] == -torch.inf).all()
    assert torch.isfinite(lse[0, 2:]).all() and (out[1] == 0).all() and (lse[1] == -torch.inf).all()


def test_block_table_is_followed_block_by_block():
    """Each block holds its own one-hot value, so the output spells the table."""
    dims, blocks = MlaDims(), 7
    tokens = [torch.zeros(64 * blocks, dims.head_dim)]
    tokens[0][torch.arange(64 * blocks), torch.arange(64 * blocks) // 64] = 1.0
    case = decode_case([64 * blocks], tokens=tokens, q=torch.zeros(1, 1, 2, dims.head_dim))
    out, _ = decode(case)
    torch.testing.assert_close(
        out[0, 0, 0, :blocks].float(), torch.full((blocks,), 1 / blocks), rtol=4e-3, atol=0
    )
    swapped = case.block_table.clone()
    case.kv_cache[swapped[0, 2].long()] = 0
    assert float(decode(case)[0][0, 0, 0, 2]) == 0.0


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 3e38, -3e38])
@pytest.mark.parametrize("rescale", RESCALES)
def test_junk_in_unused_rows_changes_no_bit(junk, rescale):
    lengths = [0, 1, 63, 64, 65, 200]
    clean = decode_case(lengths, junk=0.0)
    out, lse = decode(clean, rescale=rescale)
    dirty = decode_case(lengths, junk=junk)
    dirty_out, dirty_lse = decode(dirty, rescale=rescale)
    assert torch.equal(out, dirty_out) and torch.equal(lse, dirty_lse)


@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.uint8])
def test_a_request_alone_and_in_a_batch(cache_dtype, rescale, threads):
    lengths = [300, 0, 17, 64, 1000]
    tokens = random_tokens(lengths, MlaDims())
    q = torch.randn(5, 1, 8, 576, generator=torch.Generator().manual_seed(9))
    case = decode_case(lengths, tokens=tokens, q=q, cache_dtype=cache_dtype)
    whole, _ = mla_decode(*case.args, **case.options, rescale=rescale, deterministic=True)
    for b in range(5):
        alone = decode_case(
            [lengths[b]], tokens=[tokens[b]], q=q[b : b + 1], cache_dtype=cache_dtype
        )
        out, _ = mla_decode(*alone.args, **alone.options, rescale=rescale, deterministic=True)
        assert torch.equal(out[0], whole[b])


@pytest.mark.parametrize("block_size", [16, 32])
def test_deterministic_with_a_table_narrower_than_a_tile(block_size):
    """A table row has no columns to spare, here and where the last tile ends."""
    lengths = [block_size, 2, 65 + block_size]
    tokens = random_tokens(lengths, MlaDims())
    q = torch.randn(3, 1, 8, 576, generator=torch.Generator().manual_seed(9))
    whole = decode_case(lengths, tokens=tokens, q=q, block_size=block_size)
    want, _ = mla_decode(*whole.args, **whole.options, deterministic=True)
    for b, n in enumerate(lengths):
        alone = decode_case(
            [n],
            tokens=tokens[b : b + 1],
            q=q[b : b + 1],
            block_size=block_size,
            max_blocks=-(-n // block_size),
        )
        out, _ = mla_decode(*alone.args, **alone.options, deterministic=True)
        assert torch.equal(out[0], want[b])


def test_memory_that_calls_share_may_grow_and_shrink():
    scratch = torch_scratch.scratch
    small = scratch("test", (3, 5), torch.float32)
    large = scratch("test", (7, 1000), torch.bfloat16)
    assert small.shape == (3, 5) and large.shape == (7, 1000)
    assert scratch("test", (2,), torch.int64).data_ptr() == large.data_ptr()
    assert scratch("test", (2,), torch.int64).dtype == torch.int64
    assert scratch("test", (2,), torch.int32).dtype == torch.int32
    with torch.inference_mode():
        scratch("test", (2, 1), torch.int32)
    scratch("test", (2, 1), torch.int32).fill_(1)
    with torch.inference_mode():
        scratch("made in inference mode", (4,), torch.float32).fill_(0.0)
    scratch("made in inference mode", (4,), torch.float32).fill_(1.0)


def test_out_is_written_in_place_and_returned():
    case = decode_case([70])
    out = case.poisoned_out()
    result, _ = mla_decode(*case.args, **case.options, out=out)
    assert result is out and torch.isfinite(out).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rescale", RESCALES)
def test_an_empty_batch(rescale, deterministic):
    case = decode_case([5])
    q, cache, table, lens = case.args
    options = case.options | {"rescale": rescale, "deterministic": deterministic}
    out, lse = mla_decode(q[:0], cache, table[:0], lens[:0], **options)
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 1, 16)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("rescale", RESCALES)
def test_deterministic_wherever_the_rows_of_q_start(rescale, by_column):
    """Products of fp32 depend on it: those of 103 columns start at all multiples of 4 bytes. And on
    strides: a batch by column has others than its contiguous requests."""
    g = torch.Generator().manual_seed(0)
    q, kv_cache = torch.randn(6, 1, 3, 103, generator=g), torch.randn(2, 64, 103, generator=g)
    if by_column:
        q = q.mT.contiguous().mT
    block_table = torch.arange(2, dtype=torch.int32).expand(6, 2).contiguous()
    seq_lens = torch.full((6,), 100, dtype=torch.int32)
    options = {"scale": 0.1, "kv_lora_rank": 100, "rescale": rescale, "deterministic": True}
    out, lse = mla_decode(q, kv_cache, block_table, seq_lens, **options)
    for b in range(6):
        mine = torch.empty(1, 1, 3, 103).copy_(q[b])
        alone = mla_decode(mine, kv_cache, block_table[:1], seq_lens[:1], **options)
        assert torch.equal(alone[0][0], out[b]) and torch.equal(alone[1][0], lse[b])


@pytest.mark.parametrize(
    ("impl", "rescale"), [("torch", "pow2"), ("torch", "amla"), ("triton", "flash")]
)
@pytest.mark.parametrize("score, seen", [(-7.0e5, True), (-7.5e5, False)])
def test_scores_below_the_first_reference_count_as_masked(device, impl, rescale, score, seen):
    """docs/numerics.md: below -2^20 ln 2, about -727000."""
    dims = MlaDims()
    tokens = random_tokens([3], dims)
    tokens[0][:, 512:] = 0
    tokens[0][:, 512] = 1.0
    q = torch.zeros(1, 1, 2, dims.head_dim)
    q[..., 512] = score
    case = decode_case([3], tokens=tokens, q=q, scale=1.0, device=device)
    results = mla_decode(*case.args, **case.options, rescale=rescale, impl=impl)
    out, lse = (x.cpu() for x in results)
    if seen:
        assert torch.allclose(lse, torch.tensor(q[0, 0, 0, 512].bfloat16().item()), rtol=1e-4)
        assert torch.allclose(out[0, 0, 0].float(), tokens[0][:, :512].float().mean(0), atol=0.02)
    else:
        assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_nothing_is_recorded_for_gradients(impl):
    case = decode_case([5, 70])
    q = case.q.requires_grad_()
    results = mla_decode(q, *case.args[1:], **case.options, impl=impl)
    assert not any(x.requires_grad for x in results)
