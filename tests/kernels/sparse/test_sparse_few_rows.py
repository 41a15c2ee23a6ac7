# SPDX-License-Identifier: Apache-2.0
"""The sparse kernel for few heads: which batches have it, and on a GPU what its step could lose."""

import pytest
import torch
from mla_kernels import mla_sparse_attention
from mla_kernels.arch import AMD, ARCHS, KB
from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse import api
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.sparse.triton import launcher, tiles
from mla_kernels.sparse.triton.few_rows.tiles import choose_few_rows, few_rows_tile
from mla_kernels.testing.metrics import SHORT_BAR, measure
from mla_kernels.triton_common.record import Recordings

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("sm", sorted(ARCHS))
def test_which_batches_it_takes(sm):
    arch = ARCHS[sm]
    for heads in (1, 16, 32):
        found = choose_few_rows(heads, MlaDims(), "fp8_ds_mla", arch)
        assert (found is not None) is arch.e4m3_convert
    assert choose_few_rows(33, MlaDims(), "fp8_ds_mla", arch) is None
    assert choose_few_rows(16, MlaDims(), "fp8", arch) is None
    assert choose_few_rows(16, MlaDims(), "fp8_ds_mla", arch, torch.float16) is None
    assert choose_few_rows(16, MlaDims(256, 32), "fp8_ds_mla", arch) is None
    assert few_rows_tile(AMD) is None


@pytest.mark.parametrize("sm", [89, 90, 100, 120])
def test_ring_and_registers_fit(sm):
    tile = few_rows_tile(ARCHS[sm])
    ring = tile.stages * tile.tokens * (656 + 4)
    assert tile.ctas * (ring + 26 * KB) <= ARCHS[sm].shared_memory_per_sm
    assert tile.tokens >= tile.rows  # q passes through a slot of the ring
    assert tile.max_registers * tile.warps * 32 * tile.ctas <= 65536


def test_few_programs_have_an_sm_each(monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETED_SMS", 132)
    tile, cpu = few_rows_tile(ARCHS[90]), torch.device("cpu")
    splits = [tiles.choose_split(T, 16, 2048, tile, cpu).splits for T in (1, 32, 128, 4096)]
    assert splits == [32, 4, 2, 1]


def make_case(T, heads, exponents=(0, 1), q_std=0.5):
    """(q, kv_cache, slots, scales of the rows): scales differ by powers of ten."""
    g = torch.Generator("cuda").manual_seed(T)
    rows = torch.randn(64 * 64, 576, generator=g, device="cuda").bfloat16()
    kv = encode_rows(rows[:, :512], rows[:, 512:], torch.uint8, None).view(64, 64, 656)
    scales = kv.view(torch.float32)[..., 128:132]
    exponent = torch.randint(*exponents, scales.shape, generator=g, device="cuda")
    scales.copy_(scales * 10.0**exponent)
    q = (torch.randn(T, heads, 576, generator=g, device="cuda") * q_std).bfloat16()
    slots = torch.randint(0, 64 * 64, (T, 700), generator=g, device="cuda").int()
    slots[:, 5::7] = -1
    return q, kv, slots, scales


def to_powers_of_two(scales):
    """With scores far apart the result would show that the reference rounds K to q's dtype and the
    kernel does not (docs/numerics.md)."""
    scales.copy_(scales.log2().round().exp2())


def check(q, kv, slots, taken, **options):
    out = q.new_full((*q.shape[:2], 512), torch.nan)
    lse = q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
    mla_sparse_attention(q, kv, slots, scale=576**-0.5, impl="triton", out=out, lse=lse, **options)
    assert taken, "the kernel did not run"
    want, want_lse = mla_sparse_attention_reference(
        q, kv, slots, scale=576**-0.5, kv_lora_rank=512, kv_scale=None,
        lengths=options.get("lengths"), sink=options.get("sink"),
    )  # fmt: skip
    assert SHORT_BAR.failures(measure(out, want)) == []
    seen = torch.isfinite(want_lse)
    assert torch.equal(seen, torch.isfinite(lse))
    assert (lse - want_lse)[seen].abs().max() < 2**-8


class TestOnAGpu:
    pytestmark = gpu

    @pytest.fixture
    def taken(self, monkeypatch):
        """Launches of the kernel."""
        calls, launch = [], launcher.launch_few_rows

        def record(*args, **options):
            calls.append(args)
            launch(*args, **options)

        monkeypatch.setattr(launcher, "launch_few_rows", record)
        monkeypatch.setattr(api, "_RECORDINGS", Recordings())  # a replay passes the launcher
        return calls

    @pytest.mark.parametrize("heads", [3, 16, 32])
    @pytest.mark.parametrize("T", [1, 40, 600])
    def test_scales_far_apart(self, taken, heads, T):
        q, kv, slots, _ = make_case(T, heads, (-3, 2), q_std=0.05)
        check(q, kv, slots, taken)

    @pytest.mark.parametrize("heads", [5, 16])
    def test_a_row_of_zero_scales_counts(self, taken, heads):
        """Its latent is zero, its rope part is not, and it is no hole."""
        q, kv, slots, scales = make_case(3, heads)
        scales.view(-1, 4)[slots[0, :300][slots[0, :300] >= 0].long()] = 0.0
        check(q, kv, slots, taken)

    @pytest.mark.parametrize("heads", [1, 16])
    def test_scores_that_grow(self, taken, heads):
        """The reference moves many times; P never overflows fp16."""
        q, kv, slots, scales = make_case(2, heads, q_std=1.0)
        growth = torch.linspace(0.05, 6, 700, device="cuda")
        order = slots[0].clamp(min=0).long()
        scales.view(-1, 4)[order] = scales.view(-1, 4)[order] * growth[:, None]
        to_powers_of_two(scales)
        check(q[:1], kv, slots[:1], taken)

    @pytest.mark.parametrize("T", [1, 40])
    def test_a_needle_takes_all_the_weight(self, taken, T):
        q, kv, slots, scales = make_case(T, 16)
        scales.view(-1, 4)[slots[0, 650].long()] *= 200.0
        to_powers_of_two(scales)
        sink = torch.linspace(-3, 3, 16, device="cuda")
        lengths = torch.full((T,), 660, dtype=torch.int32, device="cuda")
        check(q, kv, slots, taken, sink=sink, lengths=lengths)

    @pytest.mark.parametrize("page", [16, 32, 128])
    def test_pages(self, taken, page):
        q, kv, slots, _ = make_case(9, 16)
        rows = kv.view(-1, 656)[: 4096 // page * page]
        slots[slots >= len(rows)] = -1
        gaps = torch.full((len(rows) // page, page + 3, 656), 127, dtype=torch.uint8, device="cuda")
        gaps[:, :page] = rows.view(-1, page, 656)
        check(q, gaps[:, :page], slots, taken)
