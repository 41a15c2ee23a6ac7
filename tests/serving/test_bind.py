# SPDX-License-Identifier: Apache-2.0
"""The server's socket: the port that it got, and which address it could not have."""

import asyncio
import json
import shlex
import socket
from argparse import Namespace

import pytest
import uvicorn
from mla_serving.server import lifecycle


@pytest.fixture
def bind():
    from mla_serving.server import http

    return http.bind


def address(host="127.0.0.1", port=0, uds=None):
    return Namespace(host=host, port=port, uds=uds, ssl_certfile=None, root_path=None)


def test_port_0_is_a_free_one_and_the_ready_line_says_which(bind):
    from mla_serving.server import http

    args = address()
    with bind(args) as sock:
        port = sock.getsockname()[1]
        assert args.port == port > 0
        assert http.url(args) == f"http://127.0.0.1:{port}"


def test_a_taken_port(bind):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError,
            match=f"cannot listen on 127.0.0.1:{port}: Address already"
            " in use. Mend: another --port, or 0 for any",
        ):
            bind(address(port=port))


def test_the_port_of_a_server_that_loads_its_model(bind):
    args = address()
    with bind(args), pytest.raises(OSError, match=f"{args.port}: Address already in use"):
        bind(args)


def test_a_port_with_what_is_left_of_connections(bind):
    """The side that closes first keeps the connection for a minute: here the server."""
    args = address()

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def serve():
        listening = asyncio.Event()
        config = uvicorn.Config(answer, lifespan="off", log_level="warning")
        server = lifecycle.Server(config, listening.set)
        serving = asyncio.create_task(server.serve(sockets=[bind(args)]))
        await listening.wait()
        reader, writer = await asyncio.open_connection(args.host, args.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()
        server.should_exit = True
        await serving

    for _ in range(2):
        asyncio.run(serve())
    with socket.socket() as alone, pytest.raises(OSError, match="Address already in use"):
        alone.bind((args.host, args.port))
    with bind(args), pytest.raises(OSError, match=f"{args.port}: Address already in use"):
        bind(args)  # while the one before it loads its model


@pytest.mark.parametrize("port", [-1, 65536])
def test_no_port(bind, port):
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*must be 0-65535"):
        bind(address(port=port))


def test_a_socket_file_is_not_left_behind(bind, tmp_path):
    from mla_serving.server import http

    args = address(uds=str(tmp_path / "s"))
    for _ in range(2):
        sock = bind(args)
        with pytest.raises(OSError, match=r"Address already in use\. Mend: remove the file"):
            bind(args)
        http.unbind(sock, args)
    assert not list(tmp_path.iterdir())


def test_the_socket_file_of_the_next_server_stays(bind, tmp_path):
    """Which somebody made place for."""
    from mla_serving.server import http

    path = tmp_path / "s"
    first, second = address(uds=str(path)), address(uds=str(path))
    old = bind(first)
    path.unlink()
    new = bind(second)
    http.unbind(old, first)
    assert path.is_socket()
    http.unbind(new, second)
    assert not path.exists()


def test_a_socket_file_that_is_gone(bind, tmp_path):
    from mla_serving.server import http

    args = address(uds=str(tmp_path / "s"))
    sock = bind(args)
    (tmp_path / "s").unlink()
    http.unbind(sock, args)


def test_a_socket_file_that_cannot_be(bind, tmp_path):
    path = str(tmp_path / "nowhere" / "s")
    with pytest.raises(OSError, match=f"cannot listen on {path}: No such file"):
        bind(address(uds=path))
    long = str(tmp_path / ("x" * 200))
    with pytest.raises(OSError, match=f"cannot listen on {long}: AF_UNIX path too long"):
        bind(address(uds=long))


def test_how_a_client_gets_there(tmp_path):
    from mla_serving.server import http, run

    assert http.curl(address(port=8000)) == "curl http://127.0.0.1:8000"
    assert http.curl(address(uds="/x/s")) == "curl --unix-socket /x/s http://localhost"
    line = run.example(http.curl(address(port=8000)), "name", True, ("generate",))
    assert line.startswith("curl http://127.0.0.1:8000/v1/chat/completions -H 'Authorization: B")
    line = run.example("curl x", "name", False, ("generate",))
    assert "Authorization" not in line and '"name"' in line


@pytest.mark.parametrize("place", [{"uds": "/x y/it's"}, {"host": "::1"}])
def test_the_request_to_try_can_be_pasted(place):
    from mla_serving.server import http, run

    args, name = address(port=8000, **place), """it's "x" """
    line = run.example(http.curl(args), name, True, ("generate",))
    begin, body = shlex.split(line)[:-6], shlex.split(line)[-1]
    there = ["--unix-socket", args.uds, "http://localhost"] if args.uds else [http.url(args)]
    assert begin == ["curl", *there[:-1], f"{there[-1]}/v1/chat/completions"]
    assert json.loads(body)["model"] == name


def test_the_request_to_try_is_one_that_the_engine_answers():
    """An embedding model has no chat."""
    from mla_serving.server import run

    line = run.example("curl x", "name", False, ("embed", "token_embed"))
    assert line.startswith("curl x/v1/embeddings -H 'Content-Type: application/json' -d ")
    assert line.endswith("""'{"model": "name", "input": "Hello"}'""")
    assert run.example("curl x", "name", False, ("classify",)) is None
