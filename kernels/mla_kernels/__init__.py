# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention kernels for torch and Triton. Imports no serving engine."""

from mla_kernels.cache.api import write_kv_cache
from mla_kernels.decode.api import mla_decode
from mla_kernels.decode.plan import MlaDecodePlan, plan_mla_decode
from mla_kernels.layer.api import mla_layer

__all__ = ["MlaDecodePlan", "mla_decode", "mla_layer", "plan_mla_decode", "write_kv_cache"]
