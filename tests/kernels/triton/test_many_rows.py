# SPDX-License-Identifier: Apache-2.0
"""The portable kernel's form for more than 16 rows on sm_90: when it is taken; on a GPU what the
dense tests do not reach."""

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.arch import ARCHS
from mla_kernels.decode.triton.many_rows.launcher import takes_many_rows
from mla_kernels.layouts import MlaDims
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.decoded import assert_decoded

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs sm_90",
    ),
]


def takes(q=(2, 1, 64, 576), cache=(4, 64, 576), dtype=torch.bfloat16, **changed):
    options = {"dims": MlaDims(), "arch": ARCHS[90], "rescale": "pow2"} | changed
    return takes_many_rows(torch.empty(q, dtype=dtype), torch.empty(cache, dtype=dtype), **options)


def test_more_than_16_rows_of_16_bits_on_sm_90():
    assert takes() and takes(dtype=torch.float16)
    assert takes(q=(2, 4, 16, 576)) and takes(q=(2, 1, 128, 576)) and takes(q=(2, 3, 11, 576))
    assert takes(q=(2, 1, 17, 576)) and takes(q=(2, 2, 16, 576))
    for sm in (80, 86, 89, 100, 120):
        assert not takes(arch=ARCHS[sm])


def test_what_others_serve():
    assert not takes(q=(2, 1, 16, 576)) and not takes(q=(2, 4, 4, 576))  # few rows
    assert not takes(rescale="amla") and not takes(rescale="flash")
    assert not takes(cache=(4, 32, 576)) and not takes(cache=(4, 128, 576))
    assert not takes(dims=MlaDims(256, 32))
    q = torch.empty(2, 1, 64, 576, dtype=torch.bfloat16)
    options = {"dims": MlaDims(), "arch": ARCHS[90], "rescale": "pow2"}
    codes = torch.empty(4, 64, 576, dtype=torch.float8_e4m3fn)
    assert not takes_many_rows(q, codes, **options)


def test_memory_that_tma_does_not_take():
    options = {"dims": MlaDims(), "arch": ARCHS[90], "rescale": "pow2"}
    q = torch.empty(2, 1, 64, 576, dtype=torch.bfloat16)
    cache = torch.empty(4, 64, 576, dtype=torch.bfloat16)
    wide = torch.empty(4, 64, 640, dtype=torch.bfloat16)[..., :576]
    assert not takes_many_rows(q, wide, **options)
    assert not takes_many_rows(torch.empty(2, 64, 2, 576).transpose(1, 2), cache, **options)
    shifted = torch.empty(1 + cache.numel(), dtype=torch.bfloat16)[1:].view(cache.shape)
    assert not takes_many_rows(q, shifted, **options)


def check(case, **options):
    out, lse = mla_decode(
        *case.args, **case.options, **options, impl="triton", out=case.poisoned_out()
    )
    assert_decoded(case, out, lse)
    return out


class TestOnAGpu:
    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def launches(self, count_launches):
        """How often the kernel was launched."""
        return count_launches("launch_many_rows")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("heads", "s_q"), [(17, 1), (32, 1), (64, 1), (80, 1), (128, 2), (9, 5)]
    )
    def test_dtypes_and_rows(self, launches, dtype, heads, s_q):
        lengths = [0, 1, 63, 64, 65, 127, 0, 129, 700, 9000]
        check(decode_case(lengths, num_heads=heads, s_q=s_q, dtype=dtype, device="cuda"))
        assert len(launches) == 1

    @pytest.mark.parametrize("std", [1.0, 3.0, 10.0])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_references_that_move(self, launches, dtype, std):
        case = decode_case(
            [4096, 777], num_heads=64, q_std=std, k_std=std, dtype=dtype, device="cuda"
        )
        check(case)
        assert len(launches) == 1

    def test_many_requests_a_program_and_the_same_bits_again(self, launches):
        """Short requests: the loader is a request ahead of the scores most of the time."""
        case = decode_case([1 + 37 * i % 200 for i in range(700)], num_heads=64, device="cuda")
        first = check(case)
        for _ in range(10):
            assert torch.equal(first, check(case))
        assert len(launches) == 11

    def test_another_layout_goes_to_the_general_kernel(self, launches):
        case = decode_case([5, 300], num_heads=64, block_size=32, device="cuda")
        check(case)
        assert not launches
