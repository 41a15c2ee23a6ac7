# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM changes, frees or rounds after loading."""

import functools
from typing import Any

from mla_backend.compat import versions


def keep_kv_b_weight(kv_b_proj: Any) -> None:
    """Keep `kv_b_proj.weight` after loading on CPU: the MLA layer splits it into W_UK and W_UV.

    vLLM 0.26 to 0.28 pack the weight of every unquantised linear layer and free the original.
    From 0.29 the MLA layer itself opts out of that. In all versions the int8 operator without AMX
    tiles leaves None; such a layer is asked for its weight by a product with the identity, and
    vLLM reads of `weight` only the device, for which an empty one does.
    """
    _replace_none(kv_b_proj)
    if not versions.before((0, 29)):
        return
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class UnpackedLinearMethod(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            pass

        def apply(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return torch.nn.functional.linear(x, layer.weight, bias)

    if type(kv_b_proj.quant_method) is UnquantizedLinearMethod:
        kv_b_proj.quant_method = UnpackedLinearMethod()


def _replace_none(kv_b_proj: Any) -> None:
    import torch

    method: Any = getattr(kv_b_proj, "quant_method", None)
    process = getattr(method, "process_weights_after_loading", None)
    if process is None:
        return

    @functools.wraps(process)
    def process_weights_after_loading(layer: torch.nn.Module) -> None:
        process(layer)
        if getattr(layer, "weight", layer) is None:
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    method.process_weights_after_loading = process_weights_after_loading


def split_kv_b_exactly() -> None:
    """Have W_UK and W_UV be what `kv_b_proj` multiplies by, also where it quantises activations by
    a static scale (int8 or fp8 of compressed-tensors, fp8 of ModelOpt).

    vLLM reads such a layer's weight by a product with the identity, whose ones are rounded to that
    scale too: with int8 and activations of up to 10 all weights came out 4 % too small, with some
    of up to 0.5 by half. A multiple of the scale that both types have is not rounded; with a zero
    point it is taken on the side where int8 has room.
    """
    from vllm.model_executor.layers.attention import mla_attention

    stock = mla_attention.get_and_maybe_dequant_weights
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def get_and_maybe_dequant_weights(layer: Any, *args: Any, **kwargs: Any) -> Any:
        while hasattr(layer, "base_layer"):  # LoRA's
            layer = layer.base_layer
        scale, method = _static_scale(layer), layer.quant_method
        if scale is None:
            return stock(layer, *args, **kwargs)
        zero_point = getattr(layer, "input_zero_point", None)
        away = -64 if zero_point is not None and zero_point > 0 else 64  # 127 is the largest code
        one, apply = away * scale.float(), method.apply

        def apply_to_scaled(layer: Any, x: Any, bias: Any = None) -> Any:
            return apply(layer, (x * one).to(x.dtype), bias).float() / one

        method.apply = apply_to_scaled
        try:
            return stock(layer, *args, **kwargs)
        finally:
            del method.apply

    mla_attention.get_and_maybe_dequant_weights = get_and_maybe_dequant_weights


def _static_scale(layer: Any) -> Any:
    """The one scale of a layer's activations, if it has one before it sees them. Layers of other
    formats (Marlin's, of 4 bits) have theirs under this name too, or do not use it."""
    import torch

    scale, weight = getattr(layer, "input_scale", None), getattr(layer, "weight", None)
    if not isinstance(scale, torch.Tensor) or scale.numel() != 1 or weight is None:
        return None
    if weight.numel() == 0:  # int8 on a CPU
        return scale.reshape(())
    # AMX tiles keep it and use no such scale: a multiple would be rounded to bf16 for nothing.
    amx = weight.is_cpu and weight.dtype == torch.int8
    multiplied = weight.dtype in (torch.int8, torch.float8_e4m3fn) and not amx
    return scale.reshape(()) if multiplied else None
