# SPDX-License-Identifier: Apache-2.0
"""What the CUDA driver is asked for by Triton and by a replay of the same launch: ends with "same".

Run as a process of its own by test_direct_launch.py, with stub_libcuda.c in the driver's place. The
tensors are on the CPU; nothing reads or writes them.
"""

import ctypes
import sys

import torch
import triton
import triton.language as tl
from mla_kernels.triton_common.launch import launch
from mla_kernels.triton_common.record import Recordings
from triton.backends.nvidia.driver import CudaDriver
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SCRATCH = [8, 8]
BOX = [128, 4, 4, 8, 8]  # the encoded one, shape, strides


@triton.jit
def plain_kernel(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * factor, at < n)


@gluon.jit
def boxed_kernel(box, n, out_ptr, other, LAYOUT: gl.constexpr):
    gl.store(out_ptr + gl.arange(0, 128, LAYOUT), n)


def boxes(x):
    layout = gl.NVMMASharedLayout.get_default_for([8, 64], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [8, 64], layout)


def plain(x, y):
    launch(plain_kernel, (3, 2), x[1:], y, 7, 0.5, BLOCK=128, num_warps=2, launch_pdl=True)


def boxed(x, out):
    layout = gl.BlockedLayout([1], [32], [4], [0])
    named = {"LAYOUT": layout, "launch_cooperative_grid": True}
    launch(boxed_kernel, (5,), boxes(x), 9, out, boxes(x[8:]), **named)


CALLS = {
    "plain": (plain, [8, 8, 4, 4, *SCRATCH]),
    "boxed": (boxed, [*BOX, 4, 8, *BOX, *SCRATCH]),
}


def launches(stub, sizes, call):
    """The bytes that the driver sees of the last launch of `call`."""
    stub.stub_parameters((ctypes.c_size_t * len(sizes))(*sizes), ctypes.c_size_t(len(sizes)))
    call()
    seen = ctypes.create_string_buffer(1 << 15)
    size = stub.stub_launch(seen)
    return seen.raw[:size]


def pretend_a_gpu():
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda device: 4711
    triton.runtime.driver.set_active(CudaDriver())


def compare(name, call, sizes, stub):
    store = Recordings()
    one, other = ([torch.zeros(64, 64, dtype=torch.bfloat16) for _ in "xy"] for _ in range(2))
    by_triton = [launches(stub, sizes, lambda pair=pair: call(*pair)) for pair in (one, other)]
    store.record(name, one, lambda: call(*one))
    replay = store.find(name)
    if replay is None:
        sys.exit(f"{name}: cannot be replayed with Triton {triton.__version__}")
    by_replay = [launches(stub, sizes, lambda pair=pair: replay(pair)) for pair in (one, other)]
    address = other[1].data_ptr().to_bytes(8, "little")
    if address in by_triton[0] or address not in by_triton[1]:
        sys.exit(f"{name}: the driver does not see the operands")
    if by_replay != by_triton:
        sys.exit(f"{name}: {by_replay[1].hex()} where Triton asks for {by_triton[1].hex()}")


def main():
    pretend_a_gpu()
    stub = ctypes.CDLL("libcuda.so.1")
    for name, (call, sizes) in CALLS.items():
        compare(name, call, sizes, stub)
    print("same")


if __name__ == "__main__":
    main()
