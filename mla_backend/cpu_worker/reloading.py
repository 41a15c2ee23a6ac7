# SPDX-License-Identifier: Apache-2.0
"""Weights loaded anew (`reload_weights`) into a model with experts.

vLLM (seen in 0.32 and 0.33) packs the weights of unquantised experts for its CPU kernel the first
time only. Later ones lie there as the checkpoint has them, and every token is wrong.
"""

import functools
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


def pack_experts_each_time(model: torch.nn.Module) -> None:
    """Have all unquantised experts of a loaded `model` packed whenever they are loaded."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method._setup_kernel = functools.partial(_set_up_anew, method)


def _set_up_anew(method: Any, *args: Any, **kwargs: Any) -> None:
    method.moe_kernel = None  # what vLLM tells a first time by
    type(method)._setup_kernel(method, *args, **kwargs)
