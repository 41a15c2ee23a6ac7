# SPDX-License-Identifier: Apache-2.0
"""`--selftest`: every implementation that runs here against the reference, in seconds."""

from collections.abc import Callable, Iterator
from typing import Any

from mla_backend.doctor.report import Result

_LENGTHS = [1, 0, 64, 333]  # one token, an empty request, a full block, blocks and a part
# The weights that are summed are bf16 (half a unit: 2^-8) on a grid of 2^-12 (numerics.py).
_LSE_BAR = 2**-8 + 2**-12
_MEND = "do not serve with it: report the output of `mla-backend doctor --json --selftest`"
_NO_ROOM = "end what fills its memory, as nvidia-smi lists it, and try again"


def run() -> list[Result]:
    """One result for each op and implementation; an exception counts as a failure."""
    try:
        import torch
        from mla_kernels.cache import api as cache
        from mla_kernels.decode import api as decode
        from mla_kernels.indexer import api as indexer
        from mla_kernels.sparse import choice as sparse
        from mla_kernels.topk import api as topk
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        return [Result("selftest", "fail", found, "mend the import it names")]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = []
    ops: tuple[tuple[str, tuple[str, ...], Callable[[str, str], str]], ...] = (
        ("mla_decode", decode.AVAILABLE, decode_errors),
        ("write_kv_cache", cache.AVAILABLE, cache_errors),
        ("indexer_scores", indexer.AVAILABLE, score_errors),
        ("exact_topk", topk.AVAILABLE, topk_errors),
        ("mla_sparse_attention", sparse.AVAILABLE, sparse_errors),
    )
    for op, available, compare in ops:
        for impl in _runnable(op, available, device):
            name = f"selftest {op} {impl}"
            try:
                shown.append(Result(name, "ok", compare(impl, device)))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                mend = _NO_ROOM if "out of memory" in found else _MEND
                shown.append(Result(name, "fail", found, mend))
    return shown


def _runnable(op: str, available: tuple[str, ...], device: str) -> Iterator[str]:
    import torch
    from mla_kernels.dispatch import choose_impl

    for impl in available:
        if impl == "reference" or (impl == "triton" and device == "cpu"):
            continue  # what the others are compared with; its interpreter, which is for tests
        try:
            choose_impl(op, impl, torch.device(device), available=available)
        except ValueError:
            continue
        yield impl


def _must(held: bool, otherwise: str) -> None:
    """An `assert` that `python -O` keeps."""
    if not held:
        raise AssertionError(otherwise)


def decode_errors(impl: str, device: str) -> str:
    """The worst error over dtypes, cache layouts and rescales; AssertionError above the bar."""
    import torch
    from mla_kernels import mla_decode
    from mla_kernels.decode.rescale import RESCALES
    from mla_kernels.testing.cases import decode_case, scales_to_powers_of_two
    from mla_kernels.testing.metrics import SHORT_BAR, measure

    worst, count = 0.0, 0
    for dtype in (torch.bfloat16, torch.float16):
        for cache_dtype in (dtype, torch.uint8):
            case = decode_case(_LENGTHS, s_q=2, dtype=dtype, cache_dtype=cache_dtype, device=device)
            if cache_dtype == torch.uint8:
                scales_to_powers_of_two(case.kv_cache)
            expected, expected_lse = mla_decode(*case.args, **case.options, impl="reference")
            for rescale in RESCALES:
                if not _serves(impl, device, dtype, cache_dtype, rescale):
                    continue
                out = case.poisoned_out()
                options = {**case.options, "rescale": rescale, "impl": impl}
                _, lse = mla_decode(*case.args, **options, out=out)
                error = measure(out, expected)
                failures = SHORT_BAR.failures(error)
                what = f"{dtype}, cache {cache_dtype}, rescale {rescale}"
                _must(not failures, f"{what}: {', '.join(failures)}")
                torch.testing.assert_close(lse, expected_lse, rtol=0, atol=_LSE_BAR)
                worst, count = max(worst, error.fro), count + 1
    return f"{count} cases, relative error up to {worst:.1e} (allowed {SHORT_BAR.fro:.1e})"


def _serves(impl: str, device: str, dtype: Any, cache_dtype: Any, rescale: str) -> bool:
    import torch
    from mla_kernels.decode.choice import choose_decode_impl

    options = {"dtype": dtype, "kv_cache_dtype": cache_dtype, "rescale": rescale}
    try:
        choose_decode_impl(impl, torch.device(device), **options)
    except ValueError:
        return False
    return True


def cache_errors(impl: str, device: str) -> str:
    """Rows and scattered slots, byte for byte; AssertionError where one differs."""
    import torch
    from mla_kernels import write_kv_cache
    from mla_kernels.cache.torch_impl import encode_rows

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(9, 576, generator=generator).to(device, torch.bfloat16)
    latent, rope = tokens.split([512, 64], dim=-1)
    slots = torch.tensor([3, -1, 130, 0, 64, 191, -1, 65, 66], device=device)
    layouts = (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
    for dtype in layouts:
        scale = 0.5 if dtype == torch.float8_e4m3fn else None
        rows = encode_rows(latent, rope, dtype, scale)
        cache = torch.zeros(3, 64, rows.shape[1], device=device).to(dtype)
        write_kv_cache(latent, rope, cache, slots, kv_scale=scale, impl=impl)
        got = cache.flatten(0, 1).view(torch.uint8)
        wanted = torch.zeros_like(got)
        for row, slot in zip(rows.view(torch.uint8), slots.tolist(), strict=True):
            if slot >= 0:
                wanted[slot] = row
        _must(torch.equal(got, wanted), f"cache {dtype}: other bytes than the reference")
    return f"{len(layouts)} layouts, the same bytes"


def score_errors(impl: str, device: str) -> str:
    """The indexer's scores over fp8 keys; AssertionError where one is off by more than rounding."""
    import torch
    from mla_kernels import indexer_scores
    from mla_kernels.testing.indexer_case import make_indexer_case

    case = make_indexer_case([1, 64, 333], device=device)  # one row each: all kernels take it
    wanted = indexer_scores(*case.args, impl="reference").float()
    torch.testing.assert_close(indexer_scores(*case.args, impl=impl), wanted, rtol=1e-4, atol=1e-4)
    return f"{len(wanted)} rows of up to 333 keys, within 1e-4"


def topk_errors(impl: str, device: str) -> str:
    """Choices with ties, masked scores and both zeros; AssertionError where one is another."""
    import torch
    from mla_kernels import exact_topk

    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3000, generator=generator)
    scores[1] = scores[1].round()
    scores[2, 5:] = -torch.inf
    scores[3] = torch.tensor([0.0, -0.0]).repeat(1500)
    scores = scores.to(device)
    wanted = exact_topk(scores, 512, impl="reference")
    _must(torch.equal(exact_topk(scores, 512, impl=impl), wanted), "others than the reference")
    return "4 rows of 3000 scores, the same 512"


def sparse_errors(impl: str, device: str) -> str:
    """The worst error over head counts and layouts of the cache; AssertionError above the bar."""
    import torch
    from mla_kernels import mla_sparse_attention
    from mla_kernels.cache.torch_impl import encode_rows
    from mla_kernels.testing.cases import scales_to_powers_of_two
    from mla_kernels.testing.metrics import SHORT_BAR, measure

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5 * 64, 576, generator=generator).to(device, torch.bfloat16)
    slots = torch.stack([torch.randperm(len(rows), generator=generator)[:200] for _ in range(3)])
    slots[1, 3:] = -1
    slots = slots.to(device, torch.int32)
    worst, heads = 0.0, (8, 128)
    for dtype in (torch.bfloat16, torch.uint8):
        cache = encode_rows(rows[:, :512], rows[:, 512:], dtype, None).view(5, 64, -1)
        if dtype == torch.uint8:
            scales_to_powers_of_two(cache)
        for H in heads:
            q = torch.randn(3, H, 576, generator=generator).to(device, torch.bfloat16)
            wanted, _ = mla_sparse_attention(q, cache, slots, scale=0.04, impl="reference")
            got, _ = mla_sparse_attention(q, cache, slots, scale=0.04, impl=impl)
            error = measure(got, wanted)
            failures = SHORT_BAR.failures(error)
            _must(not failures, f"cache {dtype}, {H} heads: {', '.join(failures)}")
            worst = max(worst, error.fro)
    return f"{2 * len(heads)} cases, relative error up to {worst:.1e} (allowed {SHORT_BAR.fro:.1e})"
