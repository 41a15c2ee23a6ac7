# SPDX-License-Identifier: Apache-2.0
"""Tests import modules of benchmarks/ by name, as its commands do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
