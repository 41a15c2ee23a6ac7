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


@pytest.fixture(scope="session")
def unaligned():
    """`unaligned(cache, align)`: a copy among NaN whose address and strides `align` bytes divide,
    and nothing larger."""

    def copy(cache: torch.Tensor, align: int) -> torch.Tensor:
        pages, block, width = cache.shape
        size = cache.element_size()
        step, row = align // size, (-(-width * size // align) | 1) * align // size
        page = block * row + step
        memory = torch.full(((pages * page + step) * size,), 0xFF, dtype=torch.uint8)
        memory = memory.to(cache.device).view(cache.dtype)
        return memory.as_strided(cache.shape, (page, row, 1), step).copy_(cache)

    return copy
