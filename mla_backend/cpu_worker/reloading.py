# SPDX-License-Identifier: Apache-2.0
"""Weights loaded anew (`reload_weights`): of experts, of int8, and beside LoRA adapters.

vLLM (seen in 0.32 and 0.33) packs the weights of unquantised experts for its CPU kernel the first
time only. Later ones lie there as the checkpoint has them, and every token is wrong. Its operator
of int8 weights was seen to corrupt memory and abort the process then (0.32, bf16), or to give NaN.
An engine that takes adapters has the layers that these may change under other names than the
checkpoint: vLLM (0.32) fails in the middle, with layers on the meta device, and the next step ends
the engine.
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


def refuse_int8(model: torch.nn.Module) -> None:
    """ValueError for a loaded `model` with layers of vLLM's int8 operator, which is left as is."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
        if hasattr(kernel, "dnnl_handler"):
            raise ValueError(
                "reload_weights of int8 weights on a CPU, where vLLM's operator corrupts memory "
                "afterwards. Mend: start the engine again, with the new weights"
            )


def refuse_adapted(model: torch.nn.Module) -> None:
    """ValueError for a `model` whose layers vLLM has wrapped for adapters; it is left as is."""
    found = [name for name, layer in model.named_modules() if hasattr(layer, "base_layer")]
    if found:
        raise ValueError(
            f"reload_weights with --enable-lora, for which vLLM has wrapped {found[0]} (one of "
            f"{len(found)}) and does not find the checkpoint's names. Mend: start the engine again "
            "with the new weights, or leave out --enable-lora"
        )
