# SPDX-License-Identifier: Apache-2.0
import socket

import ports
import pytest


def test_a_port_is_below_those_that_linux_gives_to_others():
    """32768 is where its default range begins."""
    assert all(ports.FIRST <= ports.free_port() < ports.STOP <= 32768 for _ in range(50))


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as taken, socket.socket() as beside:
        taken.bind(("127.0.0.1", 0))
        beside.bind(("127.0.0.1", 0))
        port, free = taken.getsockname()[1], beside.getsockname()[1]
        beside.close()
        tried = iter(([port, free], [port]))
        monkeypatch.setattr(ports.random, "sample", lambda *_: next(tried))
        assert ports.free_port() == free
        with pytest.raises(RuntimeError, match="is free"):
            ports.free_port()
