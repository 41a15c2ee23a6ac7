# SPDX-License-Identifier: Apache-2.0
"""Models that are planned, as released."""

import pytest
from mla_serving.plan.config import from_config, load

from tests.serving.plan.plan_models import FP8, MODELS, V3, V32, config


@pytest.fixture
def v3():
    """DeepSeek-V3 as released: 61 layers, fp8 in blocks of 128."""
    changes = {"num_hidden_layers": 61, "quantization_config": FP8}
    return from_config(config(V3, **changes), "v3")


@pytest.fixture
def v32():
    changes = {"num_hidden_layers": 61, "quantization_config": FP8}
    return from_config(config(V32, **changes), "v3.2")


@pytest.fixture
def lite():
    return load(str(MODELS / "deepseek-v2-lite"))
