# SPDX-License-Identifier: Apache-2.0
"""MLA_BACKEND_CHECK: a sound step passes, every single fault is found and named."""

import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_backend.attention.shard import Shard
from mla_backend.attention.step_check import StepCheck, check_step

BLOCK, BLOCKS = 64, 40


def make_step(lens, new, padded=0, shard=None):
    """A step of requests with `lens` tokens, the last `new` of them new; shuffled pages. With a
    `shard` the slots are those of its rank."""
    shard = shard or Shard()
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(BLOCKS - 1, generator=g) + 1  # block 0 belongs to nobody
    table = torch.full((len(lens) + padded, 12), 2**30, dtype=torch.int32)
    slots, taken = [], 0
    for r, (n, q) in enumerate(zip(lens, new, strict=True)):
        pages = -(-n // BLOCK)
        table[r, :pages] = order[taken : taken + pages]
        taken += pages
        turns = [p // shard.interleave % shard.size for p in range(n)]
        for p in range(n - q, n):
            own = turns[:p].count(shard.rank)
            slot = int(table[r, own // BLOCK]) * BLOCK + own % BLOCK
            slots.append(slot if turns[p] == shard.rank else -1)
    counts = torch.tensor([0, *new, *[0] * padded])
    return {
        "block_table": table,
        "seq_lens": torch.tensor([*lens, *[0] * padded], dtype=torch.int32),
        "query_start_loc": counts.cumsum(0).int(),
        "slot_mapping": torch.tensor([*slots, -1, -1]),
    }


LENS, NEW = [5, 64, 65, 300, 1], [1, 1, 1, 100, 1]


def check(step, **kwargs):
    check_step(**step, num_blocks=BLOCKS, block_size=BLOCK, **kwargs)


@pytest.mark.parametrize("padded", [0, 3])
def test_a_sound_step_passes(padded):
    check(make_step(LENS, NEW, padded))


def put(name, index, value):
    def change(step):
        step[name][index] = value

    return change


FAULTS = [
    (put("seq_lens", 1, -1), r"request 1 of the 5.*seq_len in 0\.\.768"),
    (put("seq_lens", 1, 769), r"request 1 of the 5 in this step \(seq_len 769, 1 new"),
    (put("seq_lens", 3, 99), r"request 3 .*100 new tokens\): more new tokens than its length"),
    (put("query_start_loc", 2, 9), r"request 2 .*end before they begin"),
    (put("block_table", (3, 2), BLOCKS), r"request 3 .*column 2 holds 40, expected 0\.\.39"),
    (put("block_table", (0, 0), -1), r"request 0 .*column 0 holds -1"),
    (put("slot_mapping", 0, BLOCKS * BLOCK), r"request 0 .*slot 2560, expected -1\.\.2559"),
    (put("slot_mapping", 103, -2), r"request 4 .*slot -2"),
    (put("slot_mapping", 50, 7), r"request 3 .*position 247 is written to slot 7, its block"),
    (put("slot_mapping", 50, -1), r"request 3 .*position 247 is written to slot -1"),
    (put("slot_mapping", [1, 103], 0), r"request 4 .*slot 0 is written by request 1 too"),
    (put("seq_lens", 3, 1), r"request 3 .*seq_len 1, 100 new tokens\): more new tokens"),
]


@pytest.mark.parametrize("change, said", FAULTS)
def test_a_fault_is_named(change, said):
    step = make_step(LENS, NEW)
    change(step)
    with pytest.raises(ValueError, match=f"MLA_BACKEND_CHECK: {said}"):
        check(step)


@pytest.mark.parametrize(
    "padded, ids, said",
    [
        (0, "abcde", r"request 4 \(id e\) of the 5 .* written by request 1 \(id b\) too"),
        (2, "abcde", r"request 4 \(id e\) of the 7 .* written by request 1 \(id b\) too"),
        (0, "abcdef", "request 4 of the 5 .* written by request 1 too"),  # of a larger batch
        (0, "abcd", r"request 4 of the 5 .* written by request 1 \(id b\) too"),
    ],
)
def test_requests_are_named_by_their_ids(padded, ids, said):
    step = make_step(LENS, NEW, padded)
    step["slot_mapping"][103] = step["slot_mapping"][1]
    with pytest.raises(ValueError, match=said):
        check(step, request_ids=lambda: list(ids))
    check(make_step(LENS, NEW, padded), request_ids=pytest.fail)


class Runner:
    """vLLM's first model runner keeps the batch as an attribute, its second as a variable."""

    def __init__(self):
        self.input_batch = SimpleNamespace(req_ids=["first"])

    def execute_model(self, build):
        return build()

    def _dummy_run(self, build):
        return self.execute_model(build) if isinstance(self, SecondRunner) else build()


class SecondRunner(Runner):
    def __init__(self):
        pass

    def execute_model(self, build):
        input_batch = SimpleNamespace(req_ids=["second"])
        return build() if input_batch else None


def test_ids_are_found_among_the_callers():
    def build():
        common = SimpleNamespace(block_table_tensor=step["block_table"], **others)
        with pytest.raises(ValueError, match="MLA_BACKEND_CHECK") as fault:
            StepCheck(SimpleNamespace(kv_cache=torch.zeros(BLOCKS, BLOCK, 1)), BLOCK)(common)
        return str(fault.value).partition(" of the 1 ")[0].partition("request ")[2]

    step = make_step([5], [1])
    step["slot_mapping"][0] = -2
    others = {name: step[name] for name in step if name != "block_table"}
    assert build() == "0"
    assert Runner().execute_model(build) == "0 (id first)"
    assert SecondRunner().execute_model(build) == "0 (id second)"
    assert Runner()._dummy_run(build) == "0"


def test_rejected_drafts_are_not_written():
    """Slots as vLLM makes them for a draft model that runs over rejected tokens too."""
    from vllm.v1.spec_decode.utils import compute_new_slot_mapping

    lens, new, rejected = [65, 300], [3, 4], [False, True, True, False, False, False, True]
    step = make_step(lens, new)
    common = SimpleNamespace(
        block_table_tensor=step["block_table"],
        query_start_loc=step["query_start_loc"],
        naive_query_lens=lambda: torch.tensor(new),
    )
    positions = torch.tensor([62, 63, 64, 296, 297, 298, 299])
    slots = compute_new_slot_mapping(common, positions, torch.tensor(rejected), BLOCK, 0, 1024)
    assert (slots < 0).tolist() == rejected
    step["slot_mapping"] = slots
    check(step, drafts=True)
    with pytest.raises(ValueError, match=r"request 0 .*position 63 is written to slot -1"):
        check(step)
    step["slot_mapping"][3] = 7
    with pytest.raises(ValueError, match=r"request 1 .*position 296 is written to slot"):
        check(step, drafts=True)


@pytest.mark.parametrize("drafts", [False, True])
def test_the_check_knows_whether_there_are_drafts(drafts):
    step = make_step(LENS, NEW)
    step["slot_mapping"][50] = -1
    common = SimpleNamespace(block_table_tensor=step.pop("block_table"), **step)
    check = StepCheck(SimpleNamespace(kv_cache=torch.zeros(BLOCKS, BLOCK, 1)), BLOCK, drafts=drafts)
    with contextlib.nullcontext() if drafts else pytest.raises(ValueError, match="slot -1"):
        check(common)


def test_a_slot_that_two_requests_write(monkeypatch):
    step = make_step(LENS, NEW)
    step["block_table"][1, 0] = step["block_table"][4, 0]
    step["seq_lens"][1] = 1
    step["slot_mapping"][1] = step["slot_mapping"][103]
    with pytest.raises(ValueError, match=r"request 4 .*is written by request 1 too"):
        check(step)


def test_dummy_steps_and_shared_caches():
    dummy = make_step(LENS, NEW)
    dummy["slot_mapping"].fill_(-1)
    check(dummy)
    dummy["seq_lens"].zero_()
    check(dummy)
    shard = Shard(2, 1)
    shared = make_step(LENS, NEW, shard=shard)
    shared["block_table"][3, 3:] = 2**30  # each rank has 150 of its 300 tokens
    check(shared, shard=shard)
    shared["slot_mapping"][1] = BLOCKS * BLOCK
    with pytest.raises(ValueError, match="request 1 "):
        check(shared, shard=shard)
    shared["block_table"][3, 2] = -1
    with pytest.raises(ValueError, match=r"request 3 .*column 2 holds -1"):
        check(shared, shard=shard)


@pytest.mark.parametrize("shard", [Shard(2, 0), Shard(2, 1), Shard(4, 2), Shard(2, 1, 2)])
def test_every_rank_writes_its_own_tokens(shard):
    step = make_step(LENS, NEW, shard=shard)
    check(step, shard=shard)
    written = step["slot_mapping"] >= 0
    mine, other = (int(x.nonzero()[5]) for x in (written, ~written))
    slot = int(step["slot_mapping"][mine])
    said = rf"request 3 .*slot {slot + 1000}, its block table says {slot}$"
    step["slot_mapping"][mine] += 1000
    with pytest.raises(ValueError, match=said):
        check(step, shard=shard)
    step["slot_mapping"][mine] = -1
    with pytest.raises(ValueError, match=rf"slot -1, its block table says {slot}$"):
        check(step, shard=shard)
    check(step, shard=shard, drafts=True)  # as one that was rejected
    step["slot_mapping"][other] = slot
    said = f"slot {slot}, expected -1, as it is not of rank {shard.rank} of {shard.size}$"
    with pytest.raises(ValueError, match=said):
        check(step, shard=shard, drafts=True)


@pytest.mark.parametrize(("length", "last"), [(128, 0), (129, 1), (255, 1), (257, 2)])
def test_the_last_block_of_ranks_that_share_it_unevenly(length, last):
    """129 tokens are 65 of one rank and 64 of the other: both have the second block."""
    step = make_step(LENS, NEW)
    step["slot_mapping"].fill_(-1)
    step["seq_lens"][3] = length
    step["block_table"][3, last + 1 :] = 2**30
    check(step, shard=Shard(2))
    step["block_table"][3, last] = 2**30
    with pytest.raises(ValueError, match=rf"request 3 .*column {last} holds"):
        check(step, shard=Shard(2))


def test_ranks_that_share_a_cache_hold_longer_requests():
    step = make_step(LENS, NEW)
    step["slot_mapping"].fill_(-1)
    capacity = step["block_table"].shape[1] * BLOCK
    step["seq_lens"][1] = 2 * capacity
    with pytest.raises(ValueError, match=rf"expected a seq_len in 0\.\.{capacity}"):
        check(step)
    step["block_table"][1] = 0
    check(step, shard=Shard(2))
    step["seq_lens"][1] += 1
    with pytest.raises(ValueError, match=rf"expected a seq_len in 0\.\.{2 * capacity}"):
        check(step, shard=Shard(2))


def test_reads_what_vllm_hands_over():
    step = make_step(LENS, NEW)
    common = SimpleNamespace(block_table_tensor=step.pop("block_table"), **step)
    layer = SimpleNamespace(kv_cache=torch.zeros(BLOCKS, BLOCK, 576))
    StepCheck(layer, BLOCK)(common)
    common.block_table_tensor[0, 0] = BLOCKS
    with pytest.raises(ValueError, match="request 0 "):
        StepCheck(layer, BLOCK)(common)
    StepCheck(SimpleNamespace(kv_cache=torch.tensor([])), BLOCK)(common)  # no cache yet


def test_the_builder_checks_every_step(monkeypatch):
    from mla_backend.attention import metadata

    class Common:
        def build(self, prefix, common, fast):
            return SimpleNamespace(prefill=None)

    step = make_step(LENS, NEW)
    step["slot_mapping"][0] += 1
    table = step.pop("block_table")
    common = SimpleNamespace(
        block_table_tensor=table,
        num_actual_tokens=sum(NEW),
        max_query_len=max(NEW),
        query_start_loc_cpu=step["query_start_loc"],
        **step,
    )
    builder = object.__new__(metadata.MlaMetadataBuilder)
    layer = SimpleNamespace(kv_cache=torch.zeros(BLOCKS, BLOCK, 576))
    builder._step_check = StepCheck(layer, BLOCK)
    builder._most_s_q, builder._extend_tokens, builder.reorder_batch_threshold = 1, 0, 1
    parent = metadata.MLACommonMetadataBuilder
    monkeypatch.setattr(parent, "build", Common.build)
    with pytest.raises(ValueError, match=r"request 0 .*position 4 is written to slot"):
        builder.build(0, common)
    # Steps that graphs are captured with are made up: their slots mean nothing.
    monkeypatch.setattr(
        parent, "build_for_cudagraph_capture", lambda self, common: self.build(0, common)
    )
    assert builder.build_for_cudagraph_capture(common).prefill is None
    with pytest.raises(ValueError, match="request 0 "):
        builder.build(0, common)


def test_the_builder_of_sparse_layers_checks_every_step():
    from mla_backend.attention.sparse import metadata
    from mla_backend.attention.sparse.rows import RowsBuilder

    step = make_step(LENS, NEW)
    T = sum(NEW)
    starts = step["query_start_loc"]
    common = SimpleNamespace(
        block_table_tensor=step.pop("block_table"),
        num_reqs=len(NEW),
        num_actual_tokens=T,
        max_query_len=max(NEW),
        query_start_loc_cpu=starts,
        **step,
    )
    builder = object.__new__(metadata.SparseMetadataBuilder)
    layer = SimpleNamespace(kv_cache=torch.zeros(BLOCKS, BLOCK, 576))
    builder._step_check = StepCheck(layer, BLOCK)
    builder._rows = RowsBuilder(T, torch.device("cpu"))
    built = builder.build(0, common)
    assert (built.num_decodes, built.num_decode_tokens, built.num_prefills) == (len(NEW), T, 0)
    indexer = object.__new__(metadata.IndexerMetadataBuilder)
    indexer._rows = builder._rows
    assert len(indexer.build(0, common).slot_mapping) == T < len(common.slot_mapping)
    common.slot_mapping[0] += 1
    with pytest.raises(ValueError, match=r"request 0 .*position 4 is written to slot"):
        builder.build(0, common)
    assert builder.build_for_cudagraph_capture(common).num_actual_tokens == T
    with pytest.raises(ValueError, match="request 0 "):
        builder.build(0, common)


def test_steps_that_a_runner_makes_up_are_not_checked():
    """On an idle data-parallel rank drafts are written to places of requests that are gone."""
    from mla_backend.attention.builder import StepBuilder
    from mla_backend.stats import STATS

    class Builder(StepBuilder):
        def __init__(self):
            pass

        def build(self, *_):
            pass

    builder, checked, before = Builder(), [], STATS.checked_steps
    builder._step_check = checked.append

    def _dummy_run():
        builder._check("made up")

    def warmup_kernels():
        builder._check("made up as ranks of experts come or go")

    _dummy_run()
    warmup_kernels()
    assert checked == [] and STATS.checked_steps == before
    builder._check("a step")
    assert checked == ["a step"] and STATS.checked_steps == before + 1


@pytest.mark.parametrize(
    ("module", "maker"),
    [
        ("gpu_model_runner", "_dummy_run"),
        ("gpu.model_runner", "_dummy_run"),
        ("gpu.warmup", "warmup_kernels"),
    ],
)
def test_who_makes_up_steps_has_the_name_that_is_looked_for(module, maker):
    """Else made-up steps would be checked, and named by requests."""
    from mla_backend.compat import step_metadata

    source = Path(importlib.util.find_spec(f"vllm.v1.worker.{module}").origin).read_text()
    assert f"def {maker}(" in source and maker in step_metadata.MAKERS
