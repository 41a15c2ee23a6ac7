# SPDX-License-Identifier: Apache-2.0
"""How deep JSON nests. What Python cannot pickle, of about 490 levels, ends vLLM's engine: it hands
its workers kv_transfer_params and ec_transfer_params as they came.
"""

import json

import numpy as np

# vLLM takes schemas of 64 levels and structural tags of 80, which are not at the top of a body.
MOST = 128
_DROPPED = bytes(set(range(256)) - set(b'"{}[]'))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1


def is_too_deep(body: bytes) -> bool:
    """Whether JSON nests deeper than `MOST` objects and lists; of what is no JSON, whether what a
    parser reads before it stops does, or anything.

    Not by parsing: 8 MiB of small lists take seconds, in which no other request is answered.
    """
    if body.count(b"{") + body.count(b"[") <= MOST:
        return False
    if (encoding := json.detect_encoding(body)) != "utf-8":  # its bytes may look like brackets
        try:
            body = body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        except ValueError:
            return False
    # Without what is escaped, each quote begins or ends a string.
    body = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, delete=_DROPPED)
    marks = np.frombuffer(body, np.uint8)
    # Modulo 256, which leaves odd what is odd: inside a string.
    in_string = np.cumsum(marks == ord('"'), dtype=np.uint8) & 1
    steps = _STEP[marks]
    steps[in_string.view(bool)] = 0
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > MOST)
