# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several test folders share."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from mla_serving.demo_model import make_demo_model


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`demo_checkpoint(family)`: directory of the demo model, made once in a session."""

    @functools.cache
    def checkpoint(family: str) -> Path:
        return make_demo_model(family, tmp_path_factory.mktemp(f"demo-{family}") / family)

    return checkpoint
