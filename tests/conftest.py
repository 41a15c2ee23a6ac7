# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several test folders share."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mla_serving.demo_model import make_demo_model


def interpret_kernels() -> None:
    """Bind Triton's kernels to its CPU interpreter, in this process only.

    Triton's own library is bound when triton is first imported, so this runs before any test
    module is. The environment variable is taken back: tests start processes that must not have it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    del os.environ["TRITON_INTERPRET"]


if not torch.cuda.is_available():
    interpret_kernels()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers on every run, whatever ran before it in its process."""
    torch.manual_seed(0)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Engines start one after the other, in one of xdist's processes; those of tests/gpu, where
    all start with the first test, once. So do makes, which lock the Makefile."""
    if not item.config.pluginmanager.hasplugin("xdist"):
        return
    if item.get_closest_marker("engine") or item.path.parent.name == "gpu":
        item.add_marker(pytest.mark.xdist_group("engine"))
    elif item.path.name == "test_makefile.py":
        item.add_marker(pytest.mark.xdist_group("make"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that is skipped without a GPU and is not marked would run nowhere: machines with one
    run `-m gpu`."""
    for item in items:
        reasons = [str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif")]
        lacking = any(r.startswith("needs ") and "GPU" in r for r in reasons)
        if lacking and item.get_closest_marker("gpu") is None:
            raise pytest.UsageError(f"Expected the mark `gpu` on {item.nodeid}")


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`demo_checkpoint(family)`: directory of the demo model, made once in a session."""

    @functools.cache
    def checkpoint(family: str) -> Path:
        return make_demo_model(family, tmp_path_factory.mktemp(f"demo-{family}") / family)

    return checkpoint
