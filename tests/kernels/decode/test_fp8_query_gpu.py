# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel for fp8 queries: against a mirror of its rounding, where scores are exact, and
against the definition, with the error that weights of 4 significant bits imply."""

import math

import pytest
import torch
from mla_kernels.arch import device_arch
from mla_kernels.decode.call import DecodeCall
from mla_kernels.decode.hopper.fp8_query.launcher import launch_fp8_query
from mla_kernels.decode.merge.launcher import launch_merge
from mla_kernels.decode.plan.launcher import build_plan
from mla_kernels.decode.rescale import scale_to_log2
from mla_kernels.layouts import MlaDims
from mla_kernels.testing.cases import decode_case, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs sm_90",
    ),
]

E4M3 = torch.float8_e4m3fn
LENGTHS = [0, 1, 63, 64, 65, 200, 0, 1000, 5000, 33]
# Rounding a weight to 4 significant bits moves it by at most 2^-4 of itself, and by 2.65e-2 rms
# for a mantissa m that is log-uniform: 2^-4 / 3^.5 times the rms of 1 / m, (0.75 / (2 ln 2))^.5.
# Outputs of independent values err by as much; scores, whose sums are cut to 14 bits, add less
# than 1e-2.
FP8_ERROR = math.hypot(2.65e-2, 1e-2)


def fp8_case(
    lengths, *, num_heads=64, s_q=1, ternary=False, q_scale=None, kv_scale=0.02, **options
):
    """(case, q in e4m3): q of the case is its value in bf16. Ternary: codes of -1, 0 and 1, whose
    sums of products are exact in any order."""
    if ternary:
        tokens = random_tokens(lengths, MlaDims(), device="cuda")
        tokens = [x.mul(0.8).round().clamp(-1, 1) * kv_scale for x in tokens]
        options |= {"tokens": tokens}
    case = decode_case(
        lengths, num_heads=num_heads, s_q=s_q, cache_dtype=E4M3, kv_scale=kv_scale,
        device="cuda", **options,
    )  # fmt: skip
    if ternary:
        q = torch.randn(case.q.shape, device="cuda").mul(0.8).round().clamp(-1, 1).to(E4M3)
    else:
        q = (case.q.float() / (q_scale or 1.0)).clamp(-448, 448).to(E4M3)
    return case, q


def attend(case, q, *, causal=True, deterministic=False, q_scale=None, kv_scale=None, plan=None):
    """out, lse and the plan of the kernel and its merge, into tensors full of NaN."""
    B, s_q, H, _ = q.shape
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = plan or build_plan(
        case.seq_lens,
        num_heads=H,
        s_q=s_q,
        deterministic=deterministic,
        max_seq_len=case.block_table.shape[1] * 64,
        num_parts=max(1, sms // -(-s_q * H // 64)),
    )
    out = torch.full((B, s_q, H, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((B, s_q, H), torch.nan, device="cuda")
    plan.acc.fill_(torch.nan)
    plan.sums.fill_(torch.nan)
    call = DecodeCall(
        q, case.kv_cache, case.block_table, case.seq_lens, plan, out, lse,
        scale=case.options["scale"], q_scale=q_scale,
        kv_scale=case.options["kv_scale"] if kv_scale is None else kv_scale, causal=causal,
    )  # fmt: skip
    launch_fp8_query(call)
    launch_merge(plan, out, lse, device_arch(out.device))
    return out, lse, plan


def expected(case, q, *, causal=True, q_scale=None, chunk=None, rounded=True):
    """(out, lse) fp64 from the codes; rounded: with the kernel's references and weights, whose
    history starts again every chunk[b] tiles of a request."""
    B, s_q, H, _ = q.shape
    kv_scale = case.options["kv_scale"] or 1.0
    scale_log2 = scale_to_log2(case.options["scale"])
    outs, lses = [], []
    for b in range(B):
        n = int(case.seq_lens[b])
        if n == 0:
            outs.append(torch.zeros(s_q, H, 512, dtype=torch.float64, device="cuda"))
            lses.append(torch.full((s_q, H), -torch.inf, dtype=torch.float64, device="cuda"))
            continue
        tiles = -(-n // 64)
        rows = case.kv_cache[case.block_table[b, :tiles].long()].flatten(0, 1)[:n].double()
        t = torch.einsum("shd,nd->shn", q[b].double(), rows)
        t *= scale_log2 * (q_scale or 1.0) * kv_scale
        if causal:
            limit = n - s_q + 1 + torch.arange(s_q, device="cuda")
            seen = torch.arange(n, device="cuda") < limit[:, None]
            t = t.masked_fill(~seen[:, None], -torch.inf)
        if rounded:
            padded = torch.nn.functional.pad(t, (0, tiles * 64 - n), value=-torch.inf)
            padded = padded.unflatten(-1, (tiles, 64))
            top = padded.amax(-1)
            k = torch.empty_like(top)
            last = torch.full_like(top[..., 0], -(2.0**20))
            for i in range(tiles):
                if chunk is not None and i % chunk[b] == 0:
                    last = torch.full_like(last, -(2.0**20))
                last = torch.where(top[..., i] > last + 8, top[..., i] - 6, last)
                k[..., i] = last
            p = (padded - k[..., None]).float().exp2().to(E4M3).double()
            most = k.amax(-1, keepdim=True)
            w = (p * (k - most).exp2()[..., None]).flatten(-2)[..., :n]
        else:
            most = t.amax(-1, keepdim=True).clamp(min=-(2.0**20))
            w = (t - most).exp2()
        total = w.sum(-1, keepdim=True)
        out = torch.einsum("shn,nd->shd", w, rows[:, :512]) * kv_scale
        outs.append(torch.where(total > 0, out / total, 0.0))
        lses.append((most + total.log2()).squeeze(-1) * math.log(2))
    return torch.stack(outs), torch.stack(lses)


def errors(out, lse, want, want_lse):
    """Relative Frobenius error, the largest error over the largest value, lse's largest error."""
    seen = torch.isfinite(want_lse)
    assert torch.equal(seen, torch.isfinite(lse)) and not out.isnan().any()
    assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))
    error = out.double() - want
    lse_error = (lse - want_lse)[seen].abs().max()
    return (
        float(error.norm() / want.norm()),
        float(error.abs().max() / want.abs().max()),
        float(lse_error),
    )


def check_mirror(case, q, out, lse, **options):
    norm, largest, lse_error = errors(out, lse, *expected(case, q, **options))
    # bf16 rounds by 1.7e-3 rms; a tile's sum of values is cut to 14 bits.
    assert norm < 2.7e-3 and largest < 7e-3 and lse_error < 2**-10, (norm, largest, lse_error)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_like_the_mirror(heads, s_q, causal):
    case, q = fp8_case(LENGTHS, num_heads=heads, s_q=s_q, ternary=True, scale=0.15)
    out, lse, plan = attend(case, q, causal=causal, deterministic=True, kv_scale=1.0)
    case.options["kv_scale"] = 1.0
    check_mirror(case, q, out, lse, causal=causal, chunk=plan.requests[:, 2].tolist())


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("s_q", [1, 2, 5, 8])
def test_ragged_batches(heads, s_q):
    case, q = fp8_case(LENGTHS, num_heads=heads, s_q=s_q, q_std=0.5)
    for causal in (False, True):
        for deterministic in (False, True):
            out, lse, _ = attend(case, q, causal=causal, deterministic=deterministic)
            want = expected(case, q, causal=causal, rounded=False)
            norm, _, lse_error = errors(out, lse, *want)
            assert norm < FP8_ERROR and lse_error < math.log(1 + 2**-4) + 1e-2


@pytest.mark.parametrize("heads", [16, 128])
def test_whole_and_split_requests(heads):
    for lengths in ([640] * 200, [20000, 0, 1, 6401]):
        case, q = fp8_case(lengths, num_heads=heads, ternary=True, scale=0.01)
        case.options["kv_scale"] = 1.0
        out, lse, _ = attend(case, q)
        norm, _, lse_error = errors(out, lse, *expected(case, q, rounded=False))
        assert norm < FP8_ERROR and lse_error < 2e-2


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("q_scale", "kv_scale"), [(2.0**-6, 3.0), (4.0, 2.0**-10), (0.3, 0.07)])
def test_scales(on_device, q_scale, kv_scale):
    case, q = fp8_case(
        LENGTHS, num_heads=32, kv_scale=kv_scale, q_scale=q_scale,
        k_std=kv_scale * 20, q_std=0.05 / kv_scale,
    )  # fmt: skip
    want = expected(case, q, q_scale=q_scale, rounded=False)
    scales = {"q_scale": q_scale, "kv_scale": kv_scale}
    if on_device:
        scales = {name: torch.tensor([x], device="cuda") for name, x in scales.items()}
    out, lse, _ = attend(case, q, **scales)
    norm, _, lse_error = errors(out, lse, *want)
    assert norm < FP8_ERROR and lse_error < math.log(1 + 2**-4) + 1e-2


def test_references_that_move_in_every_tile():
    lengths = [64 * 9, 64 * 4 + 1, 130]
    tokens = random_tokens(lengths, MlaDims(), std=0.1, device="cuda")
    for rows in tokens:
        rows *= (1 + torch.arange(len(rows), device="cuda") // 64)[:, None]
    case, q = fp8_case(lengths, num_heads=64, tokens=tokens, q_std=4.0)
    for deterministic in (False, True):
        out, lse, _ = attend(case, q, deterministic=deterministic)
        norm, _, _ = errors(out, lse, *expected(case, q, rounded=False))
        assert norm < 2 * FP8_ERROR  # scores of 30, of which 14 bits are 2^-9


def test_long_sums_do_not_shrink():
    """128K tokens of one sign: an accumulator of 14 bits would lose what is added to it."""
    lengths = [131072]
    tokens = [torch.randn(131072, 576, device="cuda").mul_(0.02).add_(0.3)]
    tokens[0][:, 512:] = 0
    case, q = fp8_case(lengths, num_heads=64, tokens=tokens, q_std=0.05)
    plan = build_plan(
        case.seq_lens, num_heads=64, s_q=1, max_seq_len=131072, num_parts=1, deterministic=False
    )
    out, lse, _ = attend(case, q, plan=plan)
    want, want_lse = expected(case, q, rounded=False)
    assert ((out.double() - want) / want).abs().max() < 2**-7
    assert abs(float((out.double() / want).mean()) - 1) < 2e-3
    assert (lse - want_lse).abs().max() < 1e-2


def test_a_request_is_the_same_bits_alone_in_a_batch_and_every_time():
    lengths = [3000, 17, 0, 64, 9000, 2048, 1]
    tokens = random_tokens(lengths, MlaDims(), device="cuda")
    q = torch.randn(len(lengths), 1, 128, 576, device="cuda")
    case, q8 = fp8_case(lengths, num_heads=128, tokens=tokens, q=q)
    whole, whole_lse, _ = attend(case, q8, deterministic=True)
    for b in range(len(lengths)):
        alone, q_b = fp8_case(
            [lengths[b]], num_heads=128, tokens=[tokens[b]], q=q[b : b + 1], seed=b
        )
        out, lse, _ = attend(alone, q_b, deterministic=True)
        assert torch.equal(out[0], whole[b]) and torch.equal(lse[0], whole_lse[b])
    for _ in range(20):
        assert torch.equal(attend(case, q8, deterministic=True)[0], whole)
