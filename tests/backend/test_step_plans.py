# SPDX-License-Identifier: Apache-2.0
"""The plans of an engine: which are made, who lends memory to whom, what a step gets."""

import pytest
import torch


class Plan:
    """A plan that remembers how it was made. Lent memory has the lender's address."""

    def __init__(self, requests, s_q, lender=None):
        self.requests, self.s_q, self.lender = requests, s_q, lender
        partials = {1: 100 * s_q} if lender is None else {1: lender.workspace[1]}
        self.workspace = partials | {10 + s_q: 5}
        self.updates = []

    def narrow(self, requests):
        narrowed = Plan(requests, self.s_q, self.lender)
        narrowed.largest = self
        return narrowed

    def update(self, seq_lens):
        self.updates.append(seq_lens)


class Kernel:
    def __init__(self):
        self.made = []

    def plan(self, seq_lens, num_heads, s_q, max_seq_len, lender):
        assert (num_heads, max_seq_len) == (16, 4096) and seq_lens.dtype == torch.int32
        self.made.append(Plan(seq_lens.shape[0], s_q, lender))
        return self.made[-1]


@pytest.fixture
def plans():
    from mla_backend.attention.step_plans import StepPlans

    kernel = Kernel()
    made = StepPlans(kernel, 16, 8, 4096, torch.device("cpu"))
    made.reserve(3)
    return kernel, made


def test_the_largest_lends_to_all_others(plans):
    kernel, _ = plans
    assert [(p.requests, p.s_q) for p in kernel.made] == [(8, 3), (8, 2), (8, 1)]
    assert [p.lender for p in kernel.made] == [None, kernel.made[0], kernel.made[0]]


def test_lent_memory_is_counted_once(plans):
    assert plans[1].workspace_bytes == 300 + 3 * 5


def test_a_step_gets_the_plan_of_its_shape_with_its_lengths(plans):
    kernel, made = plans
    lengths = torch.tensor([5, 6], dtype=torch.int32)
    plan = made.for_step(lengths, 2)
    assert plan.requests == 2 and plan.largest is kernel.made[1]
    assert plan.updates == [lengths]
    assert made.for_step(lengths + 1, 2) is plan  # a captured graph keeps its buffers
    assert [x.tolist() for x in plan.updates] == [[5, 6], [6, 7]]
    assert made.for_step(lengths, 1) is not plan
    assert len(kernel.made) == 3


def test_requests_of_few_tokens_may_be_more():
    from mla_backend.attention.step_plans import StepPlans

    kernel = Kernel()
    made = StepPlans(kernel, 16, 8, 4096, torch.device("cpu"), max_rows=20)
    made.reserve(2)
    assert [(p.requests, p.s_q) for p in kernel.made] == [(10, 2), (20, 1)]
    assert made.for_step(torch.zeros(20, dtype=torch.int32), 1).requests == 20
