# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM changes, frees or rounds after loading."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from mla_backend.compat import versions
from mla_backend.refusals import cannot_serve


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


class LatentsKeepTheirDtype:
    """A `kv_b_proj` to which vLLM's common path of prompts gives cached latents as they are.

    It turns them into the dtype of the weight first, unless that is fp8 or uint8: in all versions
    to int8, to 0.27 to int32 if it is packed so (Marlin), and asks there for a `weight` that others
    (AWQ, GPTQ) have not. Such layers take activations of the model, in rows of their own, and the
    engine ends at the first prompt with a context. From 0.28 on layers of Kimi-Linear have a path
    of their own, which never sees this.
    """

    def __init__(self, projection: Any) -> None:
        self._projection = projection

    def __call__(self, x: Any) -> Any:
        return self._projection(x if self._known_weight() is not None else x.contiguous())

    def __getattr__(self, name: str) -> Any:
        if name == "_projection":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._projection, name)

    @property
    def weight(self) -> Any:
        weight = self._known_weight()
        return SimpleNamespace(dtype=self._projection.params_dtype) if weight is None else weight

    def _known_weight(self) -> Any:
        """The weight, if it is of a dtype that leads to no conversion, or to one that is right."""
        import torch

        weight = getattr(self._projection, "weight", None)
        dtype = getattr(weight, "dtype", torch.int8)
        return weight if dtype.is_floating_point or dtype == torch.uint8 else None


def split_kv_b_exactly() -> None:
    """Have W_UK and W_UV be what `kv_b_proj` multiplies by, also where it quantises activations by
    a scale of the checkpoint: int8 and fp8 (compressed-tensors, ModelOpt), and NVFP4.

    vLLM reads such a layer's weight by a product with the identity, whose ones are rounded to that
    scale too: with int8 and activations of up to 10 all weights came out 4 % too small, with some
    of up to 0.5 by half; with NVFP4 up to 6 % off. As it reads, the scale is one that keeps ones.
    """
    from vllm.model_executor.layers.attention import mla_attention

    stock = mla_attention.get_and_maybe_dequant_weights
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def get_and_maybe_dequant_weights(layer: Any, *args: Any, **kwargs: Any) -> Any:
        while hasattr(layer, "base_layer"):  # LoRA's
            layer = layer.base_layer
        with _set(_scales_that_keep_one(layer)):
            return stock(layer, *args, **kwargs)

    mla_attention.get_and_maybe_dequant_weights = get_and_maybe_dequant_weights


@contextlib.contextmanager
def _set(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Tensors hold these values. In place, as operators may have views of them."""
    kept = [(tensor, tensor.data.clone()) for tensor, _ in values]
    try:
        for tensor, value in values:
            tensor.data.copy_(value)
        yield
    finally:
        for tensor, value in kept:
            tensor.data.copy_(value)


def _scales_that_keep_one(layer: Any) -> Sequence[tuple[Any, Any]]:
    """The scales by which a layer quantises activations, if it has any before it sees them, and the
    values with which 1 is a code of theirs, times a scale that changes no bit of the weight."""
    import torch

    if hasattr(layer, "b12x_tensor_fp8_packed_weight"):
        raise cannot_serve(
            "fp8 weights of kv_b_proj with a static scale of activations by b12x, which "
            "rounds W_UK and W_UV to that scale. Mend: no b12x in --linear-backend"
        )
    inverse, alpha = (getattr(layer, name, None) for name in ("input_global_scale_inv", "alpha"))
    if inverse is not None and alpha is not None:
        # NVFP4: 1 is stored as 6, the largest code, with a scale of inverse / 6 rounded to e4m3.
        return (inverse, torch.tensor(6.0)), (alpha, layer.weight_global_scale.data / 6)
    scale, weight = getattr(layer, "input_scale", None), getattr(layer, "weight", None)
    if not isinstance(scale, torch.Tensor) or scale.numel() != 1 or weight is None:
        return ()
    # int8 on a CPU may leave none. Layers of other formats (Marlin's) do not use it.
    if weight.numel() > 0 and weight.dtype not in (torch.int8, torch.float8_e4m3fn):
        return ()
    zero_point = getattr(layer, "input_zero_point", None)
    away = zero_point is not None and zero_point > 0  # up to 127, which is the largest code
    return ((scale, torch.tensor(-1.0 if away else 1.0)),)
