# SPDX-License-Identifier: Apache-2.0
"""Worker side of `/mla/info`: `--worker-extension-cls mla_backend.worker.WorkerExtension`."""

from collections import Counter
from typing import Any

import torch

from mla_backend import stats


class WorkerExtension:
    """Mixed into vLLM's worker class; reached with `collective_rpc("mla_backend_stats")`."""

    def mla_backend_stats(self) -> dict[str, Any]:
        """What this worker's process computed with the backend; see `stats.snapshot`.

        `gpu_bytes`: what its tensors take on the GPU now, without what torch keeps for later ones;
        None without a GPU. `backends`: how many attention layers each backend of vLLM has, as
        some (of a draft, or HYV4's) may have another than the one asked for.
        """
        gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else None
        return {
            "rank": getattr(self, "rank", 0),
            "gpu_bytes": gpu_bytes,
            "backends": _backends(getattr(self, "vllm_config", None)),
            **stats.snapshot(),
        }


def _backends(vllm_config: Any) -> dict[str, int]:
    if vllm_config is None:  # outside a worker
        return {}
    layers = vllm_config.compilation_config.static_forward_context.values()
    # Other layers in there have no `impl`: an indexer's cache, experts, linear attention.
    names = (layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "impl"))
    return dict(Counter(names))
