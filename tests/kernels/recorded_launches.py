# SPDX-License-Identifier: Apache-2.0
"""Calls the launchers of Gluon kernels on a CPU, where these cannot run, and prints the launches
that no specification of the offline compiler describes, and kernels that none launched. Also those
of Triton kernels with caches whose rows do not start at multiples of 16 bytes, and numbers of which
Triton would compile a kernel anew from step to step.

    python recorded_launches.py 90

A process of its own, for test_recorded_launches.py: kernels must not be bound to the interpreter,
and much is put in the place of the device.
"""

import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mla_kernels.arch import ARCHS, Arch
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.offline.spec import KernelSpec, all_specs, spec_modules
from mla_kernels.testing.unaligned import unaligned
from triton.experimental.gluon._runtime import GluonJITFunction

SMS = 132
ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True)
class Launch:
    """What `launch` was given: run-time and compile-time arguments by name, and options."""

    kernel: Any
    runtime: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]


def type_of(x: Any) -> str:
    """As a KernelSpec's signature says it."""
    if isinstance(x, torch.Tensor):
        return f"*{ELEMENTS[x.dtype]}"
    if hasattr(x, "block_shape"):
        box = ", ".join(str(n) for n in x.block_shape)
        return f"tensordesc<{ELEMENTS[x.base.dtype]}[{box}],{x.layout!r}>"
    return "fp32" if isinstance(x, float) else "i32"


def is_multiple_of_16(x: Any) -> bool:
    """As Triton sees it; what is neither a pointer nor a number differs in type already."""
    address = x.data_ptr() if isinstance(x, torch.Tensor) else x
    return not isinstance(address, int) or address % 16 == 0


def differences(launch: Launch, spec: KernelSpec) -> list[str]:
    """In what a launch is not the one that `spec` compiles."""
    found = []
    for name, value in launch.constants.items():
        if name not in spec.constexprs or spec.constexprs[name] != value:
            found.append(f"{name} = {value!r}, compiled {spec.constexprs.get(name, 'without')!r}")
    for name, value in launch.runtime.items():
        if name in spec.constexprs:  # folded in
            if value != spec.constexprs[name]:
                found.append(f"{name} = {value!r}, compiled {spec.constexprs[name]!r}")
        elif type_of(value) != spec.signature.get(name):
            found.append(f"{name}: {type_of(value)}, compiled {spec.signature.get(name)}")
    for name in spec.aligned:
        if not is_multiple_of_16(launch.runtime[name]):
            found.append(f"{name} is no multiple of 16")
    if launch.options != dict(spec.options):
        found.append(f"options {launch.options}, compiled {dict(spec.options)}")
    return found


def numbers_of_steps(specs: list[KernelSpec]) -> dict[str, list[str]]:
    """{kernel: numbers that Triton compiles it anew for when they are 1 or a multiple of 16}, less
    those that are the same in all steps of an engine."""
    found: dict[str, set[str]] = {}
    for spec in specs:
        for param in spec.fn.params:
            number = spec.signature.get(param.name) in ("i32", "i64")
            fixed = "stride" in param.name or param.name in {"max_blocks", *spec.aligned}
            if number and not fixed and not param.do_not_specialize:
                found.setdefault(spec.fn.__name__, set()).add(param.name)
    return {kernel: sorted(names) for kernel, names in found.items()}


class Recorder:
    """Stands in for `launch`."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        assert all(n > 0 for n in grid), grid
        params = kernel.params
        values = dict(zip((p.name for p in params), args, strict=False))
        twice = values.keys() & named.keys()
        assert not twice, twice
        options = {k: v for k, v in named.items() if k not in {p.name for p in params}}
        values |= {k: v for k, v in named.items() if k not in options}
        missing = [p.name for p in params if p.name not in values and not p.has_default]
        assert not missing, f"{kernel.__name__} without {missing}"
        constants = {p.name: values.get(p.name, p.default) for p in params if p.is_constexpr}
        runtime = {p.name: values[p.name] for p in params if not p.is_constexpr}
        self.launches.append(Launch(kernel, runtime, constants, options))


def in_every_launcher(recorder: Recorder, arch: Arch) -> None:
    """Put the recorder, the GPU and its number of SMs in the place of what modules imported."""
    for name in spec_modules():
        importlib.import_module(name)
        importlib.import_module(name.removesuffix("specs") + "launcher")
    properties = types.SimpleNamespace(multi_processor_count=SMS)
    torch.cuda.get_device_properties = lambda device: properties
    stand_ins = {
        "launch": recorder,
        "device_arch": lambda device: arch,
        "arch_of": lambda device: arch,
    }
    for module in [m for n, m in sys.modules.items() if n.startswith("mla_kernels.")]:
        for name, value in stand_ins.items():
            if callable(getattr(module, name, None)):
                setattr(module, name, value)


CACHES = {
    "float": lambda dims, dtype: torch.empty(8, 64, dims.head_dim, dtype=dtype),
    "fp8": lambda dims, dtype: torch.empty(8, 64, dims.head_dim, dtype=torch.float8_e4m3fn),
    "fp8_ds_mla": lambda dims, dtype: torch.empty(
        8, 64, Fp8DsMlaLayout(dims).row_bytes, dtype=torch.uint8
    ),
}
SCALE = torch.ones(1)


def dense_calls(arch: Arch) -> Iterator[tuple[str, Any]]:
    """(what it is, the call) of the launchers behind `mla_decode`."""
    from mla_kernels.decode.hopper.launcher import mla_decode_hopper
    from mla_kernels.decode.triton.launcher import mla_decode_triton
    from mla_kernels.decode.triton.support import DIMS

    def call(implementation, dims, dtype, cache, heads, s_q, deterministic, rescale):
        B = 3
        q = torch.empty(B, s_q, heads, dims.head_dim, dtype=dtype)
        kv_cache = CACHES[cache](dims, torch.bfloat16 if dtype.itemsize == 1 else dtype)
        queries = {} if implementation is mla_decode_triton else {"q_scale": SCALE}
        sizes = {} if implementation is mla_decode_hopper else {"kv_lora_rank": dims.kv_lora_rank}
        out_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        implementation(
            q,
            kv_cache,
            torch.zeros(B, 4, dtype=torch.int32),
            torch.ones(B, dtype=torch.int32),
            scale=0.1,
            kv_scale=SCALE if cache == "fp8" else None,
            causal=True,
            rescale=rescale,
            plan=None,
            out=torch.empty(B, s_q, heads, dims.kv_lora_rank, dtype=out_dtype),
            lse=torch.empty(B, s_q, heads),
            deterministic=deterministic,
            **queries,
            **sizes,
        )

    shapes = [(1, 1), (16, 1), (8, 2), (32, 1), (16, 2), (64, 1), (32, 2), (128, 1), (128, 2)]
    modes = list(itertools.product(shapes, (False, True)))
    for (heads, s_q), deterministic in modes:
        for cache, dims in itertools.product(CACHES, DIMS):
            if cache == "fp8_ds_mla" and dims != MlaDims():
                continue
            dtypes = (torch.bfloat16, torch.float16) if cache == "float" else (torch.bfloat16,)
            for dtype, rescale in itertools.product(dtypes, ("pow2", "amla", "flash")):
                args = (dims, dtype, cache, heads, s_q, deterministic, rescale)
                yield f"triton {args}", lambda a=args: call(mla_decode_triton, *a)
        if arch.sm != 90:
            continue
        for cache, rescale in [*((cache, "pow2") for cache in CACHES), ("float", "amla")]:
            args = (MlaDims(), torch.bfloat16, cache, heads, s_q, deterministic, rescale)
            yield f"hopper {args}", lambda a=args: call(mla_decode_hopper, *a)
        args = (MlaDims(), torch.float8_e4m3fn, "fp8", heads, s_q, deterministic, "pow2")
        yield f"fp8 query {args}", lambda a=args: call(mla_decode_hopper, *a)


def sparse_calls(arch: Arch) -> Iterator[tuple[str, Any]]:
    """The same behind `mla_sparse_attention`: few tokens, whose slots are split, and many."""
    from mla_kernels.sparse.call import SparseCall
    from mla_kernels.sparse.hopper.launcher import mla_sparse_attention_hopper
    from mla_kernels.sparse.triton.launcher import mla_sparse_attention_triton

    def call(implementation, heads, cache, tokens):
        dims, few = MlaDims(), tokens == 1
        q = torch.empty(tokens, heads, dims.head_dim, dtype=torch.bfloat16)
        implementation(
            SparseCall(
                q,
                CACHES[cache](dims, torch.bfloat16),
                torch.zeros(tokens, 2048, dtype=torch.int32),
                torch.empty(tokens, heads, dims.kv_lora_rank, dtype=torch.bfloat16),
                torch.empty(tokens, heads),
                scale=0.1,
                lengths=torch.zeros(tokens, dtype=torch.int32) if few else None,
                sink=None if few else torch.zeros(heads),
            )
        )

    for heads, tokens in itertools.product((1, 16, 32, 64, 128), (1, 600)):
        args = (heads, "fp8_ds_mla", tokens)
        yield f"triton {args}", lambda a=args: call(mla_sparse_attention_triton, *a)
        for cache in ("float", "fp8_ds_mla") if arch.sm == 90 else ():
            args = (heads, cache, tokens)
            yield f"hopper {args}", lambda a=args: call(mla_sparse_attention_hopper, *a)


def indexer_calls(arch: Arch) -> Iterator[tuple[str, Any]]:
    """The same behind `indexer_scores` and `indexer_topk`."""
    from mla_kernels.indexer.hopper.launcher import launch_hopper_scores

    def call(fp8_products, heads, requests, s_q, ragged):
        rows = requests * s_q
        launch_hopper_scores(
            torch.empty(rows, heads, 128, dtype=torch.float8_e4m3fn),
            torch.empty(8, 64, 128 + 4, dtype=torch.uint8),  # codes and a scale
            torch.empty(rows, heads),
            torch.zeros(requests, 4, dtype=torch.int32),
            torch.ones(rows, dtype=torch.int32),
            torch.empty(rows, 256),
            request_ids=torch.zeros(rows, dtype=torch.int32) if ragged else None,
            fp8_products=fp8_products,
        )

    in_order = ((64, 100, 1, False), (64, 100, 2, False), (32, 100, 1, False), (32, 100, 2, False))
    in_turns = ((64, 1000, 2, True), (64, 100, 40, True))  # a row a tile, and two
    for fp8 in (False, True) if arch.sm == 90 else ():
        for args in (*in_order, *in_turns):
            yield f"indexer {fp8, *args}", lambda a=(fp8, *args): call(*a)


def unaligned_calls(arch: Arch) -> Iterator[tuple[str, Any]]:
    """Launchers of Triton kernels, with caches whose rows do not start at multiples of 16 bytes."""
    from mla_kernels.decode.triton.launcher import mla_decode_triton
    from mla_kernels.decode.triton.specs import ALIGNMENTS
    from mla_kernels.decode.triton.support import DIMS
    from mla_kernels.sparse.call import SparseCall
    from mla_kernels.sparse.triton.launcher import mla_sparse_attention_triton
    from mla_kernels.sparse.triton.tiles import Split

    def dense(
        cache, align, rows, dims=DIMS[0], dtype=torch.bfloat16, s_q=1, deterministic=False,
        rescale="pow2",
    ):  # fmt: skip
        shape = 3, s_q, rows // s_q
        mla_decode_triton(
            torch.empty(*shape, dims.head_dim, dtype=dtype),
            unaligned(CACHES[cache](dims, dtype), align),
            torch.zeros(3, 4, dtype=torch.int32),
            torch.ones(3, dtype=torch.int32),
            scale=0.1,
            kv_lora_rank=dims.kv_lora_rank,
            kv_scale=SCALE if cache == "fp8" else None,
            causal=True,
            rescale=rescale,
            plan=None,
            out=torch.empty(*shape, dims.kv_lora_rank, dtype=dtype),
            lse=torch.empty(shape),
            deterministic=deterministic,
        )

    def sparse(cache, align, heads, dims=DIMS[0], dtype=torch.bfloat16, tokens=600, logits=False):
        few = tokens == 1
        mla_sparse_attention_triton(
            SparseCall(
                torch.empty(tokens, heads, dims.head_dim, dtype=dtype),
                unaligned(CACHES[cache](dims, dtype), align),
                torch.zeros(tokens, 2048, dtype=torch.int32),
                torch.empty(tokens, heads, dims.kv_lora_rank, dtype=dtype),
                torch.empty(tokens, heads),
                scale=0.1,
                kv_scale=SCALE if cache == "fp8" else None,
                lengths=torch.zeros(tokens, dtype=torch.int32) if few else None,
                sink=None if few else torch.zeros(heads),
                max_logits=torch.empty(tokens, heads) if logits else None,
            ),
            split=Split(4, 512) if few else Split(1, 2048),
        )

    modes = [*({"dims": dims} for dims in DIMS), {"dtype": torch.float16}]
    dense_modes = [*modes, {"s_q": 2}, {"deterministic": True}]
    dense_modes += [{"rescale": rescale} for rescale in ("amla", "flash")]
    sparse_modes = [*modes, {"tokens": 1}, {"logits": True}]
    for cache, alignments in ALIGNMENTS.items():
        for align, rows in itertools.product(alignments, (16, 32, 64, 128)):
            for function, every in ((dense, dense_modes), (sparse, sparse_modes)):
                for mode in every if align == alignments[0] else [{}]:
                    args = (cache, align, rows)
                    yield (
                        f"{function.__name__} {args} {mode}",
                        lambda f=function, a=args, m=mode: f(*a, **m),
                    )


def main() -> int:
    arch, recorder, wrong = ARCHS[int(sys.argv[1])], Recorder(), 0
    in_every_launcher(recorder, arch)
    specs = all_specs(arch)
    unseen = {s.fn.__name__ for s in specs if isinstance(s.fn, GluonJITFunction)}
    gluon = itertools.chain(dense_calls(arch), sparse_calls(arch), indexer_calls(arch))
    strided = {"mla_decode_kernel", "mla_sparse_kernel"}
    wanted = [
        *((call, lambda kernel: isinstance(kernel, GluonJITFunction)) for call in gluon),
        *((call, lambda kernel: kernel.__name__ in strided) for call in unaligned_calls(arch)),
    ]
    unseen |= strided
    for (what, call), is_wanted in wanted:
        recorder.launches.clear()
        call()
        for launch in recorder.launches:
            if not is_wanted(launch.kernel):
                continue  # the interpreter runs these
            near = [differences(launch, s) for s in specs if s.fn is launch.kernel]
            least = min(near, key=len, default=["nothing of it is compiled"])
            unseen.discard(launch.kernel.__name__)
            if least:
                wrong += 1
                print(f"{what}: {launch.kernel.__name__}: {'; '.join(least)}")
    if unseen:
        print(f"never launched: {sorted(unseen)}")
    if numbers := numbers_of_steps(specs):
        print(f"without do_not_specialize: {numbers}")
    return 1 if wrong or unseen or numbers else 0


if __name__ == "__main__":
    sys.exit(main())
