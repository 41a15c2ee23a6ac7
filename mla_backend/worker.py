# SPDX-License-Identifier: Apache-2.0
"""Worker side of `/mla/info`: `--worker-extension-cls mla_backend.worker.WorkerExtension`."""

from typing import Any

import torch

from mla_backend import stats


class WorkerExtension:
    """Mixed into vLLM's worker class; reached with `collective_rpc("mla_backend_stats")`."""

    def mla_backend_stats(self) -> dict[str, Any]:
        """What this worker's process computed with the backend; see `stats.snapshot`.

        `gpu_bytes`: what its tensors take on the GPU now, without what torch keeps for later ones;
        None without a GPU.
        """
        gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else None
        return {"rank": getattr(self, "rank", 0), "gpu_bytes": gpu_bytes, **stats.snapshot()}
