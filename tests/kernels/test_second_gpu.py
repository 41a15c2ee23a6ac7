# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie on another GPU than torch's current one."""

import pytest
import torch
from mla_kernels import exact_topk, mla_decode, plan_mla_decode, write_kv_cache
from mla_kernels.testing.cases import decode_case, scales_to_powers_of_two
from mla_kernels.testing.decoded import assert_decoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
OTHER = torch.device("cuda:1")


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn, torch.uint8])
def test_decode_steps(heads, impl, cache):
    assert torch.cuda.current_device() == 0
    scale = {"kv_scale": 2.0**-6} if cache == torch.float8_e4m3fn else {}
    case = decode_case([70, 9000], num_heads=heads, cache_dtype=cache, device=OTHER, **scale)
    if cache == torch.uint8:  # some kernels do not round code times scale (docs/numerics.md)
        scales_to_powers_of_two(case.kv_cache)
    dtypes = {"kv_cache_dtype": case.kv_cache.dtype, "impl": impl}
    plan = plan_mla_decode(case.seq_lens, num_heads=heads, s_q=1, **dtypes)
    for _ in range(3):  # as recorded, too
        out, lse = mla_decode(
            *case.args, **case.options, impl=impl, plan=plan, out=case.poisoned_out()
        )
        assert_decoded(case, out, lse)
        plan.update(case.seq_lens)


def test_other_ops():
    scores = torch.randn(5, 9000, device=OTHER)
    assert torch.equal(exact_topk(scores, 40), exact_topk(scores, 40, impl="reference"))
    cache = torch.zeros(2, 64, 576, dtype=torch.bfloat16, device=OTHER)
    rows = torch.randn(3, 576, device=OTHER).bfloat16()
    slots = torch.tensor([5, -1, 70], device=OTHER)
    write_kv_cache(rows[:, :512], rows[:, 512:], cache, slots)
    assert torch.equal(cache.flatten(0, 1)[[5, 70]], rows[[0, 2]])
    assert torch.cuda.current_device() == 0
