# SPDX-License-Identifier: Apache-2.0
"""Decode against the fp64 definition and against the mirror, on random data."""

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.layouts import MlaDims
from mla_kernels.testing import metrics
from mla_kernels.testing.cases import decode_case, random_tokens
from mla_kernels.testing.mirror import mirror

RESCALES = ["pow2", "amla", "flash"]


def golden(case, **options):
    # fp64 out: the reference rounds to q's dtype last, which is not what is measured here.
    from mla_kernels.decode.reference import mla_decode_reference

    return mla_decode_reference(*case.args, **case.options, causal=options.get("causal", True))


def check(case, bar, **options):
    out, lse = mla_decode(*case.args, **case.options, **options, out=case.poisoned_out())
    want, want_lse = golden(case, **options)
    assert not bar.failures(metrics.measure(out, want))
    seen = torch.isfinite(want_lse)
    assert torch.equal(seen, torch.isfinite(lse))
    # l sums rounded P, as O does: a single dominant weight may be off by half a bf16 ulp.
    assert (lse - want_lse)[seen].abs().max() < 2**-8
    return out


def uniform(lengths, dims, half_width, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.rand(n, dims.head_dim, generator=g) * 2 - 1) * half_width for n in lengths]


@pytest.mark.parametrize("name", list(metrics.PAPER_BARS))
@pytest.mark.parametrize("rescale", RESCALES)
def test_paper_distributions(name, rescale):
    dims, spread = MlaDims(), float(name[1:])
    if name[0] == "N":
        case = decode_case([4096], q_std=spread**0.5, k_std=spread**0.5)
    else:
        case = decode_case(
            [4096],
            tokens=uniform([4096], dims, spread),
            q=torch.stack(uniform([16], dims, spread, seed=1))[:, None],
        )
    # Heads are rows of the metric; the paper has 128, so ours stay under the same bars.
    check(case, metrics.PAPER_BARS[name], rescale=rescale)


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("s_q", [1, 2, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_batches(rescale, s_q, causal):
    case = decode_case([s_q, 8, 63, 64, 65, 127, 200, 256], s_q=s_q, num_heads=6, q_std=0.5)
    check(case, metrics.SHORT_BAR, rescale=rescale, causal=causal)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 64, 128])
def test_head_counts(heads):
    check(decode_case([100, 130], num_heads=heads), metrics.SHORT_BAR)


@pytest.mark.parametrize("dims", [MlaDims(), MlaDims(256, 32), MlaDims(512, 32)], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dims_dtypes_and_block_sizes(dims, block_size, dtype):
    case = decode_case([1, 77, 150], dims=dims, block_size=block_size, dtype=dtype)
    bar = metrics.Bar(2e-6, 2e-5) if dtype == torch.float32 else metrics.SHORT_BAR
    check(case, bar)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("cache_dtype", "kv_scale"), [(torch.float8_e4m3fn, 0.02), (torch.uint8, None)]
)
def test_quantised_caches_against_their_own_values(dtype, cache_dtype, kv_scale):
    case = decode_case([1, 77, 300], dtype=dtype, cache_dtype=cache_dtype, kv_scale=kv_scale)
    check(case, metrics.SHORT_BAR)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_kv_scale_may_be_a_tensor(shape):
    case = decode_case([77], cache_dtype=torch.float8_e4m3fn, kv_scale=0.02)
    out, _ = mla_decode(*case.args, **case.options)
    options = {**case.options, "kv_scale": torch.full(shape, 0.02)}
    assert torch.equal(out, mla_decode(*case.args, **options)[0])


@pytest.mark.parametrize(
    ("std", "bar"), [(1.0, metrics.MIRROR_BAR), (2.0, metrics.MIRROR_BAR_PEAKY)]
)
def test_mirror(std, bar):
    case = decode_case([1000, 2047, 2048, 2049], q_std=std, k_std=std, num_heads=8, s_q=2)
    out, lse = mla_decode(*case.args, **case.options, impl="torch")
    want, want_lse = mirror(case)
    # The output is rounded to bf16 last; compare before that by rounding the mirror alike.
    assert metrics.measure(out, want.to(case.q.dtype)).fro < 5 * bar.fro
    assert (lse - want_lse).abs().max() < 1e-4


def test_128k_tokens():
    tokens = random_tokens([2**17], MlaDims())
    case = decode_case([2**17], num_heads=2, tokens=tokens)
    check(case, metrics.LONG_BAR)
    # Half a percent of the output's bits show a token too few; the golden's bar does not.
    out, lse = mla_decode(*case.args, **case.options)
    want, want_lse = mirror(case)
    assert metrics.measure(out, want.to(case.q.dtype)).fro < 5e-4
    assert (lse - want_lse).abs().max() < 2e-6
