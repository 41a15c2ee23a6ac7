# SPDX-License-Identifier: Apache-2.0
"""`write_kv_cache`: every byte of a row, skipped slots, refusals."""

import struct

import pytest
import torch
from mla_kernels import write_kv_cache
from mla_kernels.cache.rows import as_words, rows_as_float
from mla_kernels.layouts import Fp8DsMlaLayout

TOKENS, BLOCKS, BLOCK = 9, 4, 64


def sources(dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    kv_c = torch.randn(TOKENS, 512, generator=g) * torch.logspace(-3, 3, TOKENS)[:, None]
    kv_c[2, 128:256] = 0.0
    return kv_c.to(dtype), torch.randn(TOKENS, 64, generator=g).to(dtype)


def slots():
    s = torch.tensor([3, -1, 64, 255, 0, 130, -1, 66, 5])
    return s, s >= 0


def written(dtype, width, kv_scale=None):
    kv_c, k_pe = sources()
    cache = torch.zeros(BLOCKS, BLOCK, width, dtype=torch.uint8)
    cache = cache.view(dtype) if dtype != torch.uint8 else cache
    cache.view(torch.uint8).fill_(0xA5)
    slot_mapping, keep = slots()
    write_kv_cache(kv_c, k_pe, cache, slot_mapping, kv_scale=kv_scale)
    return kv_c, k_pe, cache, slot_mapping[keep], keep


def test_fp8_ds_mla_rows_byte_for_byte():
    kv_c, k_pe, cache, kept, keep = written(torch.uint8, 656)
    rows = cache.flatten(0, 1)[kept]
    for row, c, rope in zip(rows, kv_c[keep].float(), k_pe[keep], strict=True):
        raw = bytes(row.tolist())
        scales = struct.unpack("<4f", raw[512:528])
        for g, scale in enumerate(scales):
            part = c[128 * g : 128 * (g + 1)]
            amax = float(part.abs().max())
            assert scale == pytest.approx(max(amax / 448, 2.0**-126), rel=1e-6)
            codes = row[128 * g : 128 * (g + 1)].clone().view(torch.float8_e4m3fn).float()
            # Half an e4m3 step (2^-4 relative), or half a subnormal one.
            bound = (part.abs() * 2**-4).clamp(min=2.0**-10 * scale) * 1.001
            assert ((codes * scale - part).abs() <= bound).all()
            if amax:
                assert float(codes.abs().max()) == 448.0
        want = struct.pack("<64H", *(rope.view(torch.int16).int() & 0xFFFF).tolist())
        assert raw[528:656] == want


def test_float_rows():
    kv_c, k_pe, cache, kept, keep = written(torch.bfloat16, 2 * 576)
    rows = cache.flatten(0, 1)[kept]
    assert torch.equal(rows, torch.cat([kv_c, k_pe], 1)[keep])


def test_fp8_rows_use_the_scale_and_saturate():
    kv_c, k_pe, cache, kept, keep = written(torch.float8_e4m3fn, 576, kv_scale=0.5)
    rows = cache.flatten(0, 1)[kept].float()
    joined = torch.cat([kv_c, k_pe], 1)[keep].float()
    want = (joined / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(rows, want) and (rows.abs() == 448).any()


@pytest.mark.parametrize(
    ("dtype", "width", "kv_scale"),
    [(torch.bfloat16, 1152, None), (torch.float8_e4m3fn, 576, 0.5), (torch.uint8, 656, None)],
)
def test_nothing_but_the_named_slots_is_touched(dtype, width, kv_scale):
    _, _, cache, kept, _ = written(dtype, width, kv_scale)
    rows = cache.view(torch.uint8).flatten(0, 1)
    others = torch.ones(len(rows), dtype=torch.bool)
    others[kept] = False
    assert (rows[others] == 0xA5).all()


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_caches_from_any_element_on_and_with_gaps(odd):
    """Rows are copied as words where they are aligned, else as bytes."""
    kv_c, k_pe = sources()
    memory = torch.zeros(BLOCKS * BLOCK * 600 + odd, dtype=torch.bfloat16)
    cache = memory[odd:].view(BLOCKS, BLOCK, 600)[..., 8:584]
    slot_mapping, keep = slots()
    write_kv_cache(kv_c, k_pe, cache, slot_mapping)
    blocks, offsets = slot_mapping[keep] // BLOCK, slot_mapping[keep] % BLOCK
    assert torch.equal(cache[blocks, offsets], torch.cat([kv_c, k_pe], 1)[keep])
    assert int((memory != 0).sum()) == int((cache[blocks, offsets] != 0).sum())


def test_all_slots_skipped_and_padding_rows():
    kv_c, k_pe = sources()
    cache = torch.zeros(2, BLOCK, 576, dtype=torch.bfloat16)
    write_kv_cache(kv_c, k_pe, cache, torch.full((TOKENS,), -1))
    assert (cache == 0).all()
    write_kv_cache(kv_c, k_pe, cache, torch.tensor([70], dtype=torch.int32))
    assert torch.equal(cache[1, 6, :512], kv_c[0]) and int((cache != 0).any(-1).sum()) == 1
    for tokens in (TOKENS, 0):  # a step without tokens of its own
        write_kv_cache(kv_c[:tokens], k_pe[:tokens], cache, torch.zeros(0).int())
    assert int((cache != 0).any(-1).sum()) == 1


def test_reading_back():
    kv_c, k_pe, cache, kept, keep = written(torch.uint8, 656)
    back = rows_as_float(cache.flatten(0, 1)[kept], torch.bfloat16, 512, 576)
    error = (back[:, :512].float() - kv_c[keep].float()).norm() / kv_c[keep].float().norm()
    assert error < 0.04
    assert torch.equal(back[:, 512:], k_pe[keep])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(k_pe=a["k_pe"][:3]), r"k_pe of shape \[9, rope\]"),
        (lambda a: a.update(k_pe=a["k_pe"].float()), r"k_pe.dtype in .*float32"),
        (lambda a: a.update(k_pe=a["k_pe"][:, :0]), r"rope dim \(k_pe.shape\[1\]\) in 1.*got 0"),
        (lambda a: a.update(kv_c=a["kv_c"][:, :0]), r"kv_lora_rank .* in 1.*got 0"),
        (lambda a: a.update(kv_cache=a["kv_cache"].int()), r"kv_cache.dtype in .*int32"),
        (lambda a: a.update(kv_cache=a["kv_cache"][..., :99]), r"576\], got .*99"),
        (
            lambda a: a.update(slot_mapping=torch.zeros(10).long()),
            r"slot_mapping in 0\.\.9, got 10",
        ),
        (lambda a: a.update(slot_mapping=torch.zeros(9)), r"slot_mapping.dtype in .*float32"),
        (
            lambda a: a.update(slot_mapping=torch.arange(18)[::2]),
            r"slot_mapping with a contiguous.*\(2,\)",
        ),
        (lambda a: a.update(impl="hopper"), r"impl of write_kv_cache in .*got 'hopper'"),
        (
            lambda a: a.update(slot_mapping=torch.arange(8, -1, -1) * 2 * BLOCK // 8),
            rf"slot_mapping below {2 * BLOCK} .*got {2 * BLOCK} for token 0",
        ),
        (lambda a: a.update(kv_cache=a["kv_cache"][:0]), r"slot_mapping below 0 .*got 8"),
        (lambda a: a.update(kv_c=None), "kv_c to be a tensor, got NoneType"),
        (
            lambda a: a.update(
                kv_cache=a["kv_cache"].to(torch.float8_e4m3fn), kv_scale=float("nan")
            ),
            "finite kv_scale above 0, got nan",
        ),
    ],
)
def test_refusals(change, message):
    kv_c, k_pe = sources()
    call = {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "kv_cache": torch.zeros(2, BLOCK, 576, dtype=torch.bfloat16),
        "slot_mapping": torch.arange(9),
    }
    change(call)
    with pytest.raises(ValueError, match=message):
        write_kv_cache(**call)
    assert not call["kv_cache"].view(torch.uint8).any()


def test_layout_numbers():
    layout = Fp8DsMlaLayout()
    assert (layout.scale_offset, layout.rope_offset, layout.row_bytes) == (512, 528, 656)


def test_a_nan_of_a_group_is_for_itself_alone():
    """Its group has the scale of the others, which keep their codes."""
    kv_c, k_pe = torch.randn(1, 512), torch.randn(1, 64)
    kv_c[0, 2] = 0.0
    cache = torch.zeros(2, 1, 64, 656, dtype=torch.uint8)
    slot = torch.zeros(1, dtype=torch.int64)
    write_kv_cache(kv_c, k_pe, cache[0], slot)
    kv_c[0, 2] = torch.nan
    write_kv_cache(kv_c, k_pe, cache[1], slot)
    plain, with_nan = cache[:, 0, 0]
    assert with_nan[2].item() & 0x7F == 0x7F
    differ = (plain != with_nan).nonzero().flatten().tolist()
    assert differ == [2]


@pytest.mark.parametrize(
    ("dtype", "width", "row", "start", "words"),
    [
        (torch.bfloat16, 576, 576, 0, torch.int64),
        (torch.float8_e4m3fn, 576, 576, 0, torch.int64),
        (torch.uint8, 656, 656, 8, torch.int64),
        (torch.float32, 576, 576, 2, torch.int64),
        (torch.bfloat16, 574, 576, 0, torch.uint8),
        (torch.bfloat16, 576, 578, 0, torch.uint8),
        (torch.bfloat16, 576, 576, 2, torch.uint8),
        (torch.float32, 576, 576, 1, torch.uint8),
        (torch.uint8, 656, 660, 0, torch.uint8),
    ],
)
def test_rows_are_copied_in_the_widest_words_that_fit(dtype, width, row, start, words):
    memory = torch.arange(4 * 64 * 2 * row + 8, dtype=torch.int32).to(torch.uint8)
    memory = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    cache = memory.as_strided((2, 16, width), (16 * row, row, 1), start)
    found = as_words(cache)
    assert found.dtype == words
    assert torch.equal(found.contiguous().view(torch.uint8), cache.contiguous().view(torch.uint8))
