# SPDX-License-Identifier: Apache-2.0
"""The sizes of the fp8 kernel by the rows of a request.

N           query rows of a program, wgmma's N
SLOTS       tiles of the rings
ADDENDS     sums that a tile's scores are spread over
AHEAD       products of the scores under way while the next operands are made
PENDING     the same for the values
SCALE_OF    whose largest scale the others are relative to in fp16: "cache", where there is but one;
            of fp8_ds_mla each "token"'s, or a "tile"'s power of two (kernel.py)
VALUE_REGS  registers of a value warpgroup's thread
SCORE_REGS  registers of a scores warpgroup's thread
"""

from typing import Any

_16 = {"N": 16, "SLOTS": 5, "ADDENDS": 2, "AHEAD": 4, "PENDING": 4, "SCALE_OF": "cache"}
_16 |= {"VALUE_REGS": 128, "SCORE_REGS": 128}
_32 = _16 | {"N": 32, "PENDING": 2}
_64 = {"N": 64, "SLOTS": 3, "ADDENDS": 1, "AHEAD": 2, "PENDING": 1, "SCALE_OF": "cache"}
_64 |= {"VALUE_REGS": 168, "SCORE_REGS": 88}
CONFIGS: dict[str, dict[int, dict[str, Any]]] = {
    "fp8": {16: _16, 32: _32, 64: _64},
    "fp8_ds_mla": {
        16: _16 | {"SLOTS": 4, "SCALE_OF": "token"},
        32: _32 | {"SLOTS": 4, "SCALE_OF": "tile", "ADDENDS": 1},
        64: _64 | {"SCALE_OF": "tile", "AHEAD": 1, "VALUE_REGS": 176, "SCORE_REGS": 80},
    },
}


def choose_config(rows: int, kv_format: str) -> dict[str, Any]:
    """The sizes for requests of `rows` query rows."""
    return CONFIGS[kv_format][16 if rows <= 16 else 32 if rows <= 32 else 64]
