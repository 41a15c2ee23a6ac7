# SPDX-License-Identifier: Apache-2.0
"""Which batches the fp8 kernel takes, and its sizes for them.

N            query rows of a program, wgmma's N
STEP         tiles of 64 tokens between two softmax steps
SLOTS        tiles of the rings
SLOTS_P      steps of P^T
ADDENDS      sums that a tile's scores are spread over
AHEAD        products of the scores under way while the next operands are made
PENDING      the same for the values
WORKER_REGS  registers of a value warpgroup's thread
"""

from typing import Any

_16 = {"N": 16, "STEP": 2, "SLOTS": 5, "SLOTS_P": 2, "ADDENDS": 2, "AHEAD": 8, "PENDING": 4}
_16 |= {"WORKER_REGS": 144}
_32 = _16 | {"N": 32, "SLOTS": 4, "ADDENDS": 1, "AHEAD": 4, "PENDING": 0, "WORKER_REGS": 136}
# fp8_ds_mla with 32 rows: one or two registers spill in the loop of some modes.
CONFIGS: dict[str, dict[int, dict[str, Any]]] = {
    "fp8": {16: _16, 32: _32},
    "fp8_ds_mla": {16: _16 | {"STEP": 1, "SLOTS": 4, "PENDING": 0, "WORKER_REGS": 136}},
}


def choose_config(rows: int, kv_format: str, rescale: str) -> dict[str, Any] | None:
    """The sizes for requests of `rows` query rows; None where the kernel of decode/hopper/kernel.py
    is taken: with 64 rows this one is slower (benchmarks/VERSIONS.md)."""
    if rescale != "pow2" or rows > 32:
        return None
    return CONFIGS.get(kv_format, {}).get(16 if rows <= 16 else 32)
