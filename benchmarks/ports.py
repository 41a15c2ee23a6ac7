# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that bind theirs only once they have loaded."""

import random
import socket

# Below those that kernels give by their own choice (by default Linux's begin at 32768, others' at
# 49152): these an engine beside takes by the dozen while a server still imports.
FIRST, STOP = 10000, 30000
TRIES = 100


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now. RuntimeError if none of many was free."""
    for port in random.sample(range(FIRST, STOP), TRIES):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"None of {TRIES} ports of 127.0.0.1 from {FIRST} to {STOP - 1} is free")
