# SPDX-License-Identifier: Apache-2.0
"""Worker side of `/mla/info`: `--worker-extension-cls mla_backend.worker.WorkerExtension`."""

from typing import Any

from mla_backend import stats


class WorkerExtension:
    """Mixed into vLLM's worker class; reached with `collective_rpc("mla_backend_stats")`."""

    def mla_backend_stats(self) -> dict[str, Any]:
        """What this worker's process computed with the backend; see `stats.snapshot`."""
        return {"rank": getattr(self, "rank", 0), **stats.snapshot()}
