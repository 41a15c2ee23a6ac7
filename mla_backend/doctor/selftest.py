# SPDX-License-Identifier: Apache-2.0
"""`--selftest`: every implementation that runs here against the reference, in seconds."""

from collections.abc import Callable, Iterator
from typing import Any

from mla_backend.doctor.report import Result

_LENGTHS = [1, 0, 64, 333]  # one token, an empty request, a full block, blocks and a part
# The weights that are summed are bf16 (half a unit: 2^-8) on a grid of 2^-12 (numerics.py).
_LSE_BAR = 2**-8 + 2**-12
_MEND = "do not serve with it: report the output of `mla-backend doctor --json --selftest`"


def run() -> list[Result]:
    """One result for each op and implementation; an exception counts as a failure."""
    import torch
    from mla_kernels.cache import api as cache
    from mla_kernels.decode import api as decode

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = []
    ops: tuple[tuple[str, tuple[str, ...], Callable[[str, str], str]], ...] = (
        ("mla_decode", decode.AVAILABLE, decode_errors),
        ("write_kv_cache", cache.AVAILABLE, cache_errors),
    )
    for op, available, compare in ops:
        for impl in _runnable(op, available, device):
            name = f"selftest {op} {impl}"
            try:
                shown.append(Result(name, "ok", compare(impl, device)))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                shown.append(Result(name, "fail", found, _MEND))
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


def decode_errors(impl: str, device: str) -> str:
    """The worst error over dtypes, cache layouts and rescales; AssertionError above the bar."""
    import torch
    from mla_kernels import mla_decode
    from mla_kernels.decode.rescale import RESCALES
    from mla_kernels.testing.cases import decode_case
    from mla_kernels.testing.metrics import SHORT_BAR, measure

    worst, count = 0.0, 0
    for dtype in (torch.bfloat16, torch.float16):
        for cache_dtype in (dtype, torch.uint8):
            case = decode_case(_LENGTHS, s_q=2, dtype=dtype, cache_dtype=cache_dtype, device=device)
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
                assert not failures, f"{what}: {', '.join(failures)}"
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
        assert torch.equal(got, wanted), f"cache {dtype}: other bytes than the reference"
    return f"{len(layouts)} layouts, the same bytes"
