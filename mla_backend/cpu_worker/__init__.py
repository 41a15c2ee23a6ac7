# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, mended: a module a fault."""

from mla_backend.cpu_worker.worker import MlaCpuWorker

__all__ = ["MlaCpuWorker"]
