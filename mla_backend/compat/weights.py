# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM changes or frees after loading."""

from typing import Any

from mla_backend.compat import versions


def keep_kv_b_weight(kv_b_proj: Any) -> None:
    """Keep `kv_b_proj.weight` after loading on CPU: the MLA layer splits it into W_UK and W_UV.

    vLLM 0.26 to 0.28 pack the weight of every unquantised linear layer and free the original.
    From 0.29 the MLA layer itself opts out of that.
    """
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
