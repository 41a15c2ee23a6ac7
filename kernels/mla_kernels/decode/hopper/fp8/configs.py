# SPDX-License-Identifier: Apache-2.0
"""Which batches the fp8 kernel takes, and its sizes for them.

N           query rows of a program, wgmma's N
SLOTS       tiles of the rings
ADDENDS     sums that a tile's scores are spread over; 4: the groups of fp8_ds_mla, each times its
            scale at the end
AHEAD       products of the scores under way while the next operands are made
PENDING     the same for the values
PLANES      of P^T of a tile: one, or one a group of fp8_ds_mla, times its scale
VALUE_REGS  registers of a value warpgroup's thread
SCORE_REGS  registers of a scores warpgroup's thread
"""

from typing import Any

_16 = {"N": 16, "SLOTS": 5, "ADDENDS": 2, "AHEAD": 4, "PENDING": 4, "PLANES": 1}
_16 |= {"VALUE_REGS": 128, "SCORE_REGS": 128}
_32 = _16 | {"N": 32, "PENDING": 2}
_64 = {"N": 64, "SLOTS": 3, "ADDENDS": 1, "AHEAD": 2, "PENDING": 1, "PLANES": 1}
_64 |= {"VALUE_REGS": 168, "SCORE_REGS": 88}
CONFIGS: dict[str, dict[int, dict[str, Any]]] = {
    "fp8": {16: _16, 32: _32, 64: _64},
    "fp8_ds_mla": {
        16: _16 | {"SLOTS": 4, "ADDENDS": 4, "PLANES": 4},
        32: _32 | {"SLOTS": 4, "ADDENDS": 1},
    },
}


def choose_config(rows: int, kv_format: str, rescale: str) -> dict[str, Any] | None:
    """The sizes for requests of `rows` query rows; None where the kernel of decode/hopper/kernel.py
    is taken: bf16, "amla", and more than 32 rows of fp8_ds_mla, which are slower here
    (benchmarks/VERSIONS.md)."""
    if rescale != "pow2":
        return None
    sizes = CONFIGS.get(kv_format, {})
    return sizes.get(16 if rows <= 16 else 32 if rows <= 32 else 64)
