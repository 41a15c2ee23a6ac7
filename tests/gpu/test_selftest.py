# SPDX-License-Identifier: Apache-2.0
"""What `mla-backend doctor --selftest` says of this GPU."""

import torch

from mla_backend.doctor import selftest


def test_every_kernel_of_this_gpu_passes():
    shown = {result.name: result for result in selftest.run()}
    assert {name: r.found for name, r in shown.items() if r.status != "ok"} == {}
    assert "selftest mla_sparse_attention triton" in shown
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert ("selftest mla_decode hopper" in shown) == hopper
