# SPDX-License-Identifier: Apache-2.0
"""Tests import modules of benchmarks/ by name, as its commands do."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def signals():
    """Handlers are the process's: they are put back."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the tests run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
