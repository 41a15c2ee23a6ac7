# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism in eager mode.

vLLM 0.27 and later leave out the dummy step in which stages behind the first make their buffers,
and these die in the first real one.
"""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group


def make_stage_buffers(runner: Any) -> None:
    """Make what a model `runner` of vLLM receives from the stage before it, if there is one, as its
    dummy step does."""
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
