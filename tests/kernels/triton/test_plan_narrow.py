# SPDX-License-Identifier: Apache-2.0
"""A plan for fewer requests in the buffers of a larger one."""

from types import SimpleNamespace

import pytest
import torch
from mla_kernels import arch, mla_decode, plan_mla_decode
from mla_kernels.arch import get_arch
from mla_kernels.decode.triton.parts import parts_and_spare
from mla_kernels.testing.cases import decode_case


@pytest.mark.parametrize("lengths", [[700], [1200, 64, 0]])
def test_a_narrowed_plan_serves_the_smaller_batch(device, lengths):
    zeros = torch.zeros(5, dtype=torch.int32, device=device)
    largest = plan_mla_decode(zeros, num_heads=16, s_q=1, impl="triton")
    case = decode_case(lengths, device=device)
    plan = largest.narrow(len(lengths))
    plan.update(case.seq_lens)
    slots, parts = largest.device_plan.acc.shape[0], len(largest.device_plan.parts)
    numbers = slots * 16 * (512 + 2) + parts * (8 + 1) + 5 * 4  # partials, parts, requests
    assert largest.workspace_bytes == 4 * numbers
    assert plan.device_plan.acc.data_ptr() == largest.device_plan.acc.data_ptr()
    expected = mla_decode(*case.args, **case.options, impl="triton")
    out = case.poisoned_out()
    _, lse = mla_decode(*case.args, **case.options, impl="triton", plan=plan, out=out)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("num_requests", [0, 6, 1.5, None])
def test_a_plan_is_not_narrowed_to_none_or_to_more(num_requests):
    plan = plan_mla_decode(torch.zeros(5, dtype=torch.int32), num_heads=16, s_q=1)
    with pytest.raises(ValueError, match=rf"num_requests in 1\.\.5, got {num_requests}"):
        plan.narrow(num_requests)


@pytest.mark.parametrize(("requests", "lent"), [(5, True), (1, False)])
def test_memory_is_lent_where_it_is_enough(device, requests, lent):
    def plan(n, s_q, lender=None):
        lengths = torch.full((n,), 900, dtype=torch.int32, device=device)
        options = {"num_heads": 16, "s_q": s_q, "impl": "triton", "deterministic": True}
        return plan_mla_decode(lengths, max_seq_len=4096, lender=lender, **options)

    lender = plan(requests, 2)
    borrower = plan(3, 1, lender)
    for name in ("acc", "sums"):
        mine, theirs = (getattr(p.device_plan, name) for p in (borrower, lender))
        assert (mine.data_ptr() == theirs.data_ptr()) == lent
        assert mine.shape[:2] == (3 * borrower.device_plan.max_chunks, 16)
    shared = borrower.workspace.keys() & lender.workspace.keys()
    assert len(shared) == (2 if lent else 0)
    alike = plan(3, 1, borrower)  # no more than just enough
    assert len(alike.workspace.keys() & borrower.workspace.keys()) == 2


@pytest.mark.parametrize(
    ("sm", "sms", "rows", "cache", "parts"),
    [
        (90, 132, 16, torch.bfloat16, 132),
        (90, 132, 128, torch.bfloat16, 66),  # two row tiles
        (90, 132, 16, torch.uint8, 264),  # two programs an SM
        (80, 108, 64, torch.bfloat16, 54),
        (80, 14, 1024, torch.bfloat16, 1),  # a slice of a GPU has fewer SMs than there are tiles
    ],
)
def test_programs_fill_the_device(monkeypatch, sm, sms, rows, cache, parts):
    properties = SimpleNamespace(multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(arch, "device_arch", lambda device: get_arch(sm))
    made = parts_and_spare(rows, torch.device("cuda"), cache, torch.bfloat16)
    assert made == (parts, 0)


@pytest.mark.parametrize("num_heads", [16, 128])  # one row tile, several
def test_an_update_clears_what_a_sleeping_engine_lost(device, num_heads):
    lengths = torch.tensor([900, 3], dtype=torch.int32, device=device)
    plan = plan_mla_decode(lengths, num_heads=num_heads, s_q=1, impl="triton")
    assert (plan.device_plan.outgrown.shape[1] > 1) == (num_heads > 64)
    plan.device_plan.outgrown.fill_(7)
    plan.update(lengths)
    assert not plan.device_plan.outgrown.any()
