# SPDX-License-Identifier: Apache-2.0
"""The indexer's functions refuse what does not fit, and say what does."""

import pytest
import torch
from mla_kernels import (
    indexer_lengths,
    indexer_scores,
    indexer_topk,
    indexer_topk_workspace,
    positions_to_slots,
    write_indexer_cache,
)
from mla_kernels.indexer import workspace

LENGTHS = torch.tensor([5, 70], dtype=torch.int32)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def pages_at(byte):
    """Four pages of an fp8 cache from there on."""
    return torch.zeros(4 * 64 * 132 + byte, dtype=torch.uint8)[byte:].view(4, 64, 132)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": LENGTHS.long()}, "seq_lens.dtype in .*got torch.int64"),
        ({"seq_lens": LENGTHS[None]}, r"seq_lens of shape \[B\], got \[1, 2\]"),
        ({"T": 3}, "T to be a multiple of 2 requests, got 3"),
        ({"T": -2}, "T in 0.*got -2"),
        ({"request_ids": ints(0, 1)}, "positions together with request_ids"),
        ({"positions": ints(0, 1, 2)}, r"positions of shape \[2\], got \[3\]"),
        ({"positions": ints(0, 1).long()}, "positions.dtype in .*got torch.int64"),
        (
            {"positions": ints(0, 1), "request_ids": ints(0, 1).long()},
            "request_ids.dtype in .*got torch.int64",
        ),
        (
            {"positions": ints(0, 1), "request_ids": ints(0, 7)},
            "request_ids below 2, got 7",
        ),
    ],
)
def test_lengths(change, message):
    with pytest.raises(ValueError, match=message):
        indexer_lengths(**{"seq_lens": LENGTHS, "T": 2} | change)


@pytest.mark.parametrize("function", [indexer_scores, indexer_topk])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q to be a tensor, got NoneType"),
        ({"q": torch.zeros(2, 4, 256).bfloat16()[..., ::2]}, "q with a contiguous last"),
        ({"weights": torch.zeros(2, 8)[:, ::2]}, "weights with a contiguous last"),
        ({"weights": torch.zeros(2, 4, device="meta")}, "weights on cpu.*got meta"),
        ({"k_cache": pages_at(0).to("meta")}, "k_cache on cpu.*got meta"),
        ({"q": torch.zeros(2, 0, 128).bfloat16()}, r"heads .* in 1\.\.64, got 0"),
        ({"block_table": TABLE[:, :1]}, "seq_lens up to 64, .*got 70"),
        ({"block_table": TABLE + 1}, r"block_table entries in 0\.\.3, got 4"),
        ({"block_table": TABLE - 1}, r"block_table entries in 0\.\.3, got -1"),
        ({"k_cache": torch.zeros(0, 64, 132, dtype=torch.uint8)}, r"entries in 0\.\.-1, got 0"),
        ({"request_ids": ints(0, 2), "positions": ints(1, 1)}, "request_ids below 2, got 2"),
        ({"request_ids": ints(0, 2), "lengths": ints(1, 1)}, "request_ids below 2, got 2"),
        ({"block_table": TABLE.long()}, "block_table.dtype in .*got torch.int64"),
        ({"seq_lens": LENGTHS.long()}, "seq_lens.dtype in .*got torch.int64"),
        ({"positions": LENGTHS.long()}, "positions.dtype in .*got torch.int64"),
        ({"lengths": LENGTHS.long()}, "lengths.dtype in .*got torch.int64"),
        ({"block_table": [[0, 1]]}, "block_table to be a tensor, got list"),
        ({"positions": ints(0, 1), "lengths": ints(1, 2)}, "positions or lengths, got both"),
        ({"k_cache": pages_at(1)}, r"k_cache at an address .*multiples of 4 bytes, got 0x"),
        ({"seq_lens": LENGTHS.to("meta")}, "seq_lens on cpu.*got meta"),
        ({"lengths": LENGTHS.to("meta")}, "lengths on cpu.*got meta"),
        ({"seq_lens": ints(5, 0, 70)[::2]}, r"seq_lens with a contiguous.*\(2,\)"),
        ({"positions": ints(0, 0, 1)[::2]}, r"positions with a contiguous.*\(2,\)"),
        ({"lengths": ints(0, 0, 1)[::2]}, r"lengths with a contiguous.*\(2,\)"),
        (
            {"request_ids": ints(0, 0, 1)[::2], "positions": ints(1, 1)},
            r"request_ids with a contiguous.*\(2,\)",
        ),
    ],
)
def test_scores_and_topk(function, change, message):
    call = {
        "q": torch.zeros(2, 4, 128).bfloat16(),
        "k_cache": torch.zeros(4, 64, 132, dtype=torch.uint8),
        "weights": torch.zeros(2, 4),
        "block_table": TABLE,
        "seq_lens": LENGTHS,
    }
    if function is indexer_topk:
        call["k"] = 8
    with pytest.raises(ValueError, match=message):
        function(**call | change)


@pytest.mark.parametrize("clean", [torch.tensor(True), torch.ones(2), "no"])
def test_clean(clean):
    args = torch.zeros(2, 4, 128).bfloat16(), pages_at(0), torch.zeros(2, 4), TABLE, LENGTHS
    with pytest.raises(ValueError, match=r"clean in \[True, False\], got "):
        indexer_scores(*args, clean=clean)


@pytest.mark.parametrize("k", [0, -1, 2049, 8.0, "8", None])
def test_k(k):
    with pytest.raises(ValueError, match=rf"k in 1\.\.2048, got {k!r}"):
        indexer_topk(
            torch.zeros(2, 4, 128).bfloat16(),
            torch.zeros(4, 64, 132, dtype=torch.uint8),
            torch.zeros(2, 4),
            TABLE,
            LENGTHS,
            k,
        )


def test_workspaces(monkeypatch):
    cpu = torch.device("cpu")
    assert indexer_topk_workspace(0, 2, cpu).numel() == 0
    row = indexer_topk_workspace(1, 2, cpu).numel()
    assert row > 4 * 2 * 64  # the scores, and more
    assert indexer_topk_workspace(3, 2, cpu).numel() == 3 * row
    for most, rows in ((1, 1), (2 * row, 2), (3 * row - 1, 2)):
        monkeypatch.setattr(workspace, "MAX_WORKSPACE_BYTES", most)
        assert indexer_topk_workspace(3, 2, cpu).numel() == rows * row
    for rows, max_blocks, name in ((-1, 2, "rows"), (2, -1, "max_blocks")):
        with pytest.raises(ValueError, match=f"{name} in 0.*got -1"):
            indexer_topk_workspace(rows, max_blocks, cpu)


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        ("large", "workspace to be a tensor, got str"),
        (torch.empty(2**14, dtype=torch.int32), r"workspace.dtype in \[torch.uint8\]"),
        (torch.empty(2, 2**15, dtype=torch.uint8), r"workspace of shape \[bytes\], got \[2, "),
        (torch.empty(2**16, dtype=torch.uint8, device="meta"), "workspace on cpu.*got meta"),
    ],
)
def test_what_is_no_workspace(workspace, message):
    q, weights = torch.zeros(2, 4, 128).bfloat16(), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=message):
        indexer_topk(q, pages_at(0), weights, TABLE, LENGTHS, 8, workspace=workspace)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(2, 7), r"values of shape \[2, 8\], got \[2, 7\]"),
        (torch.zeros(2, 8).double(), r"values.dtype in \[torch.float32\]"),
        (torch.zeros(8, 2).T, "values with a contiguous"),
        (torch.zeros(2, 8, device="meta"), "values on cpu.*got meta"),
    ],
)
def test_values_that_do_not_fit(values, message):
    q, weights = torch.zeros(2, 4, 128).bfloat16(), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=message):
        indexer_topk(q, pages_at(0), weights, TABLE, LENGTHS, 8, values=values)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("page", [-1, 3])
def test_pages_that_are_not_there(page, impl):
    """On a GPU a kernel reads what the table names."""
    table = ints(0, page).view(1, 2)
    args = (torch.ones(1, 4, 128).bfloat16(), torch.zeros(3, 64, 128).bfloat16(), torch.ones(1, 4))
    with pytest.raises(ValueError, match=rf"block_table entries in 0\.\.2, got {page}"):
        indexer_scores(*args, table, ints(100), impl=impl)


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_padding_rows_without_requests(impl, device):
    padding = {"request_ids": ints(-1, -1).to(device), "positions": ints(0, 5).to(device)}
    assert indexer_lengths(LENGTHS[:0].to(device), 2, **padding).tolist() == [0, 0]
    args = (torch.ones(2, 4, 128).bfloat16(), pages_at(0), torch.ones(2, 4), TABLE[:0], LENGTHS[:0])
    args = [x.to(device) for x in args]
    assert (indexer_scores(*args, **padding, impl=impl) == -torch.inf).all()
    assert (indexer_topk(*args, 8, **padding, impl=impl) == -1).all()


@pytest.mark.parametrize("impl", ["torch", "triton", "reference"])
def test_a_step_without_rows(impl, device):
    args = (torch.ones(0, 4, 128).bfloat16(), pages_at(0), torch.ones(0, 4), TABLE, LENGTHS)
    args = [x.to(device) for x in args]
    rows = {"request_ids": ints().to(device), "positions": ints().to(device)}
    assert indexer_lengths(args[-1], 0, **rows).shape == (0,)
    assert indexer_scores(*args, **rows, impl=impl).shape == (0, 128)
    assert indexer_topk(*args, 8, **rows, impl=impl).shape == (0, 8)


def test_slots_without_pages_and_of_no_request():
    positions = ints(0, 65).view(2, 1)
    assert positions_to_slots(positions, TABLE[:, :0]).tolist() == [[-1], [-1]]
    assert positions_to_slots(positions[:0], TABLE[:0]).shape == (0, 1)
    with pytest.raises(ValueError, match=r"no rows, as block_table is of no request, without .* 2"):
        positions_to_slots(positions, TABLE[:0])
    for impl in ("torch", "triton"):
        with pytest.raises(ValueError, match="request_ids below 2, got 9"):
            positions_to_slots(positions, TABLE, request_ids=ints(0, 9), impl=impl)
        for table, below in ((TABLE[:0], 0), (TABLE[:, :0], 2)):  # which need no look
            with pytest.raises(ValueError, match=f"request_ids below {below}, got 9"):
                positions_to_slots(positions, table, request_ids=ints(0, 9), impl=impl)
    with pytest.raises(ValueError, match=r"request_ids with a contiguous.*\(2,\)"):
        positions_to_slots(positions, TABLE, request_ids=ints(0, 0, 1)[::2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"slot_mapping": torch.tensor([0, 1, 128])},
            "slot_mapping below 128.*got 128 for token 2",
        ),
        ({"slot_mapping": torch.arange(6)[::2]}, r"slot_mapping with a contiguous.*\(2,\)"),
        (
            {"k": torch.zeros(3, 0), "k_cache": torch.zeros(2, 64, 4, dtype=torch.uint8)},
            "D .*got 0",
        ),
        ({"k_cache": pages_at(2)}, "k_cache at an address .*multiples of 4 bytes"),
    ],
)
def test_writes(change, message):
    call = {"k": torch.ones(3, 128), "slot_mapping": torch.arange(3)}
    call["k_cache"] = torch.zeros(2, 64, 132, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        write_indexer_cache(**call | change)
    assert not call["k_cache"].any()
