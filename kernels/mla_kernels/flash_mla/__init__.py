# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's public functions on this package's kernels: `from mla_kernels import flash_mla`.

Names, argument orders, shapes and return values are those of DeepSeek's `flash_mla` package; what
runs is `mla_decode` and `mla_sparse_attention`, so any device will do. docs/flash_mla.md says where
the two differ. Dense prefill with separate keys and values (`flash_attn_varlen_*`) is not here.
"""

from mla_kernels.flash_mla.decode import flash_mla_with_kvcache
from mla_kernels.flash_mla.metadata import FlashMLASchedMeta, get_mla_metadata
from mla_kernels.flash_mla.prefill import flash_mla_sparse_fwd

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]
