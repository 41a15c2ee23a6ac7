# SPDX-License-Identifier: Apache-2.0
"""CPU platform that honours this backend when, and only when, it is selected.

vLLM's CPU platform knows two MLA backends by name and adapts the configuration to them: block
size 16, no chunked prefill, no prefix caching. Unless this plugin's backend is selected
(`--attention-backend CUSTOM`), every method here is vLLM's own, but for the operator that rejects
drafts.
"""

from dataclasses import dataclass
from typing import Any

from vllm import envs as vllm_envs
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from mla_backend import compat, envs
from mla_backend.attention import support
from mla_backend.plugin import is_ours, is_selected, sparse_class_path
from mla_backend.refusals import RefusalError, cannot_serve

logger = init_logger("vllm.mla_backend")

_ROTARY_OP = "rotary_embedding"
_VLLM_WORKER_CLASS = "vllm.v1.worker.cpu_worker.CPUWorker"
_WORKER_CLASS = "mla_backend.cpu_worker.MlaCpuWorker"


@dataclass
class _Asked:
    """What the user asked for, before vLLM's CPU platform rewrites it for its own MLA kernels."""

    block_size: int
    user_specified_block_size: bool
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    max_num_batched_tokens: int

    @classmethod
    def read(cls, vllm_config: Any) -> "_Asked":
        asked = cls.settled(vllm_config)
        if not asked.user_specified_block_size:
            asked.block_size = support.BLOCK_SIZE
        if asked.block_size % support.BLOCK_SIZE != 0:
            raise RefusalError(support.block_size_reason(asked.block_size))
        return asked

    @classmethod
    def settled(cls, vllm_config: Any) -> "_Asked":
        """As it stands, for an engine that was adapted before."""
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        return cls(
            cache.block_size,
            cache.user_specified_block_size,
            scheduler.enable_chunked_prefill,
            cache.enable_prefix_caching,
            scheduler.max_num_batched_tokens,
        )

    def restore(self, vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        cache.block_size = self.block_size
        cache.user_specified_block_size = self.user_specified_block_size
        cache.enable_prefix_caching = self.enable_prefix_caching
        scheduler.enable_chunked_prefill = self.enable_chunked_prefill
        scheduler.max_num_batched_tokens = self.max_num_batched_tokens


def _avoid_rotary_op(vllm_config: Any) -> None:
    """Take rotary embedding off vLLM's compiled CPU op: for 3-D q and k it is wrong by 0.3-0.4.

    Models with yarn never use that op; those with `rope_type: default` do.
    """
    ops = vllm_config.compilation_config.custom_ops
    chosen = {f"+{_ROTARY_OP}", f"-{_ROTARY_OP}"} & set(ops)
    if envs.get("MLA_BACKEND_CPU_ROTARY_FIX") and not chosen:
        ops.append(f"-{_ROTARY_OP}")


def _mend_worker(vllm_config: Any) -> None:
    """Take our worker for vLLM's, whose faults cpu_worker/ names."""
    if vllm_config.parallel_config.worker_cls == _VLLM_WORKER_CLASS:
        vllm_config.parallel_config.worker_cls = _WORKER_CLASS


def _select_for_draft(vllm_config: Any) -> None:
    """Give an MLA draft model (MTP) this backend too, unless the user named another for it.

    vLLM would choose for itself, and its own MLA backends want other blocks, or refuse the model.
    """
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.use_mla and speculative.attention_backend is None:
        speculative.attention_backend = vllm_config.attention_config.backend


def _refuse_hybrid(model: Any) -> None:
    """ValueError for a model with layers that no kernel of this machine computes. vLLM would fail
    on an import, or start and end at the first request."""
    from vllm.triton_utils import HAS_TRITON  # asks for the platform, which this module makes

    if model.is_hybrid and not HAS_TRITON:
        raise cannot_serve(support.hybrid_on_cpu_reason(model.architecture))


def _refuse_adapters_beside_experts(vllm_config: Any) -> None:
    """ValueError for LoRA with a model of experts, whose engine would die in its first step,
    whatever layers the adapters change."""
    from vllm.triton_utils import HAS_TRITON

    model = vllm_config.model_config
    if vllm_config.lora_config is not None and model.get_num_experts() and not HAS_TRITON:
        raise cannot_serve(support.lora_of_experts_on_cpu_reason(model.architecture))


class MlaCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, plus this backend."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's own adaptation; with our backend selected, without the parts that fight it.

        Raises RuntimeError for a vLLM outside the supported range, ValueError for a model
        without MLA, one with linear attention beside it, LoRA with a model of experts, a KV cache
        dtype or a block size that the kernels do not take, decode context parallelism, speculative
        tokens with pipeline parallelism, batch-invariant mode, and a setting that does not parse.
        """
        model = vllm_config.model_config
        if model is None or not is_selected(vllm_config):
            cls._check_and_update_other(vllm_config)
            return
        compat.require_supported_vllm()
        envs.get("MLA_BACKEND_CPU_PLATFORM")  # our entry point let a wrong value pass
        if not support.is_mla_model(model):
            raise RefusalError(support.not_mla_reason(model.architecture))
        _refuse_hybrid(model)
        _refuse_adapters_beside_experts(vllm_config)
        kv_cache_dtype = vllm_config.cache_config.cache_dtype
        if kv_cache_dtype not in support.KV_CACHE_DTYPES:
            raise RefusalError(support.kv_cache_dtype_reason(kv_cache_dtype, model.dtype))
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        if ranks > 1:  # vLLM before 0.28 does not ask the class of a layer, and would start
            raise cannot_serve(support.dcp_on_cpu_reason(ranks))
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1 and (speculative := vllm_config.speculative_config) is not None:
            drafts = speculative.num_speculative_tokens
            raise cannot_serve(support.drafts_in_stages_on_cpu_reason(drafts, stages))
        if vllm_envs.VLLM_BATCH_INVARIANT:
            raise cannot_serve(support.batch_invariance_on_cpu_reason())
        asked = _Asked.read(vllm_config)
        # Else vLLM warns that it overrides the block size, which is put back right after.
        vllm_config.cache_config.user_specified_block_size = False
        super().check_and_update_config(vllm_config)
        asked.restore(vllm_config)
        _select_for_draft(vllm_config)
        _avoid_rotary_op(vllm_config)
        _mend_worker(vllm_config)
        logger.info_once(
            "mla-backend serves MLA on CPU: block size %d, chunked prefill %s, prefix caching %s.",
            asked.block_size,
            "on" if asked.enable_chunked_prefill else "off",
            "on" if asked.enable_prefix_caching else "off",
        )

    @classmethod
    def _check_and_update_other(cls, vllm_config: Any) -> None:
        """vLLM's own adaptation, where our backend is not selected.

        For its draft an engine makes a second configuration, which shares the target's caches and
        scheduler. With a draft that is not MLA it selects nothing of ours, but adapting it would
        take chunked prefill and the blocks from the target, whose prompts may then never fit.
        """
        settled = None
        if vllm_config.parallel_config.worker_cls == _WORKER_CLASS:  # this engine's target is ours
            settled = _Asked.settled(vllm_config)
            vllm_config.cache_config.user_specified_block_size = False
        super().check_and_update_config(vllm_config)
        if settled is not None:
            settled.restore(vllm_config)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM's own (from 0.31 on), of an operator that rejects what is no draft."""
        from mla_backend.cpu_worker.rejection import reject_padding

        reject_padding()
        super().register_triton_kernel_overrides()

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """vLLM's own. From 0.33 on it chooses a block size here where none was asked for, 128 for a
        model with several classes of layers; ours was chosen above, and the log names it.
        """
        chosen = vllm_config.cache_config.block_size
        super().update_block_size_for_backend(vllm_config)
        model = vllm_config.model_config
        if model is not None and not model.is_hybrid and is_selected(vllm_config):
            vllm_config.cache_config.block_size = chosen

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        """Path of the attention class for one layer; ours after the same checks as on a GPU.

        What is not ours goes to vLLM as it came: outside the supported range its arguments differ.
        """
        if not is_ours(selected_backend):
            return super().get_attn_backend_cls(selected_backend, *args, **kwargs)
        return _our_class(selected_backend, *args, **kwargs)


def _our_class(
    selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
) -> str:
    sparse = sparse_class_path(selected_backend, attn_selector_config, None)
    if sparse is not None:
        logger.info_once("Using %s (mla-backend, sparse) on CPU.", selected_backend.name)
        return sparse
    backend = selected_backend.get_class()
    reasons = backend.validate_configuration(
        device_capability=None, **attn_selector_config._asdict()
    )
    if reasons:
        raise RefusalError(f"{selected_backend.name} cannot serve this: {'; '.join(reasons)}")
    logger.info_once("Using %s (mla-backend) on CPU.", selected_backend.name)
    return selected_backend.get_path()
