# SPDX-License-Identifier: Apache-2.0
"""The fault that MLA_BACKEND_CPU_ROTARY_FIX works around, in vLLM's compiled operator itself.

When the first test fails, vLLM has been mended: remove the workaround, its variable and this file.
"""

import pytest
import torch

T, H, ROPE = 7, 4, 64


@pytest.fixture(scope="module")
def rope():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        yield get_rope(
            ROPE,
            max_position=128,
            is_neox_style=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            dtype=torch.float32,
        )


def rotate(method, heads_apart):
    """q and k as DeepSeek passes them: [T, H, rope] and [T, 1, rope]."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(T, h, ROPE, generator=g) for h in (H, 1))
    if not heads_apart:
        q, k = q.flatten(1), k.flatten(1)
    q, k = method(torch.arange(T), q, k)
    return q.reshape(T, H, ROPE), k.reshape(T, 1, ROPE)


def error(a, b):
    return float((a - b).norm() / b.norm())


def test_vllm_cpu_operator_is_still_wrong_for_heads_apart(rope):
    right = rotate(rope.forward_native, heads_apart=True)
    wrong = rotate(rope.forward_cpu, heads_apart=True)
    assert max(error(a, b) for a, b in zip(wrong, right, strict=True)) > 0.1


def test_native_path_agrees_with_the_operator_on_flat_heads(rope):
    right = rotate(rope.forward_cpu, heads_apart=False)
    native = rotate(rope.forward_native, heads_apart=True)
    assert max(error(a, b) for a, b in zip(native, right, strict=True)) < 1e-6
