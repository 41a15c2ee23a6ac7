# SPDX-License-Identifier: Apache-2.0
"""The cache layouts by the names that kernels know them by."""

import torch

_FORMATS = {torch.uint8: "fp8_ds_mla", torch.float8_e4m3fn: "fp8"}


def cache_format(dtype: torch.dtype) -> str:
    """The layout that a cache tensor of this dtype has."""
    return _FORMATS.get(dtype, "float")
