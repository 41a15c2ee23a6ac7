# SPDX-License-Identifier: Apache-2.0
"""The few-rows kernel with a warp that loads: when it is taken; on a GPU what the dense tests do
not reach."""

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.arch import ARCHS
from mla_kernels.decode.triton.few_rows.tiles import few_rows_tile
from mla_kernels.decode.triton.few_rows_fp8.launcher import (
    CONFIGS,
    OPTIONS,
    takes_few_rows_fp8,
)
from mla_kernels.decode.triton.tiles import ctas_per_sm
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
CODES = torch.float8_e4m3fn
ROWS = [(1, 1), (5, 1), (16, 1), (8, 2), (5, 3), (2, 8), (17, 1), (32, 1), (16, 2), (7, 4)]


def takes(cache, rows=16, sm=90):
    tile = few_rows_tile(rows, MlaDims(), "fp8", ARCHS[sm])
    return takes_few_rows_fp8(cache, tile, ARCHS[sm])


def test_few_rows_over_codes_on_sm_90():
    cache = torch.empty(4, 64, 576, dtype=CODES)
    assert takes(cache) and takes(cache, rows=32)
    for sm in (89, 100, 120):
        assert not takes(cache, sm=sm)


def test_what_the_few_rows_kernel_serves():
    assert not takes(torch.empty(4, 64, 656, dtype=torch.uint8))
    assert not takes(torch.empty(4, 32, 576, dtype=CODES))
    assert not takes(torch.empty(4, 64, 288, dtype=CODES))
    assert not takes(torch.empty(4, 64, 640, dtype=CODES)[..., :576])
    shifted = torch.empty(8 + 4 * 64 * 576, dtype=CODES)[8:].view(4, 64, 576)
    assert not takes(shifted)


@pytest.mark.parametrize("rows", CONFIGS)
def test_the_plan_has_parts_for_as_many_programs_as_an_sm_holds(rows):
    tile, config = few_rows_tile(rows, MlaDims(), "fp8", ARCHS[90]), CONFIGS[rows]
    # The loader has a warpgroup of its own.
    warps = OPTIONS[rows]["num_warps"] * config["TEAMS"] + 4
    registers = warps * 32 * OPTIONS[rows]["maxnreg"]
    assert tile.rows == config["BM"] == rows
    assert ctas_per_sm(rows, ARCHS[90], "fp8") == 1
    assert registers <= 65536
    # What the teams take over from the loader's warps is there.
    handed_out = config["TEAMS"] * config["TEAM_REGS"] * 8 * 32 + config["LOADER_REGS"] * 4 * 32
    assert handed_out <= registers


def check(case, **options):
    out, lse = mla_decode(
        *case.args, **case.options, **options, impl="triton", out=case.poisoned_out()
    )
    assert_decoded(case, out, lse)
    return out


def codes_case(lengths, **options):
    return decode_case(
        lengths,
        **{"q_std": 0.5, "device": "cuda", "cache_dtype": CODES, "kv_scale": 0.02} | options,
    )


class TestOnAGpu:
    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def launches(self, count_launches):
        """How often the kernel was launched."""
        return count_launches("launch_few_rows_fp8")

    @pytest.mark.parametrize(("heads", "s_q"), ROWS)
    def test_rows(self, launches, heads, s_q):
        """Cache rows past a request's end hold NaN. Of one tile the second team gets none."""
        lengths = [0, 1, 63, 64, 65, 127, 0, 129, 192, 700, 9000]
        case = codes_case(lengths, num_heads=heads, s_q=s_q)
        check(case)
        check(case, deterministic=True)
        assert len(launches) == 2

    @pytest.mark.parametrize("heads", CONFIGS)
    @pytest.mark.parametrize("std", [1.0, 3.0])
    def test_references_that_move(self, launches, std, heads):
        """The scale is a power of two, as in test_few_rows.py."""
        case = codes_case([4096, 777], num_heads=heads, q_std=std, k_std=std, kv_scale=2.0**-6)
        check(case)
        assert len(launches) == 1

    def test_a_scale_on_the_gpu(self, launches):
        case = codes_case([300, 64, 1], num_heads=16)
        case.options["kv_scale"] = torch.tensor(0.02, device="cuda")
        check(case)
        assert len(launches) == 1

    @pytest.mark.parametrize("heads", CONFIGS)
    def test_many_requests_a_program_and_the_same_bits_again(self, launches, heads):
        """Short requests: the loader is a request ahead of the scores most of the time."""
        case = codes_case([1 + 37 * i % 200 for i in range(1400)], num_heads=heads)
        first = check(case)
        for _ in range(10):
            assert torch.equal(first, check(case))
        assert len(launches) == 11

    def test_a_long_request(self, launches):
        check(codes_case([131072], num_heads=16))
        assert len(launches) == 1

    def test_another_layout_goes_to_the_few_rows_kernel(self, launches):
        check(codes_case([5, 300], num_heads=16, block_size=32))
        assert not launches
