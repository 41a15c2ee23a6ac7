# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM changes or frees after loading."""

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
