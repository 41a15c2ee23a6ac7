# SPDX-License-Identifier: Apache-2.0
"""An old Triton is refused by name, before a kernel of it is imported."""

import importlib.metadata
import importlib.util

import pytest
import torch
from mla_kernels import dispatch
from mla_kernels.versions import no_triton


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these distributions are all there is, by version."""

    def pretend(**found):
        def version(name):
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        spec = object() if found else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        no_triton.cache_clear()

    yield pretend
    no_triton.cache_clear()


def test_old_triton_is_refused(installed):
    installed(triton="3.5.1")
    assert no_triton() == "it needs triton 3.6 or newer, 3.5.1 is installed"
    with pytest.raises(ValueError, match=r"impl='triton' of op cannot run here.*3\.5\.1 is"):
        dispatch.choose_impl(
            "op", "triton", torch.device("cpu"), available=("triton", "torch", "reference")
        )


@pytest.mark.parametrize(
    "found",
    [{"triton": "3.6.0"}, {"triton": "3.10.0"}, {"pytorch-triton-rocm": "3.7.1"}, {"x": "1"}],
)
def test_others_are_not(installed, found):
    installed(**found)
    assert no_triton() is None


def test_none_at_all(installed):
    installed()
    assert no_triton() == "triton is not installed"
