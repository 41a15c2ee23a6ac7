# SPDX-License-Identifier: Apache-2.0
"""W_UK and W_UV, read from a `kv_b_proj` that quantises activations, are its weight; and what such
a `kv_b_proj` is given."""

import types

import pytest
import torch

from mla_backend import compat
from mla_backend.refusals import RefusalError

INT8, FP8 = torch.int8, torch.float8_e4m3fn
SCALES = [0.3, 0.08, 1.0023 / 64, 1.0039 / 64, 0.004, 0.0005]  # bf16 rounds multiples of some


@pytest.fixture(autouse=True)
def read_exactly(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import mla_attention

    stock = mla_attention.get_and_maybe_dequant_weights
    monkeypatch.setattr(
        mla_attention, "get_and_maybe_dequant_weights", getattr(stock, "__wrapped__", stock)
    )
    compat.split_kv_b_exactly()
    for name, value in (("rank", 0), ("world_size", 1)):  # no process group
        name = f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}"
        monkeypatch.setattr(name, lambda value=value: value)
    # With AMX tiles vLLM's operators of a CPU have no static scales, and those of fp8 take the
    # smallest codes for others.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with set_current_vllm_config(VllmConfig()):
        yield


def read(layer, dtype):
    from vllm.model_executor.layers.attention import mla_attention

    return mla_attention.get_and_maybe_dequant_weights(layer, out_dtype=dtype)


class StaticScale:
    """A quantisation of linear layers that rounds activations to multiples of `input_scale`, and
    what it computes in fp32 to their dtype, as operators of a GPU do."""

    def __init__(self, dtype, zero_point=0):
        self.dtype, self.zero_point = dtype, zero_point
        self.weight = torch.randint(-127, 128, (8, 4)) * 0.0007

    def apply(self, layer, x, bias=None):
        if layer.input_scale is None:
            return (x.float() @ self.weight.T).to(x.dtype)
        codes = x.float() / layer.input_scale
        if self.dtype == INT8:
            codes = (codes.round() + self.zero_point).clamp(-128, 127) - self.zero_point
        else:
            codes = codes.clamp(-448, 448).to(self.dtype).float()
        return (codes @ self.weight.T * layer.input_scale).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [*SCALES, None])
@pytest.mark.parametrize("codes", [INT8, FP8])
@pytest.mark.parametrize("freed", [False, True])
def test_ones_are_not_rounded_as_activations(codes, scale, dtype, freed):
    """With a static scale those of vLLM come out as others, or saturate."""
    method = StaticScale(codes)
    layer = types.SimpleNamespace(
        quant_method=method,
        weight=torch.empty(0) if freed else torch.empty(8, 4).to(codes),
        input_scale=None if scale is None else torch.tensor([scale]),
        input_size_per_partition=4,
    )
    wrapped = types.SimpleNamespace(base_layer=layer)  # by LoRA
    for asked in (layer, wrapped):
        assert torch.equal(read(asked, dtype), method.weight.to(dtype))
    assert scale is None or layer.input_scale == torch.tensor(scale)


@pytest.mark.parametrize("zero_point", [-128, -65, 0, 64, 99, 127])
def test_activations_with_a_zero_point(zero_point):
    """Those that are mostly of one sign have codes for few of the other."""
    method = StaticScale(INT8, zero_point)
    layer = types.SimpleNamespace(
        quant_method=method,
        weight=torch.empty(0),
        input_scale=torch.tensor(0.3),
        input_zero_point=torch.tensor([zero_point], dtype=torch.int32),
        input_size_per_partition=4,
    )
    assert torch.equal(read(layer, torch.bfloat16), method.weight.bfloat16())


def layer_of(scheme, dtype, values):
    """A layer of 64 inputs and 96 outputs, as vLLM loads it by a scheme of compressed-tensors."""
    layer = torch.nn.Module()
    values = {name: torch.as_tensor(value) for name, value in values.items()}
    torch.set_default_dtype(dtype)  # the model's, while vLLM builds it
    try:
        scheme.create_weights(
            layer=layer,
            output_partition_sizes=[96],
            input_size_per_partition=64,
            input_size=64,
            output_size=96,
            params_dtype=dtype,
            weight_loader=lambda *_: None,
        )
        for name, value in values.items():
            getattr(layer, name).data.copy_(value)
        scheme.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(torch.float32)
    if layer.weight is None:
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    layer.bias, layer.input_size_per_partition = None, 64
    layer.quant_method = types.SimpleNamespace(
        apply=lambda layer, x, bias=None: scheme.apply_weights(layer, x, bias)
    )
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("zero_point", [None, -128, 0, 99, 127])
def test_vllms_int8_layer(dtype, scale, zero_point):
    from compressed_tensors.quantization import QuantizationStrategy
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    scheme = schemes.CompressedTensorsW8A8Int8(
        QuantizationStrategy.TENSOR, is_static_input_scheme=True, input_symmetric=zero_point is None
    )
    codes = torch.randint(-127, 128, (96, 64), dtype=INT8)
    values = {"weight": codes, "weight_scale": 0.0007, "input_scale": scale}
    if zero_point is not None:
        values["input_zero_point"] = zero_point
    layer = layer_of(scheme, dtype, values)
    assert_close(read(layer, dtype), codes * torch.tensor(0.0007))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
def test_vllms_fp8_layer(dtype, scale, monkeypatch):
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    monkeypatch.setattr(
        get_current_vllm_config(), "model_config", types.SimpleNamespace(dtype=dtype)
    )
    monkeypatch.setattr(  # of one weight it changes nothing, and a CPU has no operator for it
        "vllm.model_executor.layers.quantization.utils.w8a8_utils.requantize_with_max_scale",
        lambda weight, weight_scale, logical_widths: (weight_scale.max(), weight),
    )
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    scheme = schemes.CompressedTensorsW8A8Fp8(arguments, is_static_input_scheme=True)
    codes = torch.randn(96, 64).to(FP8)
    values = {"weight": codes, "weight_scale": 0.0011, "input_scale": scale}
    layer = layer_of(scheme, dtype, values)
    scheme.fp8_linear.quant_fp8 = scheme.fp8_linear.quant_fp8.forward_native  # as an engine's
    assert_close(read(layer, dtype), codes.float() * torch.tensor(0.0011))


class OnBlackwell:
    """What FlashInfer's and CUTLASS' operators compute of NVFP4."""

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None):
        from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation

        codes, scales = emulation.ref_nvfp4_quant(x, layer.input_global_scale_inv, 16)
        x = (codes.unflatten(1, (-1, 16)) * scales[..., None]).flatten(1)
        return (x @ nvfp4_weight(layer, torch.tensor(1.0)).T * layer.alpha).bfloat16()


def nvfp4_weight(layer, global_scale):
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as emulation

    return emulation.dequantize_to_dtype(
        layer.weight, layer.weight_scale, global_scale, torch.float32, swizzle=False
    )


@pytest.mark.parametrize("scale", [*(1 / s for s in SCALES), 448.0, 5.9 * 448])
@pytest.mark.parametrize("emulated", [True, False])
def test_nvfp4(scale, emulated, monkeypatch):
    """Ones are rounded to a scale of e4m3 there: 6 % off at the worst, all the same way."""
    from vllm.model_executor.kernels.linear.nvfp4 import base, emulation
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    kernel = emulation.EmulationNvFp4LinearKernel(base.NvFp4LinearLayerConfig())
    module = schemes.CompressedTensorsW4A4Fp4.__module__
    for name, value in (
        ("init_nvfp4_linear_kernel", kernel if emulated else OnBlackwell()),
        ("expose_input_quant_key", None),
    ):
        monkeypatch.setattr(f"{module}.{name}", lambda *_, value=value, **__: value)
    scheme = schemes.CompressedTensorsW4A4Fp4()
    values = {
        "weight_packed": torch.randint(0, 256, (96, 32), dtype=torch.uint8),
        "weight_scale": torch.rand(96, 4).add(0.1).to(FP8),
        "weight_global_scale": 1 / 0.0007,
        "input_global_scale": scale,
    }
    layer = layer_of(scheme, torch.bfloat16, values)
    kept = layer.input_global_scale_inv.clone(), layer.alpha.clone()
    weight = nvfp4_weight(layer, layer.weight_global_scale)
    assert_close(read(layer, torch.bfloat16), weight)
    assert (layer.input_global_scale_inv, layer.alpha) == kept


def test_b12x_is_refused():
    """Its weights have the scale in them, and their original is freed."""
    layer = types.SimpleNamespace(b12x_tensor_fp8_packed_weight=object(), weight=torch.empty(0))
    with pytest.raises(RefusalError, match=r"by b12x.* Mend: no b12x in --linear-backend"):
        read(layer, torch.bfloat16)


def test_a_scale_is_put_back_after_an_error():
    method = types.SimpleNamespace(apply=None)  # no operator
    layer = types.SimpleNamespace(
        quant_method=method,
        weight=torch.empty(0),
        input_scale=torch.tensor(0.3),
        input_size_per_partition=4,
    )
    with pytest.raises(TypeError):
        read(layer, torch.float32)
    assert layer.input_scale == torch.tensor(0.3)


def assert_close(split, weight):
    """Rounded once, to its dtype; sums in fp32 may be one bit off before that."""
    dtype = split.dtype
    rounded = weight.to(dtype)
    torch.testing.assert_close(split, rounded, rtol=torch.finfo(dtype).eps, atol=0)
    ratio = (split.double() * rounded).sum() / rounded.double().square().sum()
    assert abs(ratio - 1) < 2e-5


@pytest.mark.parametrize("kept", [torch.int8, torch.int32, None])
def test_latents_of_a_context_are_not_turned_into_what_weights_are_kept_in(kept):
    """vLLM's common path of prompts asks for the weight's dtype."""
    weights = {} if kept is None else {"weight": torch.zeros(2, dtype=kept)}
    layer = types.SimpleNamespace(params_dtype=torch.bfloat16, quant_method="its", **weights)
    projection = compat.LatentsKeepTheirDtype(layer)
    assert projection.weight.dtype == torch.bfloat16 and projection.quant_method == "its"


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_weights_that_vllm_knows_about_are_what_it_sees(kept):
    layer = types.SimpleNamespace(params_dtype=torch.bfloat16, weight=torch.zeros(2, dtype=kept))
    assert compat.LatentsKeepTheirDtype(layer).weight is layer.weight


def test_layers_of_both_kinds_have_such_a_projection(monkeypatch):
    import sparse_parts
    import test_impl

    for impl in (test_impl.make_impl(512, torch.float32), sparse_parts.make_impl(monkeypatch)):
        assert isinstance(impl.kv_b_proj, compat.LatentsKeepTheirDtype)
