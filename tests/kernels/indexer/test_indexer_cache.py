# SPDX-License-Identifier: Apache-2.0
"""Indexer cache writes byte for byte against the page layout, and positions to slots."""

import pytest
import torch
from mla_kernels import positions_to_slots, write_indexer_cache

IMPLS = ["torch", "triton"]
BLOCKS = 3
JUNK = 0xA5


def make_keys(T, dtype, device):
    """Keys over 10 orders of magnitude, a zero key and a NaN."""
    k = torch.randn(T, 128, generator=torch.Generator().manual_seed(0))
    k *= 10.0 ** torch.linspace(-6, 4, T)[:, None]
    k[1] = 0.0
    k[2, 7] = float("nan")
    k[3] = torch.linspace(-224, 224, 128)  # amax / 448 is a power of two
    k[4] = 225.0  # and here just above one
    wide = torch.cat([k, torch.full((T, 8), float("inf"))], 1).to(device, dtype)
    return wide[:, :128]


def expected_page_bytes(k, slots, scale_format):
    pages = torch.full((BLOCKS, 64 * 132), JUNK, dtype=torch.uint8)
    for row, slot in zip(k.cpu().float(), slots.tolist(), strict=True):
        if slot < 0:
            continue
        amax = row[~row.isnan()].abs().max()
        scale = torch.clamp(amax, min=1e-4) / 448.0
        if scale_format == "ue8m0":
            scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
        codes = (row / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        page, offset = divmod(slot, 64)
        codes[row.isnan()] = 0x7F
        pages[page, offset * 128 : offset * 128 + 128] = codes
        start = 64 * 128 + 4 * offset
        pages[page, start : start + 4] = scale.reshape(1).view(torch.uint8)
    return pages.view(BLOCKS, 64, 132)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_pages_hold_codes_then_scales(dtype, scale_format, impl, device):
    T = 20
    k = make_keys(T, dtype, device)
    slots = torch.randperm(BLOCKS * 64, generator=torch.Generator().manual_seed(1))[: T - 2]
    slots[[5, 9]] = -1
    cache = torch.full((BLOCKS, 64, 132), JUNK, dtype=torch.uint8, device=device)
    options = {"scale_format": scale_format, "impl": impl}
    write_indexer_cache(k, cache, slots.to(device), **options)
    assert torch.equal(cache.cpu(), expected_page_bytes(k[: T - 2], slots, scale_format))


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_may_lie_apart(impl, device):
    """A layer's view of one allocation for all layers: pages with a gap between them."""
    k = make_keys(10, torch.bfloat16, device)
    slots = torch.tensor([0, 70, 130, 3, 64, 191, 77, 12, 128, 9], device=device)
    whole = torch.full((BLOCKS, 2, 64, 132), JUNK, dtype=torch.uint8, device=device)
    write_indexer_cache(k, whole[:, 1], slots, impl=impl)
    assert torch.equal(whole[:, 1].cpu(), expected_page_bytes(k, slots, "ue8m0"))
    assert (whole[:, 0] == JUNK).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16_cache_and_int32_slots(impl, device):
    k = make_keys(6, torch.float32, device)
    slots = torch.tensor([4, -1, 150, 64, 63, 0], dtype=torch.int32, device=device)
    cache = torch.full((BLOCKS, 64, 128), 9.0, dtype=torch.bfloat16, device=device)
    write_indexer_cache(k, cache, slots, impl=impl)
    want = torch.full((BLOCKS * 64, 128), 9.0, dtype=torch.bfloat16)
    for row, slot in zip(k.cpu(), slots.tolist(), strict=True):
        if slot >= 0:
            want[slot] = row.bfloat16()
    torch.testing.assert_close(cache.cpu().view(-1, 128), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_only_padding_writes_nothing(impl, device):
    k = make_keys(5, torch.bfloat16, device)
    for slots in (torch.full((5,), -1, device=device), torch.empty(0, dtype=torch.int64)):
        cache = torch.full((BLOCKS, 64, 132), JUNK, dtype=torch.uint8, device=device)
        write_indexer_cache(k, cache, slots.to(device), impl=impl)
        assert (cache == JUNK).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(3, 64)}, "k_cache of shape .* 64, 68"),
        ({"k": torch.zeros(3, 128, dtype=torch.int8)}, "k.dtype"),
        ({"k_cache": torch.zeros(2, 64, 132)}, "k_cache.dtype"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, "slot_mapping in 0..3, got 4"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping.dtype"),
        ({"slot_mapping": torch.zeros(3, 1).long()}, r"slot_mapping of shape \[N\], got \[3, 1\]"),
        ({"scale_format": "e8m0"}, r"scale_format in \['ue8m0', 'fp32'\], got 'e8m0'"),
    ],
)
def test_write_refusals(change, message):
    args = {
        "k": torch.zeros(3, 128),
        "k_cache": torch.zeros(2, 64, 132, dtype=torch.uint8),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        write_indexer_cache(**{**args, **change})


@pytest.mark.parametrize("impl", IMPLS)
def test_positions_to_slots(impl, device):
    table = torch.tensor([[7, 3, 2**24], [1, 0, 5]], dtype=torch.int32, device=device)
    positions = torch.tensor(
        [[0, 63, 64, -1], [191, 128, -1, -1], [5, 70, 192, 130], [64, 0, 1, -7]],
        dtype=torch.int32,
        device=device,
    )
    uniform = [
        [448, 511, 192, -1],
        [2**30 + 63, 2**30, -1, -1],
        [69, 6, -1, 322],
        [0, 64, 65, -1],
    ]
    assert positions_to_slots(positions, table, impl=impl).tolist() == uniform
    ids = torch.tensor([1, 0, -1, 0], dtype=torch.int32, device=device)
    named = positions_to_slots(positions, table, request_ids=ids, impl=impl).tolist()
    assert named == [[64, 127, 0, -1], uniform[1], [-1] * 4, [192, 448, 449, -1]]
    small = positions_to_slots(positions[:2, :2], table, block_size=100, impl=impl)
    assert small.tolist() == [[700, 763], [91, 28]]
    least = positions_to_slots(positions[:1], table[:1, :1], block_size=1, impl=impl)
    assert least.tolist() == [[7, -1, -1, -1]]
    out = torch.full((5, 4), 9, dtype=torch.int32, device=device)
    assert positions_to_slots(positions, table, out=out[:4], impl=impl).data_ptr() == out.data_ptr()
    assert out.tolist() == [*uniform, [9] * 4]
    assert (positions_to_slots(positions, table[:, :0], out=out[:4], impl=impl) == -1).all()
    assert (out[:4] == -1).all()


def test_positions_to_slots_refusals():
    table = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="multiple of 2 rows"):
        positions_to_slots(torch.zeros(3, 4, dtype=torch.int32), table)
    with pytest.raises(ValueError, match=r"positions\.dtype"):
        positions_to_slots(torch.zeros(2, 4), table)
    positions = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table of shape .*got \[2, 3, 1\]"):
        positions_to_slots(positions, table[..., None])
    with pytest.raises(ValueError, match=r"request_ids of shape \[2\], got \[1\]"):
        positions_to_slots(positions, table, request_ids=positions[0, :1])
    with pytest.raises(ValueError, match=r"block_size in 1\.\..*got 0"):
        positions_to_slots(positions, table, block_size=0)
    for out, message in (
        (positions[:1], r"out of shape \[2, 4\], got \[1, 4\]"),
        (positions.float(), r"out\.dtype"),
        (torch.zeros(2, 8, dtype=torch.int32)[:, ::2], "out"),
    ):
        with pytest.raises(ValueError, match=message):
            positions_to_slots(positions, table, out=out)


def test_nothing_is_recorded_for_gradients():
    cache = torch.zeros(1, 64, 128).bfloat16()
    write_indexer_cache(torch.randn(2, 128).requires_grad_(), cache, torch.arange(2))
    assert not cache.requires_grad
