# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton kernels run: a GPU, or (tests/conftest.py) the interpreter on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
