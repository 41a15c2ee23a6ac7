# SPDX-License-Identifier: Apache-2.0
"""What the dense backend says of a GPU, asked on any machine."""

import pytest
import torch
from mla_kernels.decode.api import MAX_HEADS, MAX_S_Q
from mla_kernels.layouts import MlaDims
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.selector import AttentionSelectorConfig

from mla_backend.attention import support
from mla_backend.attention.backend import MlaBackend
from mla_backend.attention.kernel import DecodeKernel
from mla_backend.attention.metadata import MlaMetadataBuilder
from mla_backend.attention.step_plans import StepPlans
from mla_backend.attention.warmup import batch_sizes


def reasons(capability, **changes):
    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True
    )._replace(**changes)
    return MlaBackend.validate_configuration(device_capability=capability, **config._asdict())


@pytest.mark.parametrize(
    "changes",
    [
        *({"kv_cache_dtype": name} for name in ("fp8", "fp8_e4m3", "fp8_ds_mla")),
        {"use_dcp": True},
        {"use_batch_invariant": True},
    ],
)
def test_a_gpu_takes(changes):
    assert reasons(DeviceCapability(9, 0), **changes) == []


def test_a_cpu_has_no_context_parallelism():
    (reason,) = reasons(None, use_dcp=True)
    assert reason.startswith("on a CPU, decode context parallelism. Mend")


def test_rows_of_fp8_ds_mla_are_bytes():
    assert MlaBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    assert MlaBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8") == (7, 64, 576)


@pytest.mark.parametrize(
    "impl, expected",
    [("auto", AttentionCGSupport.UNIFORM_BATCH), ("torch", AttentionCGSupport.NEVER)],
)
def test_graphs_only_where_nothing_waits_for_the_device(impl, expected, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_IMPL", impl)
    assert MlaMetadataBuilder.get_cudagraph_support(None, None) == expected


@pytest.mark.parametrize("switch", ["0", "1"])
def test_batch_invariant_mode_makes_deterministic_plans(switch, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", switch)
    monkeypatch.setenv("MLA_BACKEND_IMPL", "triton")
    device = torch.device("cpu")
    kernel = DecodeKernel.choose(MlaDims(), torch.bfloat16, "auto", device)
    plans = StepPlans(kernel, 16, 4, 4096, device)
    plan = plans.for_step(torch.tensor([5, 70], dtype=torch.int32), 2)
    assert plan.deterministic is (switch == "1")
    assert (plan.num_requests, plan.s_q, plan.num_heads) == (2, 2, 16)
    assert plans.workspace_bytes > 0


def test_plans_of_all_query_lengths_share_one_workspace(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("MLA_BACKEND_IMPL", "triton")
    device = torch.device("cpu")
    kernel = DecodeKernel.choose(MlaDims(), torch.bfloat16, "auto", device)
    plans = StepPlans(kernel, 16, 4, 16384, device)
    plans.reserve(4)
    lens = torch.tensor([5, 70], dtype=torch.int32)
    acc = [plans.for_step(lens, s_q).device_plan.acc for s_q in (1, 2, 3, 4)]
    assert len({x.data_ptr() for x in acc}) == 1
    assert [x.shape[1] for x in acc] == [16, 32, 48, 64]
    assert acc[3].nbytes <= plans.workspace_bytes < 1.05 * acc[3].nbytes


@pytest.mark.parametrize(
    "shape, message",
    [
        ((129, 1), "129 query heads on one rank; the decode kernels take 128. Mend: a --tensor"),
        ((256, 9), "256 query heads on one rank"),
        ((16, 9), "8 speculative tokens; the decode kernels take 8 query tokens a request, so at"),
    ],
)
def test_steps_that_no_kernel_takes_are_refused_at_start_up(shape, message):
    support.refuse_step_shape(128, 8)
    assert (support.MAX_HEADS, support.MAX_QUERY_LEN) == (MAX_HEADS, MAX_S_Q)
    with pytest.raises(ValueError, match=message):
        support.refuse_step_shape(*shape)


def test_drafts_under_context_parallelism_are_refused():
    support.refuse_step_shape(128, 1, dcp=2)
    with pytest.raises(ValueError, match="3 speculative tokens with decode context parallelism"):
        support.refuse_step_shape(128, 1, dcp=2, drafts=3)


def test_warm_up_covers_every_specialisation():
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 3, 4, 5]
    sizes = batch_sizes(1000)
    assert set(range(1, 161)) < set(sizes) and {256, 257, 512, 513, 1000} < set(sizes)
    assert max(sizes) == 1000
