# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

from contextlib import contextmanager

import pytest
import torch
from mla_kernels import dispatch
from mla_kernels.arch import get_arch


def pytest_collection_modifyitems(items):
    """On a GPU machine `-m gpu` takes the tests that run in the interpreter elsewhere, too."""
    if torch.cuda.is_available():
        for item in items:
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton kernels run: a GPU, or (tests/conftest.py) the interpreter on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def gpu(monkeypatch):
    """gpu(90) makes every GPU that is asked about an sm_90; needs Triton, which every GPU has."""
    pytest.importorskip("triton")

    def make(sm):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(sm, 10))
        monkeypatch.setattr(dispatch, "device_arch", lambda device: get_arch(sm))

    return make


@pytest.fixture
def only_launches():
    """`with only_launches():` what runs inside neither allocates nor syncs nor compiles."""
    import triton

    @contextmanager
    def watched():
        compiled = []
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        listener, triton.knobs.compilation.listener = (
            triton.knobs.compilation.listener,
            lambda **event: compiled.append(event),
        )
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            triton.knobs.compilation.listener = listener
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert not compiled

    return watched
