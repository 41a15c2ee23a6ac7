# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

import pytest
import torch


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
