# SPDX-License-Identifier: Apache-2.0
"""fp16 queries over caches of fp8 codes with one scale, in the portable kernel."""

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.decoded import assert_decoded


@pytest.mark.parametrize("heads", [4, 32, 128])
@pytest.mark.parametrize("s_q", [1, 2])
def test_of_one_scale(heads, s_q, device):
    case = decode_case(
        [5, 130, 0], num_heads=heads, s_q=s_q, dtype=torch.float16, device=device,
        cache_dtype=torch.float8_e4m3fn, kv_scale=0.02,
    )  # fmt: skip
    out, lse = mla_decode(*case.args, **case.options, impl="triton", out=case.poisoned_out())
    assert out.dtype == torch.float16
    assert_decoded(case, out, lse)
