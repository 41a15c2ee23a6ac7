# SPDX-License-Identifier: Apache-2.0
"""Run by test_offline.py: compiles kernels with planted faults, prints their problems as JSON."""

import json

import triton
import triton.language as tl
from mla_kernels.arch import ARCHS
from mla_kernels.offline.check import check
from mla_kernels.offline.compiler import compile_spec
from mla_kernels.offline.spec import KernelSpec
from mla_kernels.triton_common.gluon_compat import reinterpret
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, K)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(n):
        a = tl.load(a_ptr + step * BLOCK * K + i * K + k[None, :])
        b = tl.load(b_ptr + step * BLOCK * K + k[:, None] * BLOCK + j)
        acc = tl.dot(a, b, acc=acc)
    tl.store(c_ptr + i * BLOCK + j, acc)


@triton.jit
def copy(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(c_ptr + i, tl.load(a_ptr + i).to(tl.float32))


@triton.jit
def broken(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr, K: tl.constexpr):
    tl.store(c_ptr, tl.arange(0, 3))


LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def view(a_ptr, b_ptr, c_ptr, n, BLOCK: gl.constexpr, K: gl.constexpr):
    """Of a tile of 2 * K bf16, or of its first half if K is 64, as BLOCK fp32."""
    tile = gl.allocate_shared_memory(gl.bfloat16, [2 * K], LINE)
    if K == 64:
        tile = tile.slice(0, K)
    numbers = reinterpret(tile, gl.float32, [BLOCK], LINE)
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, BLOCK, THREADS)
    gl.store(c_ptr + i, numbers.load(THREADS))


def problems(fn, sm=86, block=64, k=32, **options):
    pointers = ("a_ptr", "b_ptr", "c_ptr")
    spec = KernelSpec(
        name=fn.__name__,
        fn=fn,
        signature={"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "n": "i32"},
        constexprs={"BLOCK": block, "K": k},
        aligned=pointers,
        options={"num_warps": 4, **options},
        tensor_core="any",
    )
    return check(compile_spec(spec, ARCHS[sm]))


print(
    json.dumps(
        {
            "sound": problems(matmul),
            "few registers": problems(matmul, block=128, maxnreg=64),
            "large tile": problems(matmul, block=128, k=64, num_warps=8, num_stages=5),
            "bad code": problems(broken),
            "no tensor core": problems(copy),
            "view": problems(view, block=32, k=32),
            "view of a part": problems(view, block=16, k=32),
            "view of a slice": problems(view, block=32, k=64),
        }
    )
)
