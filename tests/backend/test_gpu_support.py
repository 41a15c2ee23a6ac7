# SPDX-License-Identifier: Apache-2.0
"""What the dense backend says of a GPU, asked on any machine."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from layer_config import selector_config
from mla_kernels.decode.api import MAX_HEADS, MAX_S_Q
from mla_kernels.dispatch import Choice
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse import api as sparse_api
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonMetadataBuilder,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.selector import AttentionSelectorConfig

from mla_backend import compat
from mla_backend.attention import support
from mla_backend.attention.backend import MlaBackend
from mla_backend.attention.kernel import DecodeKernel, rescale_on
from mla_backend.attention.metadata import MlaMetadataBuilder, microbatched_graphs
from mla_backend.attention.step_plans import StepPlans
from mla_backend.attention.warmup import batch_sizes, queries
from mla_backend.stats import STATS


def reasons(capability, backend=MlaBackend, **changes):
    config = selector_config(**changes)
    return backend.validate_configuration(device_capability=capability, **config._asdict())


@pytest.mark.parametrize(
    "changes",
    [
        *({"kv_cache_dtype": name} for name in ("fp8", "fp8_e4m3", "fp8_ds_mla")),
        {"use_dcp": True},
        {"use_batch_invariant": True},
    ],
)
def test_a_gpu_takes(changes):
    assert reasons(DeviceCapability(9, 0), **changes) == []


@pytest.mark.parametrize(
    "capability, fnuz, changes, words",
    [
        ((9, 4), True, {}, None),
        ((9, 5), False, {"kv_cache_dtype": "fp8"}, None),
        ((9, 4), True, {"kv_cache_dtype": "fp8"}, "KV cache dtype fp8 on this AMD GPU, .*e4m3fnuz"),
        ((9, 4), True, {"kv_cache_dtype": "fp8_ds_mla"}, "KV cache dtype fp8_ds_mla on this AMD"),
        ((9, 5), False, {"use_sparse": True}, "DeepSeek Sparse Attention on an AMD GPU"),
    ],
)
def test_what_is_refused_on_gpus_of_amd(monkeypatch, capability, fnuz, changes, words):
    """Their compute capabilities look like those of NVIDIA's."""
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    monkeypatch.setattr(compat, "on_amd_gpu", lambda: True)
    monkeypatch.setattr(compat, "fp8_is_fnuz", lambda: fnuz)
    backend = SparseMlaBackend if changes.get("use_sparse") else MlaBackend
    found = reasons(DeviceCapability(*capability), backend, **changes)
    assert len(found) == (words is not None)
    if words:
        assert re.match(words, found[0])


def test_fp8_queries_are_not_for_a_gpu_of_amd_that_calls_itself_9_0(fp8_query):
    fp8_query.setattr(compat, "on_amd_gpu", lambda: True)
    fp8_query.setattr(compat, "fp8_is_fnuz", lambda: False)
    (reason,) = reasons(DeviceCapability(9, 0), kv_cache_dtype="fp8")
    assert reason == "MLA_BACKEND_FP8_QUERY=1 on an AMD GPU. Mend: unset MLA_BACKEND_FP8_QUERY"


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_fp32_on_a_gpu_is_for_sparse_layers_in_torch(monkeypatch, impl):
    """vLLM, whose prompts those of dense layers are, has no prefill in fp32."""
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    monkeypatch.setenv("MLA_BACKEND_IMPL", impl)
    words = "model dtype float32 on a GPU, whose kernels take float16 and bfloat16. Mend: --dtype "
    gpu = DeviceCapability(9, 0)
    assert reasons(gpu, dtype=torch.float32) == [f"{words}bfloat16"]
    layer = AttentionSelectorConfig(
        head_size=576, dtype=torch.float32, kv_cache_dtype="auto", block_size=64, use_mla=True,
        use_sparse=True,
    )  # fmt: skip
    found = SparseMlaBackend.validate_configuration(device_capability=gpu, **layer._asdict())
    slow = f"{words}bfloat16, or MLA_BACKEND_IMPL=torch, which is slow"
    assert found == ([] if impl == "torch" else [slow])


@pytest.fixture
def fp8_query(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_FP8_QUERY", "1")
    return monkeypatch


@pytest.mark.parametrize(
    "changes", [{}, {"use_dcp": True}, {"use_batch_invariant": True}, {"block_size": 128}]
)
@pytest.mark.parametrize("cache", ["fp8", "fp8_e4m3"])
def test_fp8_queries_are_taken_with_an_fp8_cache(fp8_query, cache, changes):
    assert reasons(DeviceCapability(9, 0), kv_cache_dtype=cache, **changes) == []
    fp8_query.setenv("MLA_BACKEND_IMPL", "hopper")
    assert reasons(DeviceCapability(9, 0), kv_cache_dtype=cache, **changes) == []


@pytest.mark.parametrize(
    "capability, changes, env, needs",
    [
        ((9, 0), {"kv_cache_dtype": "auto"}, {}, "--kv-cache-dtype fp8, not auto"),
        ((9, 0), {"kv_cache_dtype": "fp8_ds_mla"}, {}, "--kv-cache-dtype fp8, not fp8_ds_mla"),
        ((8, 0), {}, {}, "an sm_90 GPU, not sm_80"),
        ((10, 0), {}, {}, "an sm_90 GPU, not sm_100"),
        (None, {}, {}, "an sm_90 GPU, not a CPU"),
        ((9, 0), {"dtype": torch.float16}, {}, "model dtype bfloat16, not float16"),
        ((9, 0), {}, {"IMPL": "triton"}, "MLA_BACKEND_IMPL of auto or hopper, not triton"),
        ((9, 0), {}, {"IMPL": "torch"}, "MLA_BACKEND_IMPL of auto or hopper, not torch"),
        ((9, 0), {}, {"RESCALE": "amla"}, "MLA_BACKEND_RESCALE of auto or pow2, not amla"),
    ],
)
def test_fp8_queries_are_refused_where_they_cannot_be_had(
    fp8_query, capability, changes, env, needs
):
    for name, value in env.items():
        fp8_query.setenv(f"MLA_BACKEND_{name}", value)
    device = capability and DeviceCapability(*capability)
    (reason,) = reasons(device, **{"kv_cache_dtype": "fp8"} | changes)
    assert reason == f"MLA_BACKEND_FP8_QUERY=1 needs {needs}. Mend: unset MLA_BACKEND_FP8_QUERY"
    fp8_query.setenv("MLA_BACKEND_FP8_QUERY", "0")
    assert reasons(device, **{"kv_cache_dtype": "fp8"} | changes) == []


def test_an_engine_that_fp8_queries_would_speed_up_says_so():
    from mla_backend.attention.fp8_query import hint

    would = ("hopper", "float8_e4m3fn", "bfloat16", 128)
    assert "MLA_BACKEND_FP8_QUERY=1 decodes faster" in hint(*would)
    for place, other in enumerate(("triton", "bfloat16", "float8_e4m3fn", 16)):
        assert hint(*would[:place], other, *would[place + 1 :]) == ""


@pytest.mark.parametrize("cache, warns", [("float8_e4m3fn", True), ("bfloat16", False)])
def test_it_is_said_where_the_server_shows_it(monkeypatch, cache, warns):
    """Its log is of warnings."""
    from mla_backend.attention import metadata

    said = []
    monkeypatch.setattr(metadata.logger, "warning_once", said.append)
    builder = SimpleNamespace(
        _most_s_q=1, _deals_drafts=False, _plans=SimpleNamespace(workspace_bytes=0)
    )
    kernel = SimpleNamespace(
        impl="hopper", kv_cache_dtype=getattr(torch, cache), query_dtype=torch.bfloat16
    )
    metadata.MlaMetadataBuilder._say_what_decodes(builder, kernel, 128, 8, 1)
    assert ["MLA_BACKEND_FP8_QUERY=1 decodes faster" in text for text in said] == [True] * warns


def test_fp8_queries_of_a_sparse_layer_are_refused(fp8_query):
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    layer = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=64, use_mla=True,
        use_sparse=True,
    )  # fmt: skip
    (reason,) = SparseMlaBackend.validate_configuration(
        device_capability=DeviceCapability(9, 0), **layer._asdict()
    )
    assert "needs dense attention, not DeepSeek Sparse Attention" in reason


@pytest.mark.parametrize(
    "capability, impl, sparse, needs",
    [
        ((9, 0), "auto", True, None),
        ((9, 0), "hopper", True, None),
        ((9, 0), "auto", False, "DeepSeek Sparse Attention, not dense attention"),
        ((10, 0), "auto", True, "an sm_90 GPU, not sm_100"),
        (None, "auto", True, "an sm_90 GPU, not a CPU"),
        ((9, 0), "triton", True, "MLA_BACKEND_IMPL of auto or hopper, not triton"),
    ],
)
def test_where_an_indexer_multiplies_in_fp8(monkeypatch, capability, impl, sparse, needs):
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    monkeypatch.setenv("MLA_BACKEND_FP8_INDEXER", "1")
    monkeypatch.setenv("MLA_BACKEND_IMPL", impl)
    layer = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True,
        use_sparse=sparse,
    )  # fmt: skip
    backend = SparseMlaBackend if sparse else MlaBackend
    device = capability and DeviceCapability(*capability)
    found = backend.validate_configuration(device_capability=device, **layer._asdict())
    words = f"MLA_BACKEND_FP8_INDEXER=1 needs {needs}. Mend: unset MLA_BACKEND_FP8_INDEXER"
    assert found == ([words] if needs else [])
    monkeypatch.delenv("MLA_BACKEND_FP8_INDEXER")
    assert backend.validate_configuration(device_capability=device, **layer._asdict()) == []


def test_the_kernel_of_fp8_queries_is_chosen_and_planned_as_such(fp8_query, monkeypatch):
    from mla_backend.attention import kernel as module

    asked, planned = {}, {}

    def choose(impl, device, **known):
        asked.update(known)
        return Choice("hopper", "why")

    monkeypatch.setattr(module, "choose_decode_impl", choose)
    monkeypatch.setattr(module, "plan_mla_decode", lambda *_, **known: planned.update(known))
    device = torch.device("cpu")
    kernel = DecodeKernel.choose(MlaDims(), torch.bfloat16, "fp8", device)
    fp8 = torch.float8_e4m3fn
    assert (kernel.dtype, kernel.query_dtype, kernel.kv_cache_dtype) == (torch.bfloat16, fp8, fp8)
    assert STATS.decode["query_dtype"] == "float8_e4m3fn"
    kernel.plan(torch.zeros(1, dtype=torch.int32), 16, 1)
    assert asked["dtype"] == planned["dtype"] == fp8
    fp8_query.setenv("MLA_BACKEND_FP8_QUERY", "0")
    kernel = DecodeKernel.choose(MlaDims(), torch.bfloat16, "fp8", device)
    assert kernel.query_dtype == torch.bfloat16 and STATS.decode["query_dtype"] == "bfloat16"


def test_queries_of_the_warm_up_are_those_of_a_step():
    """As vLLM hands them over: two parts, the first out of a product over heads, or codes."""
    dims, device = MlaDims(), torch.device("cpu")
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    kernel = DecodeKernel("hopper", "pow2", dims, bf16, bf16, fp8, deterministic=False)
    latent, rope = queries(kernel, 16, 6, device)
    assert latent.shape == (6, 16, 512) and latent.transpose(0, 1).is_contiguous()
    assert rope.shape == (6, 16, 64) and latent.dtype == rope.dtype == bf16
    codes = queries(replace(kernel, query_dtype=fp8), 16, 6, device)
    assert codes.shape == (6, 16, 576) and codes.dtype == fp8 and codes.is_contiguous()


def test_a_cpu_has_no_context_parallelism():
    (reason,) = reasons(None, use_dcp=True)
    assert reason.startswith("decode context parallelism on a CPU. Mend")


def test_rows_of_fp8_ds_mla_are_of_512_and_64():
    (reason,) = reasons(None, kv_cache_dtype="fp8_ds_mla", head_size=320)
    assert (
        "a cache row of 320 elements; its layout is for 576. Mend: --kv-cache-dtype fp8" in reason
    )
    assert reasons(None, kv_cache_dtype="fp8", head_size=320) == []


def test_vllm_is_asked_for_blocks_of_64():
    """Whatever its own default is."""
    assert [MlaBackend.get_preferred_block_size(size) for size in (16, 64, 128)] == [64] * 3


def test_rows_of_fp8_ds_mla_are_bytes():
    assert MlaBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    assert MlaBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8") == (7, 64, 576)


@pytest.mark.parametrize(
    "impl, expected",
    [("auto", AttentionCGSupport.UNIFORM_BATCH), ("torch", AttentionCGSupport.NEVER)],
)
def test_graphs_only_where_nothing_waits_for_the_device(impl, expected, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_IMPL", impl)
    assert MlaMetadataBuilder.get_cudagraph_support(None, None) == expected


@pytest.mark.parametrize("switch", ["0", "1"])
def test_batch_invariant_mode_makes_deterministic_plans(switch, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", switch)
    monkeypatch.setenv("MLA_BACKEND_IMPL", "triton")
    device = torch.device("cpu")
    kernel = DecodeKernel.choose(MlaDims(), torch.bfloat16, "auto", device)
    plans = StepPlans(kernel, 16, 4, 4096, device)
    plan = plans.for_step(torch.tensor([5, 70], dtype=torch.int32), 2)
    assert plan.deterministic is (switch == "1")
    assert (plan.num_requests, plan.s_q, plan.num_heads) == (2, 2, 16)
    assert plans.workspace_bytes > 0


def test_plans_of_all_query_lengths_share_one_workspace(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("MLA_BACKEND_IMPL", "triton")
    device = torch.device("cpu")
    kernel = DecodeKernel.choose(MlaDims(), torch.bfloat16, "auto", device)
    plans = StepPlans(kernel, 16, 4, 16384, device)
    plans.reserve(4)
    lens = torch.tensor([5, 70], dtype=torch.int32)
    acc = [plans.for_step(lens, s_q).device_plan.acc for s_q in (1, 2, 3, 4)]
    assert len({x.data_ptr() for x in acc}) == 1
    assert [x.shape[1] for x in acc] == [16, 32, 48, 64]
    assert acc[3].nbytes <= plans.workspace_bytes < 1.05 * acc[3].nbytes


@pytest.mark.parametrize(
    "shape, message",
    [
        ((129, 1), "129 query heads on one rank; the kernels take 128. Mend: a --tensor"),
        ((256, 9), "256 query heads on one rank"),
        ((16, 9), "8 speculative tokens; the decode kernels take 8 query tokens a request, so at"),
    ],
)
def test_steps_that_no_kernel_takes_are_refused_at_start_up(shape, message):
    support.refuse_step_shape(128, 8)
    assert (support.MAX_HEADS, support.MAX_QUERY_LEN) == (MAX_HEADS, MAX_S_Q)
    assert sparse_api.MAX_HEADS == MAX_HEADS
    with pytest.raises(ValueError, match=message):
        support.refuse_step_shape(*shape)


def test_drafts_in_parallel_are_refused_by_the_number_that_was_asked_for():
    """vLLM's first model runner then counts on 1 + 2 n query tokens a request."""
    support.refuse_step_shape(16, 7, drafts=3)
    with pytest.raises(
        ValueError,
        match=r"^4 speculative tokens with parallel drafting, .* 9 query tokens a request; the "
        r"decode kernels take 8, so at most 3\. Mend: lower num_speculative_tokens",
    ):
        support.refuse_step_shape(16, 9, drafts=4)
    with pytest.raises(ValueError, match=r"^8 speculative tokens; the decode kernels take 8"):
        support.refuse_step_shape(16, 9, drafts=8)


def test_graphs_whose_microbatches_would_cut_a_request_are_refused():
    support.refuse_microbatches(3, 2, [36, 48, 300])
    support.refuse_microbatches(1, 2, [33])
    support.refuse_microbatches(4, 1, [36])  # no microbatches
    with pytest.raises(
        ValueError,
        match=r"--enable-dbo with 2 speculative tokens and CUDA graphs of 33, 51 tokens, whose 2 "
        r"parts .* of 3\. Mend: cudagraph_capture_sizes of multiples of 6 .*PIECEWISE",
    ):
        support.refuse_microbatches(3, 2, [33, 36, 51])


def microbatched(mode, *, second_runner=False, max_num_seqs=64, **parallel):
    """What of vLLM's configuration says how it cuts steps."""
    parallel = {
        "use_ubatching": True,
        "num_ubatches": 2,
        "dbo_decode_token_threshold": 32,
        **parallel,
    }
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [8, 32, 40]}
    compilation["max_cudagraph_capture_size"] = 40
    layer = SimpleNamespace(impl=SimpleNamespace(num_heads=16))
    compilation["static_forward_context"] = {"layer": layer}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(**compilation),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        use_v2_model_runner=second_runner,
    )


def test_graphs_that_are_captured_in_microbatches():
    def graphs(*args, query_len=3, **given):
        return microbatched_graphs(microbatched(*args, **given), query_len)

    assert graphs(CUDAGraphMode.FULL_DECODE_ONLY) == [32, 40]
    assert graphs(CUDAGraphMode.FULL_AND_PIECEWISE, dbo_decode_token_threshold=0) == [8, 32, 40]
    assert graphs(CUDAGraphMode.FULL_DECODE_ONLY, use_ubatching=False) == []
    second = {"second_runner": True}  # of whole requests, as many as there may be
    assert graphs(CUDAGraphMode.FULL_DECODE_ONLY, **second) == [33]
    assert graphs(CUDAGraphMode.FULL_DECODE_ONLY, **second, query_len=1) == [32, 40]
    assert graphs(CUDAGraphMode.FULL_DECODE_ONLY, **second, query_len=5) == [35, 40]
    assert graphs(CUDAGraphMode.FULL_DECODE_ONLY, **second, query_len=5, max_num_seqs=7) == [35]
    assert graphs(CUDAGraphMode.PIECEWISE) == graphs(CUDAGraphMode.NONE) == graphs(None) == []


def build(monkeypatch, config, threshold=1, num_heads=16, ranks=1, layer="layer"):
    """A builder of `layer`, for which vLLM counts on `threshold` query tokens a request and, as
    0.26 does, on the heads of the main model."""

    def common(self, kv_cache_spec, layer_names, vllm_config, device, metadata_cls, **how):
        assert how == {"supports_dcp_with_varlen": True}  # else drafts would be prompts to vLLM
        self.num_heads, self.dcp_world_size, self.device = num_heads, ranks, device
        self.reorder_batch_threshold = threshold

    monkeypatch.setattr(MLACommonMetadataBuilder, "__init__", common)
    return MlaMetadataBuilder(None, [layer], config, torch.device("cpu"))


@pytest.mark.parametrize("sparse", [False, True])
def test_ranks_may_share_tokens_out_by_several_beside_drafts(monkeypatch, sparse):
    """vLLM asserts it before the first step, and with NIXL sets such an interleave by itself."""
    from vllm.v1.worker import cp_utils

    from mla_backend.attention.impl import MlaImpl
    from mla_backend.attention.sparse.impl import SparseMlaImpl

    impl = object.__new__(SparseMlaImpl if sparse else MlaImpl)
    impl.dcp_world_size, impl.need_to_return_lse_for_decode = 2, True
    layer = SimpleNamespace(impl=impl, get_attn_backend=lambda: None)
    monkeypatch.setattr(cp_utils, "get_layers_from_vllm_config", lambda *_, **__: {"a": layer})
    ranks = {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 1}
    parallel = SimpleNamespace(cp_kv_cache_interleave_size=64, **ranks)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=object())
    cp_utils.check_attention_cp_compatibility(config)


@pytest.mark.parametrize("threshold", [3, 5])
def test_an_engine_whose_microbatches_would_cut_a_request_does_not_start(monkeypatch, threshold):
    """Graphs have 1 + 2 tokens a request; with parallel drafting vLLM's threshold is 1 + 2 * 2."""
    config = microbatched(CUDAGraphMode.FULL_DECODE_ONLY)
    with pytest.raises(ValueError, match=r"with 2 speculative tokens and .* of 32, 40 tokens"):
        build(monkeypatch, config, threshold)


def test_plans_have_the_heads_of_the_layers(monkeypatch):
    """A draft model that is MLA too may have fewer heads than the main model."""
    builder = build(monkeypatch, one_layer(monkeypatch), num_heads=128)
    plan = builder._plans.for_step(torch.tensor([5, 70], dtype=torch.int32), 1)
    assert plan.num_heads == 16


def test_plans_of_every_length_are_made_before_the_first_step(monkeypatch):
    """Of pieces of prompts too: none is allocated while the engine serves."""
    builder = build(monkeypatch, one_layer(monkeypatch))
    monkeypatch.delattr(DecodeKernel, "plan")
    lengths = torch.tensor([40, 70], dtype=torch.int32)
    assert builder._longest_piece == 8
    for s_q in range(1, 9):
        assert builder._plans.for_step(lengths, s_q).s_q == s_q


def test_graphs_may_hold_more_requests_than_are_scheduled(monkeypatch):
    """A replay is of the size that was captured, padding included."""
    config = one_layer(monkeypatch)
    monkeypatch.setenv("MLA_BACKEND_EXTEND_TOKENS", "0")  # else ends of prompts ask for more rows
    assert build(monkeypatch, config)._plans.most_requests(1) == 4
    config.compilation_config.max_cudagraph_capture_size = 6
    assert build(monkeypatch, config)._plans.most_requests(1) == 6


def test_ranks_of_a_context_gather_their_heads(monkeypatch):
    config = one_layer(monkeypatch)
    builder = build(monkeypatch, config, ranks=4)
    assert builder._plans.for_step(torch.tensor([5], dtype=torch.int32), 1).num_heads == 64
    assert builder._extend_tokens == 0  # ends of prompts would need the other ranks' tokens
    config.compilation_config.static_forward_context["layer"].impl.num_heads = 64
    with pytest.raises(ValueError, match=r"256 .*heads"):
        build(monkeypatch, config, ranks=4)


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("prompts", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_layer_that_asserts_prompts_in_fp8(monkeypatch, cache, prompts):
    """Kimi-Linear's on CUDA: the engine would start, and end at the first prompt. A checkpoint with
    an fp8 cache makes fp8 of auto, which would be no mend."""
    config = one_layer(monkeypatch, cache)
    theirs = type("MultiHeadLatentAttention", (SimpleNamespace,), {})
    theirs.__module__ = "vllm.models.kimi_k3.nvidia.mla"
    layers = config.compilation_config.static_forward_context
    layers["kimi"] = theirs(impl=layers["layer"].impl)
    monkeypatch.setattr(MlaMetadataBuilder, "q_data_type", prompts, raising=False)
    build(monkeypatch, config)
    said = {
        ("fp8", torch.bfloat16): "KV cache dtype fp8 in .* Kimi-Linear .*-dtype bfloat16",
        ("fp8_ds_mla", torch.float8_e4m3fn): "fp8_ds_mla with prompts in fp8 .* no use_prefill",
    }.get((cache, prompts))
    if said:
        with pytest.raises(ValueError, match=said):
            build(monkeypatch, config, layer="kimi")
    else:
        build(monkeypatch, config, layer="kimi")


def test_the_layer_of_kimi_linear_is_known():
    mla = pytest.importorskip("vllm.models.kimi_k3.nvidia.mla")
    layer = object.__new__(mla.MultiHeadLatentAttention)
    assert compat.wants_fp8_prompts(layer)
    assert not compat.wants_fp8_prompts(object.__new__(MLAAttention))


def drafting(config, tokens):
    config.speculative_config = SimpleNamespace(num_speculative_tokens=tokens)
    return config


def one_layer(monkeypatch, cache="auto"):
    """vLLM's configuration of a model of one layer with 16 heads, on a CPU."""
    monkeypatch.setenv("MLA_BACKEND_IMPL", "torch")
    kernel = DecodeKernel.choose(MlaDims(), torch.bfloat16, cache, torch.device("cpu"))
    impl = SimpleNamespace(num_heads=16, decode_kernel=kernel, kv_cache_dtype=cache, dcp_rank=0)
    layer = SimpleNamespace(impl=impl)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": layer},
            cudagraph_mode=CUDAGraphMode.NONE,
            max_cudagraph_capture_size=0,
        ),
        parallel_config=SimpleNamespace(
            use_ubatching=False,
            num_ubatches=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(max_model_len=256),
        cache_config=SimpleNamespace(block_size=64),
        use_v2_model_runner=False,
    )


def test_warm_up_covers_every_specialisation():
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 3, 4, 5]
    sizes = batch_sizes(1000)
    assert set(range(1, 161)) < set(sizes) and {256, 257, 512, 513, 1000} < set(sizes)
    assert max(sizes) == 1000


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_gpu"),
    [
        ({}, "flash", "pow2"),
        ({"IMPL": "torch"}, "flash", "pow2"),
        ({"IMPL": "reference"}, "pow2", "pow2"),
        ({"RESCALE": "pow2"}, "pow2", "pow2"),
        ({"RESCALE": "flash"}, "flash", "flash"),
    ],
)
def test_rescale_that_an_engine_takes(monkeypatch, settings, on_cpu, on_gpu):
    for name, value in settings.items():
        monkeypatch.setenv(f"MLA_BACKEND_{name}", value)
    assert rescale_on(torch.device("cpu")) == on_cpu
    assert rescale_on(torch.device("cuda")) == on_gpu
