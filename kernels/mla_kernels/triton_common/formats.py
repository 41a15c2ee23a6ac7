# SPDX-License-Identifier: Apache-2.0
"""The cache layouts by the names that kernels know them by, and the scales of fp8 codes."""

import torch

_FORMATS = {torch.uint8: "fp8_ds_mla", torch.float8_e4m3fn: "fp8"}


def cache_format(dtype: torch.dtype) -> str:
    """The layout that a cache tensor of this dtype has."""
    return _FORMATS.get(dtype, "float")


def scale_argument(scale: float | torch.Tensor | None) -> float | torch.Tensor:
    """A scale of fp8 codes as a kernel takes it: a tensor that it reads, or a float. Triton gives
    an int its own type, and no parameter at all if it is 1."""
    if isinstance(scale, torch.Tensor):
        return scale
    return 1.0 if scale is None else float(scale)
