# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs where, whatever the op."""

import pytest
import torch
from mla_kernels.dispatch import choose_impl
from mla_kernels.triton_common import runtime

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
ALL = ("hopper", "triton", "torch", "reference")


def test_an_amd_gpu_of_the_number_9_0_is_no_hopper(gpu, monkeypatch):
    """gfx90a, by torch's capability."""
    gpu(90)
    assert choose_impl("op", "auto", GPU, available=ALL).impl == "hopper"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    chosen = choose_impl("op", "auto", GPU, available=ALL)
    assert chosen.impl == "triton" and "hopper: it needs an sm_90 GPU" in chosen.reason
    with pytest.raises(ValueError, match="impl='hopper' of op cannot run here: it needs an sm_90"):
        choose_impl("op", "hopper", GPU, available=ALL)


@pytest.mark.parametrize("interpret", [True, False])
def test_on_a_cpu_triton_kernels_are_for_the_interpreter(interpret, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", interpret)
    why = "its interpreter is for tests" if interpret else "TRITON_INTERPRET is not set"
    chosen = choose_impl("op", "auto", CPU, available=ALL)
    assert chosen.impl == "torch" and "triton: " in chosen.reason and why in chosen.reason
    if interpret:
        assert choose_impl("op", "triton", CPU, available=ALL).impl == "triton"
    else:
        with pytest.raises(ValueError, match=f"impl='triton' of op cannot run here: .*{why}"):
            choose_impl("op", "triton", CPU, available=ALL)


def test_what_the_op_has_not_is_named():
    with pytest.raises(ValueError, match=r"impl of op in \['auto', 'torch'\], got 'triton'"):
        choose_impl("op", "triton", CPU, available=("torch",))
