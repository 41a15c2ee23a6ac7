# SPDX-License-Identifier: Apache-2.0
"""Small DeepSeek-style checkpoints, made on the spot from a seed: for a first try and for tests."""

from mla_serving.demo_model.build import demo_model_path, make_demo_model
from mla_serving.demo_model.config import FAMILIES, SERVED_NAME

__all__ = ["FAMILIES", "SERVED_NAME", "demo_model_path", "make_demo_model"]
