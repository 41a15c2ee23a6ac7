# SPDX-License-Identifier: Apache-2.0
"""What each implementation of each op in `mla_kernels` takes, by the checks that they make."""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import mla_kernels
import torch
from mla_kernels.arch import ARCHS, KB
from mla_kernels.checks import BLOCK_SIZES
from mla_kernels.decode.api import MAX_HEADS, MAX_S_Q
from mla_kernels.decode.choice import AVAILABLE
from mla_kernels.decode.rescale import RESCALES
from mla_kernels.decode.triton.support import DIMS, check_supported
from mla_kernels.layouts import Fp8DsMlaLayout, IndexerLayout, MlaDims

from mla_backend.support_matrix.table import table
from mla_backend.support_matrix.tritons import describe_tritons

_IMPLS = ("hopper", "triton", "torch", "reference")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = torch.float8_e4m3fn
_QUANTISED = (torch.float8_e4m3fn, torch.uint8)
_DIMS = (*DIMS, MlaDims(384, 64))
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8 e4m3",
    torch.uint8: "fp8_ds_mla",
}
Case = tuple[MlaDims, torch.dtype, torch.dtype, int, str]


def section() -> str:
    """Ops, the choices of the decode kernel, architectures and layouts."""
    lines = [
        "## The kernels\n",
        "Which implementations an op has. `auto` takes the first that runs on the device and fits; "
        "`torch` and `reference` run everywhere. `mla_decode` on a GPU refuses what neither kernel "
        "takes, unless `torch` or `reference` is named.\n",
        _ops(),
        "",
        f"`mla_decode`: 1 to {MAX_HEADS} heads, 1 to {MAX_S_Q} new tokens a request.\n",
        _decode(),
        "",
        "## Architectures\n",
        "The Triton kernels compile for all of these, with Triton 3.6 without spills in their "
        "loops, and for AMD's gfx942 (MI300), where they have not been run; `hopper` for sm_90 "
        "alone. Up to 8 values are spilled there, on sm_90, by more than 32 rows (heads x new "
        "tokens) of an fp8 cache, or 16 of fp8_ds_mla, with rescale `amla`, and by sparse "
        "attention to fp8_ds_mla with more than 32 heads that returns the largest logits.\n",
        _archs(),
        "",
        describe_tritons(),
        "## Cache layouts\n",
        "Byte for byte in [cache_layouts.md](cache_layouts.md).\n",
        _layouts(),
        "",
    ]
    return "\n".join(lines)


def _ops() -> str:
    rows = []
    for op in mla_kernels.__all__:
        module = sys.modules[getattr(mla_kernels, op).__module__]
        available = getattr(module, "AVAILABLE", None)
        if available is not None:
            rows.append([f"`{op}`", *("yes" if impl in available else "" for impl in _IMPLS)])
    return table(["op", *_IMPLS], rows)


def _decode() -> str:
    taken = {impl: [case for case in _cases() if _takes(impl, *case)] for impl in AVAILABLE}
    parts: dict[str, Callable[[Case], str]] = {
        "latent + rope": lambda c: f"{c[0].kv_lora_rank} + {c[0].rope_dim}",
        "q": lambda c: _NAMES[c[1]],
        "cache": lambda c: _NAMES[c[2]],
        "blocks": lambda c: str(c[3]),
        "rescale": lambda c: c[4],
    }
    some: dict[str, Callable[[Case], bool]] = {
        "cache for q of fp8 e4m3": lambda c: c[1] == _FP8,
        "cache for rescale amla": lambda c: c[4] == "amla",
    }
    rows = [_of_each(name, part, taken) for name, part in parts.items()]
    for name, chosen in some.items():
        cases = {impl: [case for case in taken[impl] if chosen(case)] for impl in _IMPLS}
        rows.append(_of_each(name, parts["cache"], cases))
    return table(["`mla_decode`", *_IMPLS], rows)


def _of_each(
    name: str, part: Callable[[Case], str], cases: Mapping[str, Sequence[Case]]
) -> list[str]:
    return [name, *(", ".join(dict.fromkeys(map(part, cases[impl]))) for impl in _IMPLS)]


def _cases() -> list[Case]:
    """Combinations that `mla_decode` itself lets through."""
    return [
        (dims, dtype, cache, block, rescale)
        for dims, dtype, block, rescale in product(_DIMS, (*_DTYPES, _FP8), BLOCK_SIZES, RESCALES)
        for cache in (*(_DTYPES if dtype == _FP8 else (dtype,)), *_QUANTISED)
    ]


def _takes(impl: str, *case: object) -> bool:
    """By the implementation's own check; torch and the reference have none beyond mla_decode's."""
    dims, dtype, cache, block, rescale = case
    if impl == "hopper":
        from mla_kernels.decode.hopper.support import refusal

        return refusal(dims, dtype, cache, block, rescale) is None  # type: ignore[arg-type]
    if impl == "triton":
        assert isinstance(dims, MlaDims) and isinstance(dtype, torch.dtype)
        try:
            check_supported(dims, dtype)
        except ValueError:
            return False
    return True


def _archs() -> str:
    rows = [
        [
            f"sm_{sm}",
            f"{arch.shared_memory // KB} KB",
            arch.tensor_core,
            "instructions" if arch.e4m3_convert else "integer operations",
            "hopper, triton" if sm == 90 else "triton",
        ]
        for sm, arch in ARCHS.items()
    ]
    return table(["GPU", "shared memory", "tensor cores", "fp8 to bf16", "kernels"], rows)


def _layouts() -> str:
    dims = MlaDims()
    page = IndexerLayout()
    rows = [
        ["bf16, fp16", str(dims.head_dim * 2), f"{dims.kv_lora_rank} latent, {dims.rope_dim} rope"],
        ["fp8 e4m3", str(dims.head_dim), "the same, one scale for the whole cache"],
        ["fp8_ds_mla", str(Fp8DsMlaLayout().row_bytes), "fp8 latent, 4 fp32 scales, bf16 rope"],
        ["Lightning Indexer", str(page.page_bytes // page.block_size), "fp8 key, fp32 scale"],
    ]
    return table(["layout", "bytes a token and layer", "what"], rows)
