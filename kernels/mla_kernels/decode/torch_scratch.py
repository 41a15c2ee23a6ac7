# SPDX-License-Identifier: Apache-2.0
"""Memory on a CPU that the next call uses again: fresh pages cost more than the copy into them."""

import math
import threading

import torch

_BUFFERS = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of whatever content, valid until this thread asks for `name` again."""
    size = math.prod(shape) * dtype.itemsize
    buffer: torch.Tensor | None = getattr(_BUFFERS, name, None)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # usable in and outside of it
            buffer = torch.empty(size, dtype=torch.uint8)
        setattr(_BUFFERS, name, buffer)
    return buffer[:size].view(dtype).view(shape)
