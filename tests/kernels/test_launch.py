# SPDX-License-Identifier: Apache-2.0
"""What `launch` takes for the same kernel, and what it calls."""

import inspect
import types

import pytest
import torch
import triton
import triton.language as tl
from mla_kernels.triton_common import launch as module
from triton.runtime.jit import JITFunction


class Compiled:
    """Stands in for Triton's compiled kernel."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append((grid, args))


class Kernel(JITFunction):
    """A jitted kernel that compiles nothing and notes what goes through Triton."""

    def __init__(self):
        def kernel(x, n, scale, BLOCK, WIDE=False):
            pass

        self.signature = inspect.signature(kernel)
        self.through_triton, self.direct = [], []

    def __getitem__(self, grid):
        def call(*args, **named):
            self.through_triton.append((grid, args, named))
            return Compiled(self.direct)

        return call


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_READY", {})
    return Kernel()


def call(kernel, x, n=23, scale=1.0, BLOCK=64, **options):
    module.launch(kernel, (3,), x, n, scale, BLOCK=BLOCK, num_warps=4, **options)


def test_the_second_call_of_a_kind_goes_past_triton(kernel):
    x, y = torch.zeros(64), torch.ones(64)
    call(kernel, x)
    call(kernel, y, n=9, scale=2.0)
    assert len(kernel.through_triton) == 1
    ((grid, args),) = kernel.direct
    # All parameters in order, constants and defaults behind; a grid of three.
    assert grid == (3, 1, 1)
    assert args[0] is y and args[1:] == (9, 2.0, 64, False)


def test_no_two_specialisations_share_a_kernel(kernel):
    x = torch.zeros(64)
    kinds = [
        {"x": x},
        {"x": x[1:]},  # not a multiple of 16 bytes
        {"x": x.half()},
        {"x": x, "n": 1},
        {"x": x, "n": 32},
        {"x": x, "n": 2**31},
        {"x": x, "scale": x},  # a pointer where there was a number
        {"x": x, "BLOCK": 128},
        {"x": x, "WIDE": True},
        {"x": x, "launch_pdl": True},
        {"x": descriptor(x, [16], "a")},
        {"x": descriptor(x, [32], "a")},
        {"x": descriptor(x, [16], "b")},
        {"x": descriptor(x.half(), [16], "a")},
    ]
    for kind in [*kinds, *kinds]:
        call(kernel, **kind)
    assert len(kernel.through_triton) == len(kernel.direct) == len(kinds)


LAYOUTS = {"a": object(), "b": object()}


def descriptor(base, block_shape, layout):
    return types.SimpleNamespace(base=base, block_shape=block_shape, layout=LAYOUTS[layout])


def test_amd_gets_no_option_of_nvidia(kernel, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for _ in range(2):  # and Triton looks at every call
        call(kernel, torch.zeros(64), launch_pdl=False, maxnreg=255)
    expected = {"BLOCK": 64, "num_warps": 4, "enable_fp_fusion": True}
    assert [named for *_, named in kernel.through_triton] == [expected] * 2


def test_products_are_fused_whatever_triton_prefers(kernel):
    call(kernel, torch.zeros(64))
    ((_, _, named),) = kernel.through_triton
    assert named["enable_fp_fusion"] is True


def test_another_device_has_its_own(kernel, monkeypatch):
    call(kernel, torch.zeros(64))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    call(kernel, torch.zeros(64))
    assert len(kernel.through_triton) == 2


@triton.jit
def add_kernel(x_ptr, n, k, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + k, mask=at < n)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """Alignments and a length of 1 change what is compiled; every call must hit its own."""
    x = torch.zeros(4096, device="cuda")
    expected = torch.zeros(4096)
    for offset, n, k in [(0, 64, 2), (4, 64, 3), (1, 64, 5), (0, 1, 1), (1, 1, 7), (3, 70, 16)] * 3:
        module.launch(add_kernel, (4,), x[offset:], n, k, BLOCK=32)
        expected[offset : offset + min(n, 128)] += k
    assert torch.equal(x.cpu(), expected)


def test_a_launch_is_on_the_gpu_of_its_arguments(kernel, monkeypatch):
    """As torch does it; torch's current GPU is another one."""

    class Elsewhere(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda:1")

    current = [0]

    class On:
        def __init__(self, gpu):
            self.gpu = gpu

        def __enter__(self):
            current.append(self.gpu)

        def __exit__(self, *_):
            current.pop()

    seen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(module, "_launch", lambda *_: seen.append(current[-1]))
    x = torch.zeros(64)
    y = x.as_subclass(Elsewhere)
    for first in (x, y, descriptor(y, [16], "a")):
        call(kernel, first)
    assert seen == [0, 1, 1] and current == [0]
