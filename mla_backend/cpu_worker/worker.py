# SPDX-License-Identifier: Apache-2.0
"""The worker class that the platform names, which puts every mend in its place."""

import functools
from typing import Any

from vllm.model_executor.layers.fused_moe.router import (
    fused_topk_bias_router,
    zero_expert_router,
)
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUModelRunner, CPUWorker

from mla_backend.cpu_worker.adapters import leave_others_alone
from mla_backend.cpu_worker.blocks import zero_blocks
from mla_backend.cpu_worker.drafting import unshare_lengths
from mla_backend.cpu_worker.ending import end_without_collecting
from mla_backend.cpu_worker.experts import choose_experts, pass_on
from mla_backend.cpu_worker.generators import keep_generators
from mla_backend.cpu_worker.rejection import (
    expand_batch_to_tokens,
    limit_drafts,
    reject_padding,
)
from mla_backend.cpu_worker.reloading import (
    pack_experts_each_time,
    refuse_adapted,
    refuse_int8,
)
from mla_backend.cpu_worker.stages import make_stage_buffers


class MlaCpuWorker(CPUWorker):
    """vLLM's, with all mends."""

    def init_device(self) -> None:
        end_without_collecting()
        reject_padding()  # to 0.30; later ones have taken the operator already (platform.py)
        super().init_device()
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.apply_top_k_top_p = limit_drafts
        fused_topk_bias_router.vllm_topk_softmax = choose_experts
        zero_expert_router.zero_experts_compute_triton = pass_on
        leave_others_alone()
        runner = self.model_runner
        if isinstance(runner, CPUModelRunner):  # not the second runner, which is another class
            keep_generators(runner)
            runner._zero_block_ids = functools.partial(zero_blocks, runner)
            unshare_lengths(getattr(runner, "drafter", None))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        make_stage_buffers(self.model_runner)
        pack_experts_each_time(self.model_runner.get_model())

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        model = self.model_runner.get_model()
        refuse_int8(model)
        if kwargs.get("is_checkpoint_format", True):
            refuse_adapted(model)
        super().reload_weights(*args, **kwargs)
