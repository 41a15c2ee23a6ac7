# SPDX-License-Identifier: Apache-2.0
"""Cache rows that do not start at multiples of 16 bytes: what kernels are told of them.

Of pointers and strides Triton learns whether 16 divides them (strides: in elements), and nothing if
it does not. It would load such a row element by element.
"""

import math

import torch
import triton
import triton.language as tl


def row_alignment(kv_cache: torch.Tensor) -> int:
    """Bytes that divide where every row of a cache starts: 16 if Triton knows that itself, else the
    largest power of two up to 8."""
    page, row, _ = kv_cache.stride()
    size = kv_cache.element_size()
    known = 8 if page % 16 else 16
    return math.gcd(known, kv_cache.data_ptr(), page * size, row * size)


@triton.jit
def row_pointers(ptr, offset, ALIGN: tl.constexpr):
    """ptr + offset, where rows start: multiples of ALIGN bytes. offset is a scalar, [BN, 1] or
    [BN, 1, 1]."""
    start = ptr + offset
    if ALIGN == 16:
        return start
    elif len(start.shape) == 0:
        return tl.multiple_of(start, ALIGN)
    elif len(start.shape) == 2:
        return tl.multiple_of(start, [ALIGN, ALIGN])
    else:
        return tl.multiple_of(start, [ALIGN, ALIGN, ALIGN])
