# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from mla_kernels.arch import ARCHS, KB, device_arch, get_arch


def test_shared_memory_table_matches_the_cuda_guide():
    limits = {sm: arch.shared_memory // KB for sm, arch in ARCHS.items()}
    assert limits == {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.parametrize(("sm", "served_as"), [(87, 86), (103, 100), (121, 120), (90, 90)])
def test_unlisted_chips_use_the_closest_lower_entry_of_their_generation(sm, served_as):
    assert get_arch(sm) is ARCHS[served_as]


@pytest.mark.parametrize("sm", [75, 70, 110])
def test_unserved_generations_are_refused(sm):
    with pytest.raises(ValueError, match=f"sm_80.*got sm_{sm}"):
        get_arch(sm)


def test_cpu_is_not_a_gpu():
    with pytest.raises(ValueError, match="got cpu"):
        device_arch(torch.device("cpu"))
