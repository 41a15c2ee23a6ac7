# SPDX-License-Identifier: Apache-2.0
"""e4m3 conversions against torch, over every code and around every rounding boundary."""

import pytest
import torch
import triton
import triton.language as tl
from mla_kernels.triton_common.fp8 import e4m3_to_f32, e4m3_to_float, f32_to_e4m3

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
HARDWARE = [False, pytest.param(True, marks=[pytest.mark.gpu, NO_GPU])]


@triton.jit
def decode_kernel(code_ptr, f32_ptr, bf16_ptr, f16_ptr, HARDWARE: tl.constexpr):
    i = tl.arange(0, 256)
    code = tl.load(code_ptr + i)
    tl.store(f32_ptr + i, e4m3_to_f32(code, HARDWARE))
    tl.store(bf16_ptr + i, e4m3_to_float(code, tl.bfloat16, HARDWARE))
    tl.store(f16_ptr + i, e4m3_to_float(code, tl.float16, HARDWARE))


@triton.jit
def encode_kernel(x_ptr, code_ptr, n, BLOCK: tl.constexpr, HARDWARE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(code_ptr + i, f32_to_e4m3(x, HARDWARE), mask=i < n)


def encode(x, hardware):
    code = torch.full(x.shape, 0x55, dtype=torch.uint8, device=x.device)
    encode_kernel[(triton.cdiv(len(x), 4096),)](x, code, len(x), BLOCK=4096, HARDWARE=hardware)
    return code


@pytest.mark.parametrize("hardware", HARDWARE)
def test_decode_is_exact_for_all_256_codes(device, hardware):
    code = torch.arange(256, dtype=torch.uint8, device=device)
    outs = [
        torch.zeros(256, dtype=t, device=device)
        for t in (torch.float32, torch.bfloat16, torch.float16)
    ]
    decode_kernel[(1,)](code, *outs, HARDWARE=hardware)
    want = code.view(torch.float8_e4m3fn)
    for out in outs:
        torch.testing.assert_close(out, want.to(out.dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(outs[0][128]), "-0 keeps its sign"


@pytest.mark.parametrize("hardware", HARDWARE)
def test_encode_rounds_to_nearest_even_around_every_boundary(device, hardware):
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middle = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([codes, middle]).float()
    near = torch.cat([torch.nextafter(points, torch.tensor(v)) for v in (-1e9, 1e9)])
    x = torch.cat([points, near])
    x = torch.cat([x, -x, torch.randn(20000) * torch.logspace(-6, 2.6, 20000)]).to(device)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encode(x, hardware), want)


@pytest.mark.parametrize("hardware", HARDWARE)
def test_encode_saturates_and_keeps_nan(device, hardware):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [449.0, 464.0, 1e30, inf, -449.0, -inf, nan, 1e-30, -1e-45, 0.0], device=device
    )
    want = [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x00, 0x80, 0x00]
    assert encode(x, hardware).tolist() == want
