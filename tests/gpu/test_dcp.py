# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: tokens dealt to ranks, results merged by vLLM's own code."""

import pytest
import torch
from mla_kernels import mla_decode
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.layouts import MlaDims
from mla_kernels.testing import metrics
from mla_kernels.testing.cases import decode_case, random_tokens

# With 4 ranks, some hold nothing of the first requests.
LENGTHS = [1, 2, 3, 64, 65, 129, 500, 1000]


@pytest.mark.parametrize("ranks, interleave", [(2, 1), (4, 1), (2, 64)])
@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_ranks_merge_to_the_whole(impl, ranks, interleave):
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    try:
        from vllm.v1.attention.ops.dcp import CPTritonContext, correct_attn_out
    except ImportError:  # vLLM before 0.29
        from vllm.v1.attention.ops.common import CPTritonContext, correct_attn_out

    tokens = random_tokens(LENGTHS, MlaDims(), device="cuda")
    case = decode_case(LENGTHS, num_heads=128, q_std=0.5, tokens=tokens, device="cuda")
    want, want_lse = mla_decode_reference(*case.args, **case.options, causal=True)
    results = []
    for rank in range(ranks):
        held = [t[torch.arange(len(t)) // interleave % ranks == rank] for t in tokens]
        part = decode_case(
            [len(t) for t in held], num_heads=128, tokens=held, q=case.q, device="cuda"
        )
        lens = get_dcp_local_seq_lens(case.seq_lens, ranks, rank, interleave)
        assert torch.equal(lens, part.seq_lens)
        results.append(mla_decode(*part.args, **case.options, impl=impl))
    lses = torch.stack([lse[:, 0] for _, lse in results])
    total = torch.zeros_like(want[:, 0], dtype=torch.float32)
    for rank, (out, _) in enumerate(results):
        corrected, lse = correct_attn_out(
            out[:, 0].clone(), lses, rank, CPTritonContext(), is_lse_base_on_e=True
        )
        total += corrected.float()
        assert (lse - want_lse[:, 0]).abs().max() < 2**-8
    # Each rank's part is rounded to bf16 twice: by the kernel and by the correction.
    measured = metrics.measure(total, want[:, 0])
    assert not metrics.SHORT_BAR.failures(measured), measured
