# SPDX-License-Identifier: Apache-2.0
"""The few-rows kernel: when it is taken; on a GPU what the dense tests do not reach."""

import itertools
from dataclasses import replace

import pytest
import torch
from mla_kernels import checks, mla_decode
from mla_kernels.arch import ARCHS, KB, MAX_REGISTERS_PER_THREAD, device_arch
from mla_kernels.decode.triton import launcher, tiles
from mla_kernels.decode.triton import parts as portable_parts
from mla_kernels.decode.triton.few_rows.tiles import choose_few_rows, few_rows_tile
from mla_kernels.decode.triton.tiles import ctas_per_sm, tile_rows
from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims
from mla_kernels.testing.cases import decode_case, scales_to_powers_of_two
from mla_kernels.testing.decoded import assert_decoded

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def tile(rows, kv_format, sm=90, dims=MlaDims()):
    arch = ARCHS[sm]
    return few_rows_tile(tile_rows(rows, arch), dims, kv_format, arch)


@pytest.mark.parametrize("kv_format", ["fp8", "fp8_ds_mla"])
def test_few_rows_of_codes_have_a_tile_where_the_gpu_converts_them(kv_format):
    for sm in (89, 90, 100, 120):
        assert tile(6, kv_format, sm).rows == 16
        assert tile(32, kv_format, sm).rows == 32
    for sm in (80, 86):
        assert tile(16, kv_format, sm) is None
    assert tile(33, kv_format) is None  # 64 rows are wgmma's


def test_bf16_has_a_tile_where_it_was_measured_to_be_faster():
    assert tile(32, "float").rows == 32
    assert tile(16, "float") is None and tile(32, "float", 80) is None


def test_dims():
    assert tile(16, "fp8", dims=MlaDims(256, 32)) is not None
    # Two scales make a row no multiple of 16 bytes.
    assert Fp8DsMlaLayout(MlaDims(256, 32)).row_bytes % 16
    assert tile(16, "fp8_ds_mla", dims=MlaDims(256, 32)) is None


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("kv_format", ["float", "fp8", "fp8_ds_mla"])
def test_only_what_was_compared_on_a_gpu_is_taken(rows, kv_format):
    args = rows, MlaDims(), kv_format, ARCHS[90]
    assert (choose_few_rows(*args) is None) is ((rows, kv_format) == (16, "float"))
    assert choose_few_rows(*args, rescale="amla") is None
    assert choose_few_rows(*args, block_size=32) is None
    assert choose_few_rows(*args, dtype=torch.float16) is None
    assert choose_few_rows(rows, MlaDims(256, 32), kv_format, ARCHS[90]) is None


@pytest.mark.parametrize("sm", [89, 90, 100, 120])
def test_rings_and_registers_fit(sm):
    arch = ARCHS[sm]
    for rows in (16, 32):
        for kv_format, row_bytes in (("float", 1152), ("fp8", 576), ("fp8_ds_mla", 656)):
            found = tile(rows, kv_format, sm)
            if found is not None:
                ring = found.stages * found.tokens * row_bytes
                assert found.ctas * (ring + 8 * KB) <= arch.shared_memory_per_sm
                assert found.tokens >= found.rows  # q passes through a slot of the ring
                assert found.max_registers * found.warps * 32 * found.ctas <= 65536
                assert found.max_registers <= MAX_REGISTERS_PER_THREAD
                alone = sm == 90 and kv_format == "fp8"  # few_rows_fp8
                assert ctas_per_sm(rows, arch, kv_format) == (1 if alone else found.ctas)


@pytest.mark.parametrize(
    ("shape", "dtype", "start", "aligned"),
    [
        ((4, 64, 576), torch.float8_e4m3fn, 0, True),
        ((4, 64, 576), torch.float8_e4m3fn, 8, False),
        ((4, 64, 656), torch.uint8, 0, True),
        ((4, 64, 328), torch.uint8, 0, False),
        ((4, 64, 576), torch.bfloat16, 8, True),
    ],
)
def test_which_caches_have_aligned_rows(shape, dtype, start, aligned):
    count = shape[0] * shape[1] * shape[2]
    cache = torch.empty(start + count, dtype=dtype)[start:].view(shape)
    assert checks.rows_aligned(cache) is aligned


def test_gpus_with_less_shared_memory_have_tiles_of_32_tokens():
    for rows, kv_format in itertools.product((16, 32), ("fp8", "fp8_ds_mla")):
        assert {tile(rows, kv_format, sm).tokens for sm in (89, 120)} == {32}
        assert tile(rows, kv_format, 90).tokens == 64


@pytest.fixture
def everything(monkeypatch):
    """Takes the kernel wherever there is a tile, compared before or not."""

    def choose(rows, dims, kv_format, arch, rescale="pow2", *_):
        return few_rows_tile(rows, dims, kv_format, arch) if rescale == "pow2" else None

    monkeypatch.setattr(launcher, "choose_few_rows", choose)
    monkeypatch.setattr(tiles, "choose_few_rows", choose)


def check(case, **options):
    out, lse = mla_decode(
        *case.args, **case.options, **options, impl="triton", out=case.poisoned_out()
    )
    assert_decoded(case, out, lse)


CACHES = {
    "bf16": {},
    "fp8": {"cache_dtype": torch.float8_e4m3fn, "kv_scale": 0.02},
    "fp8_ds_mla": {"cache_dtype": torch.uint8},
}


class TestTilesOfSmallGpus:
    """Those of sm_89 and sm_120, on whatever GPU is there."""

    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def less_shared_memory(self, monkeypatch):
        """This GPU, with the shared memory of sm_89 and its tensor cores, so that neither wgmma
        nor a kernel for Hopper alone is taken."""
        here, small = device_arch(torch.device("cuda", torch.cuda.current_device())), ARCHS[89]
        if not here.e4m3_convert:
            pytest.skip("needs a GPU that converts e4m3")
        arch = replace(small, programmatic_launch=here.programmatic_launch)
        for module in (launcher, portable_parts):
            monkeypatch.setattr(module, "arch_of", lambda device: arch)

    @pytest.mark.parametrize(("heads", "s_q"), [(5, 1), (16, 1), (8, 2), (32, 1), (8, 4)])
    @pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
    def test_against_the_definition(self, monkeypatch, cache, heads, s_q):
        used = []

        def launch(call, tile, *args):
            used.append((tile.rows, tile.tokens))
            few_rows(call, tile, *args)

        few_rows = launcher.launch_few_rows
        monkeypatch.setattr(launcher, "launch_few_rows", launch)
        case = decode_case(
            [5, 300, 0, 64, 1000, 33], num_heads=heads, s_q=s_q, q_std=0.5, device="cuda",
            **CACHES[cache],
        )  # fmt: skip
        check(case)
        check(case, deterministic=True)
        assert used == [(16 if heads * s_q <= 16 else 32, 32)] * 2


@pytest.mark.usefixtures("everything")
class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("block_size", [16, 32, 64, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("cache", CACHES)
    @pytest.mark.parametrize(("heads", "s_q"), [(5, 1), (8, 4)])
    def test_blocks_and_dtypes(self, cache, dtype, block_size, heads, s_q):
        case = decode_case(
            [5, 300, 0, 64, 1000], num_heads=heads, s_q=s_q, dtype=dtype, q_std=0.5,
            block_size=block_size, device="cuda", **CACHES[cache],
        )  # fmt: skip
        check(case)
        check(case, deterministic=True)

    @pytest.mark.parametrize("heads", [16, 32])
    def test_scales_far_apart(self, heads):
        """fp8_ds_mla: tokens and groups whose scales differ by powers of ten."""
        case = decode_case(
            [700, 130], num_heads=heads, q_std=0.05, device="cuda", cache_dtype=torch.uint8
        )
        scales = case.kv_cache.view(torch.float32)[..., 128:132]
        exponent = torch.randint(-3, 2, scales.shape, device="cuda")
        used = torch.isfinite(scales) & (scales.abs() < 1e3)
        scales.copy_(torch.where(used, scales * 10.0**exponent, scales))
        check(case)

    @pytest.mark.parametrize("heads", [16, 32])
    @pytest.mark.parametrize("cache", CACHES)
    def test_scores_that_grow(self, cache, heads):
        """The reference moves many times; P never overflows fp16.

        Scales are powers of two: with scores this large the result would show that the reference
        rounds K to q's dtype and the kernel does not.
        """
        options = CACHES[cache] | ({"kv_scale": 2.0**-6} if cache == "fp8" else {})
        case = decode_case([900], num_heads=heads, q_std=1.0, k_std=2.0, device="cuda", **options)
        if cache == "fp8_ds_mla":
            scales_to_powers_of_two(case.kv_cache)
        case.q[..., 512:] *= torch.linspace(0, 3, 64, device="cuda").to(case.q.dtype)
        check(case)
