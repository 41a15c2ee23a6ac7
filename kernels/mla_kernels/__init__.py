# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention kernels for torch and Triton. Imports no serving engine."""

from mla_kernels.cache.api import write_kv_cache
from mla_kernels.decode.api import mla_decode
from mla_kernels.decode.plan import MlaDecodePlan, plan_mla_decode

__all__ = ["MlaDecodePlan", "mla_decode", "plan_mla_decode", "write_kv_cache"]
