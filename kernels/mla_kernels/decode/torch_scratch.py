# SPDX-License-Identifier: Apache-2.0
"""Memory on a CPU that the next call uses again: fresh pages cost more than the copy into them."""

import math
import threading

import torch

_BUFFERS = threading.local()
# Bytes that are worth keeping; for more, one long request would hold memory for good.
KEPT_BYTES = 2**27


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of whatever content, valid until this thread asks for `name` again."""
    buffer, last = getattr(_BUFFERS, name, (None, None))
    if last is not None and last.shape == shape and last.dtype == dtype:
        return last
    size = math.prod(shape) * dtype.itemsize
    if size > KEPT_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with torch.inference_mode(False):  # usable in and outside of it
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        last = buffer[:size].view(dtype).view(shape)
    if _is_plain(last):
        setattr(_BUFFERS, name, (buffer, last))
    return last


def _is_plain(x: torch.Tensor) -> bool:
    """Whether x is memory and nothing else. What a mode of torch or a transform of torch.func that
    the caller is in makes instead is of use only until that ends."""
    try:
        return type(x) is torch.Tensor and x.data_ptr() != 0
    except RuntimeError:  # a transform's, which has no address
        return False
