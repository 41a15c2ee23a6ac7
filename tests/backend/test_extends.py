# SPDX-License-Identifier: Apache-2.0
"""Which ends of prompts attend like decode tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mla_backend.attention import extends
from mla_backend.attention.metadata import MlaMetadataBuilder


def kernel(impl="hopper", deterministic=False):
    return SimpleNamespace(impl=impl, deterministic=deterministic)


@pytest.mark.parametrize(
    "impl, heads, expected",
    [
        ("hopper", 128, 128),
        ("hopper", 64, 128),
        ("hopper", 16, 128),  # pieces fill its tile
        ("hopper", 4, 64),  # not with 8 tokens of 4 heads
        ("triton", 32, 64),
        ("triton", 16, 32),
        ("torch", 16, 48),
        ("torch", 8, 24),
        ("torch", 128, 48),
    ],
)
def test_the_longest_follows_the_rows(impl, heads, expected):
    assert extends.longest_extend(kernel(impl), heads) == expected


@pytest.mark.parametrize("impl", ["torch", "hopper", "triton"])
def test_none_in_batch_invariant_mode(impl):
    assert extends.longest_extend(kernel(impl), 16) >= 32
    assert extends.longest_extend(kernel(impl, deterministic=True), 16) == 0


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_EXTEND_TOKENS", "40")
    assert extends.longest_extend(kernel("torch"), 128) == 40
    monkeypatch.setenv("MLA_BACKEND_EXTEND_TOKENS", "0")
    assert extends.longest_extend(kernel(), 128) == 0


@pytest.mark.parametrize(
    "query_lens, contexts, expected",
    [
        ([1, 1, 64], [900, 900, 256], True),
        ([1, 1, 64], [900, 900, 255], False),  # too little to expand
        ([1, 1], [900, 900], False),  # nothing but decode tokens
        ([1, 64, 600], [900, 5000, 5000], True),
        ([1, 600, 64], [900, 5000, 5000], False),  # vLLM cuts at the first long one
        ([1, 120, 60], [900, 720, 0], True),  # a prompt's start comes along
        ([128] * 4, [9000] * 4, True),
        ([128] * 5, [9000] * 5, False),  # too many rows
    ],
)
def test_what_pays(query_lens, contexts, expected):
    arguments = np.array(query_lens), np.array(contexts)
    assert extends.pays(*arguments, most_s_q=1, longest=128) is expected


@pytest.mark.parametrize("requests, expected", [(56, True), (256, True), (513, False)])
def test_a_draft_models_first_steps_are_absorbed_however_many(requests, expected):
    """With seven drafts it has nine tokens of each request, where the kernel takes eight."""
    query_lens, contexts = np.full(requests, 9), np.full(requests, 500)
    assert extends.pays(query_lens, contexts, most_s_q=8, longest=128) is expected
    room = extends.most_rows(requests, 8, absorbs=True)
    assert bool(query_lens.sum() <= room) is expected


@pytest.mark.parametrize(
    "query_lens, expected", [([4, 4, 1, 4], 2), ([4, 4], 2), ([1, 4, 4], 0), ([9, 9, 4], 0)]
)
def test_requests_that_stay_together(query_lens, expected):
    assert extends.equal_run(np.array(query_lens), most_s_q=4) == expected


@pytest.mark.parametrize(
    "query_lens, longest, expected",
    [
        ([64], 4, [(16, 4)]),
        ([57], 4, [(1, 1), (14, 4)]),
        ([1, 1, 57], 4, [(3, 1), (14, 4)]),  # what is left over joins the decode tokens
        ([1, 1, 59], 4, [(2, 1), (1, 3), (14, 4)]),
        ([1, 57, 64], 4, [(2, 1), (30, 4)]),
        ([3], 8, [(1, 3)]),
        ([5, 9], 1, [(14, 1)]),
    ],
)
def test_pieces(query_lens, longest, expected):
    for taken in (set(), None):
        assert extends.pieces(np.array(query_lens), longest, taken) == expected


def test_one_launch_of_a_length_where_there_is_one_plan():
    lengths = np.array([13, 13])
    assert extends.pieces(lengths, 8, None) == [(1, 5), (1, 8), (1, 5), (1, 8)]
    assert extends.pieces(lengths, 8, set()) == [(26, 1)]
    assert extends.pieces(np.array([8]), 4, {2}) == [(2, 4)]


@pytest.mark.parametrize(
    "query_lens, longest, taken, expected",
    [
        ([9], 8, {8}, [(1, 2), (1, 7)]),  # an end behind requests with seven drafts
        ([9, 9, 9], 8, set(), [(9, 3)]),  # first steps of their drafts
        ([9, 1], 8, set(), [(1, 2), (1, 7), (1, 1)]),
        ([57], 4, {4}, [(19, 3)]),
        ([1, 8], 4, {4}, [(1, 1), (1, 2), (2, 3)]),
        ([8], 2, {2}, [(8, 1)]),
    ],
)
def test_shorter_pieces_where_a_plan_is_taken(query_lens, longest, taken, expected):
    """Single rows, which did as well, read each context once for every token."""
    asked = taken.copy()
    assert extends.pieces(np.array(query_lens), longest, asked) == expected
    assert asked == taken


@pytest.mark.parametrize(
    "impl, heads, expected",
    [("torch", 16, 8), ("hopper", 128, 1), ("hopper", 16, 4), ("hopper", 4, 8), ("triton", 16, 1)],
)
def test_the_longest_piece(impl, heads, expected):
    assert extends.longest_piece(kernel(impl), heads) == expected


def test_rows_of_tokens():
    rows = extends.ExtendRows(10, 4, torch.device("cpu"))
    starts = torch.tensor([0, 1, 4, 9], dtype=torch.int32)
    lengths = torch.tensor([70, 3, 100], dtype=torch.int32)
    table = torch.arange(9, dtype=torch.int32).view(3, 3)
    ((got_table, got_lengths, tokens),) = rows.fill(starts, lengths, table, 1, [(8, 1)])
    assert got_lengths.tolist() == [1, 2, 3, 96, 97, 98, 99, 100] and tokens == 8
    assert got_table.tolist() == [[3, 4, 5]] * 3 + [[6, 7, 8]] * 5
    one, two, again = rows.fill(starts, lengths, table, 1, [(1, 1), (1, 2), (5, 1)])
    assert one[0].tolist() == two[0].tolist() == [[3, 4, 5]]
    assert one[1].tolist() == [1] and two[1].tolist() == [3]
    assert again[0].tolist() == [[6, 7, 8]] * 5
    assert again[1].tolist() == [96, 97, 98, 99, 100]


def test_pieces_see_what_their_last_token_sees():
    """The kernel lets the tokens before it see less, by one each."""
    rows = extends.ExtendRows(20, 4, torch.device("cpu"))
    starts = torch.tensor([0, 2, 15], dtype=torch.int32)
    lengths = torch.tensor([70, 100], dtype=torch.int32)
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    launches = extends.pieces(np.array([13]), 4, set())
    short, long = rows.fill(starts, lengths, table, 2, launches)
    assert short[1].tolist() == [88] and short[2] == 1
    assert long[1].tolist() == [92, 96, 100] and long[2] == 12
    assert long[1].is_contiguous() and long[0].tolist() == [[3, 4, 5]] * 3


def test_launches_begin_where_the_compiled_kernels_expect_it():
    """At 16 bytes: for other addresses Triton would compile again, in the middle of serving."""
    rows = extends.ExtendRows(40, 3, torch.device("cpu"))
    starts = torch.tensor([0, 2, 9, 16, 17], dtype=torch.int32)
    lengths = torch.tensor([70, 80, 90, 5], dtype=torch.int32)
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    launches = extends.pieces(np.array([2, 7, 7, 1]), longest=4, taken=None)
    filled = rows.fill(starts, lengths, table, 0, launches)
    assert len(filled) == len(launches) > 3
    for tables, seq_lens, _ in filled:
        assert tables.data_ptr() % 16 == seq_lens.data_ptr() % 16 == 0
    assert [seq_lens.tolist() for _, seq_lens, _ in filled][:2] == [[70], [76]]
    assert torch.cat([tables for tables, _, _ in filled])[:, 0].tolist() == [0, 3, 3, 6, 6, 9]


def test_every_launch_has_room_for_the_gap_behind_it():
    new = np.array([1, 2] * 10)
    rows = extends.ExtendRows(int(new.sum()), 1, torch.device("cpu"))
    starts = torch.tensor([0, *new]).cumsum(0).int()
    lengths = torch.arange(20, dtype=torch.int32) + 70
    launches = extends.pieces(new, longest=8, taken=None)
    assert len(launches) == 20
    filled = rows.fill(starts, lengths, lengths[:, None], 0, launches)
    for got in zip(*(launch[:2] for launch in filled), strict=True):
        assert torch.cat([x.flatten() for x in got]).equal(lengths)


def test_tables_that_are_wider_than_any_request():
    """vLLM counts in its own blocks, which may be larger: the launches keep their rows apart."""
    rows = extends.ExtendRows(40, 3, torch.device("cpu"))
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    lengths = torch.tensor([150, 160], dtype=torch.int32)
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    filled = rows.fill(starts, lengths, table, 0, [(9, 1), (9, 1)])
    assert [tables.tolist() for tables, _, _ in filled] == [[[0, 1, 2]] * 9, [[6, 7, 8]] * 9]


def test_every_step_that_pays_has_room():
    """Requests of which some have drafts, the first not like the others: all of them are rows."""
    max_requests, most_s_q, longest = 8, 4, 128
    query_lens = np.array([4, 1, 4, 4, 128, 128, 128, 128])
    assert extends.pays(query_lens, np.full(8, 9000), most_s_q, longest)
    T = int(query_lens.sum())
    rows = extends.ExtendRows(
        extends.most_rows(max_requests, most_s_q, True), 2, torch.device("cpu")
    )
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.full((8,), 9128, dtype=torch.int32)
    table = torch.zeros(8, 2, dtype=torch.int32)
    assert rows.fill(starts, lengths, table, 0, [(T, 1)])[0][2] == T
    with pytest.raises(ValueError, match=f"at most {8 * 4 + 512} decode tokens, got {T + 20}"):
        rows.fill(starts, lengths, table, 0, [(T + 20, 1)])


def common(query_lens, seq_lens):
    return SimpleNamespace(
        num_reqs=len(query_lens),
        max_query_len=max(query_lens),
        num_actual_tokens=sum(query_lens),
        query_start_loc_cpu=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    "extend, step, expected",
    [
        (128, common([1, 60], [50, 1000]), 128),
        (128, common([1, 60], [50, 100]), 2),
        (128, common([1, 60], [50, 300]), 128),  # 240 cached ones
        (128, common([1, 60], [50, 299]), 2),
        (128, common([1, 200], [50, 1000]), 2),
        (128, common([2, 1], [50, 1000]), 2),
        (0, common([1, 60], [50, 1000]), 2),
    ],
)
def test_the_threshold_of_a_step(extend, step, expected):
    builder = object.__new__(MlaMetadataBuilder)
    builder._most_s_q, builder._extend_tokens = 2, extend
    assert builder._decode_threshold(step) == expected


def test_the_threshold_is_that_of_one_step(monkeypatch):
    """Between steps it is what vLLM reads: only drafts count as decode requests there."""
    from mla_backend.attention import metadata

    builder = object.__new__(MlaMetadataBuilder)
    builder._most_s_q, builder._extend_tokens, builder._step_check = 2, 128, None
    builder.reorder_batch_threshold, seen = 2, []

    def build(self, prefix, step, fast):
        seen.append(self.reorder_batch_threshold)
        if step.max_query_len == 61:
            raise RuntimeError
        return SimpleNamespace(prefill=None)

    monkeypatch.setattr(metadata.MLACommonMetadataBuilder, "build", build)
    for new in ([1, 60], [2, 1], [1, 200]):
        builder.build(0, common(new, [50, 1000]))
        assert builder.reorder_batch_threshold == 2
    with pytest.raises(RuntimeError):
        builder.build(0, common([1, 61], [50, 1000]))
    assert seen == [128, 2, 2, 128] and builder.reorder_batch_threshold == 2


def test_one_token_each_is_known_of_one_step(monkeypatch):
    """So that a step after it is looked at again."""
    from mla_backend.attention import metadata

    builder = object.__new__(MlaMetadataBuilder)
    builder._most_s_q, builder._extend_tokens, builder._step_check = 2, 128, None
    builder.reorder_batch_threshold, seen = 2, []

    def build(self, prefix, step, fast):
        seen.append(self._one_token_each)
        return SimpleNamespace(prefill=None)

    monkeypatch.setattr(metadata.MLACommonMetadataBuilder, "build", build)
    for new in ([1, 1], [2, 1], [1, 0], [1, 60]):
        builder.build(0, common(new, [50, 1000]))
    assert seen == [True, False, True, False]


def test_a_drafter_whose_step_is_longer_has_no_context_less_than_none():
    new, cached = extends.host_lengths(common([3, 5], [2, 9]))
    assert (new.tolist(), cached.tolist()) == ([3, 5], [0, 4])


@pytest.mark.parametrize(
    "new, lengths, decodes, counted, merged",
    [
        ([1, 200, 300], [9, 900, 300], 1, 200, 200),  # as the first model runner orders them
        ([1, 200, 300], [9, 200, 900], 1, 200, None),  # by new tokens: the new prompt is shorter
        ([200, 300, 400], [900, 300, 500], 0, 500, None),
        ([200, 300], [200, 300], 0, None, None),  # no context at all
    ],
)
def test_every_prompt_is_merged_with_its_context(
    monkeypatch, new, lengths, decodes, counted, merged
):
    """vLLM 0.26 and 0.27 count the tokens of as many leading prompts as have a context."""
    from mla_backend.attention import metadata

    builder = object.__new__(MlaMetadataBuilder)
    builder._most_s_q, builder._extend_tokens, builder._step_check = 1, 0, None
    builder.reorder_batch_threshold, builder._on_cpu = 1, False
    context = counted and SimpleNamespace(prefill_tokens_with_context=counted)
    prefill = SimpleNamespace(chunked_context=context)
    built = SimpleNamespace(prefill=prefill, num_decodes=decodes)
    monkeypatch.setattr(metadata.MLACommonMetadataBuilder, "build", lambda *_: built)
    builder.build(0, common(new, lengths))
    assert context is None or context.prefill_tokens_with_context == merged
    prefill.chunked_context = SimpleNamespace()  # of vLLM 0.28 and later
    builder.build(0, common(new, lengths))
    assert vars(prefill.chunked_context) == {}
