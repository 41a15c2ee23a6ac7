# SPDX-License-Identifier: Apache-2.0
"""uvicorn, set up from vLLM's HTTP options."""

import copy
import errno
import os
import shlex
import socket
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn

from mla_serving.server import vllm_api
from mla_serving.server.lifecycle import Server


def make_server(
    app: Any,
    args: Namespace,
    on_listening: Callable[[], None],
    make: Callable[[uvicorn.Config, Callable[[], None]], Server] = Server,
    process: str = "",
) -> Server:
    """The HTTP server for `app`, with every option that `vllm serve` would give to uvicorn.

    process: stands before each line of uvicorn's log, unless its format is the user's.
    """
    more: dict[str, Any] = {}
    log_config = vllm_api.get_uvicorn_log_config(args)
    if process and (log_config is None or not vllm_api.log_config_file(args)):
        log_config = _named(process, log_config)
    if log_config is not None:
        more["log_config"] = log_config
    if args.ssl_ciphers is not None:
        more["ssl_ciphers"] = args.ssl_ciphers
    config = uvicorn.Config(
        app,
        http=_protocol(args),
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=vllm_api.keep_alive_seconds(),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        **more,
    )
    config.load()
    if args.enable_ssl_refresh:
        vllm_api.SSLCertRefresher(
            ssl_context=config.ssl,
            key_path=args.ssl_keyfile,
            cert_path=args.ssl_certfile,
            ca_path=args.ssl_ca_certs,
        )
    return make(config, on_listening)


def _named(process: str, log_config: dict[str, Any] | None = None) -> dict[str, Any]:
    """`log_config`, or uvicorn's own, with the process before each line."""
    named = copy.deepcopy(log_config or uvicorn.config.LOGGING_CONFIG)
    for formatter in named["formatters"].values():
        if "fmt" in formatter:  # or the lines are JSON
            formatter["fmt"] = f"({process}) {formatter['fmt']}"
    return named


def _protocol(args: Namespace) -> Any:
    """What parses HTTP, within --h11-max-incomplete-event-size and --h11-max-header-count."""
    if find_spec("httptools") is None:
        from mla_serving.server.head_wait_h11 import H11Wait

        return H11Wait  # uvicorn bounds the size of this one itself
    from mla_serving.server.head_limit import HeadLimit

    return partial(
        HeadLimit,
        max_bytes=args.h11_max_incomplete_event_size,
        max_headers=args.h11_max_header_count,
    )


def bind(args: Namespace) -> socket.socket:
    """A socket bound to --host and --port, or --uds, not listening yet: a taken port shows early.

    Port 0 is any free one: `args.port` then says which; `args.uds_file` which file was made, None
    without --uds. Raises OSError naming the address.
    """
    host, port = args.host or "", args.port
    if args.uds:
        sock, address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), args.uds
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock, address = socket.socket(family, socket.SOCK_STREAM), (host, port)
    try:
        _bind(sock, address)
        args.uds_file = _identity(args.uds)
    except (OSError, OverflowError) as error:
        sock.close()
        where = args.uds or f"{host or '*'}:{port}"
        why = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            mend = "remove the file, if the server that made it was killed"
            why = f"{why}. Mend: {mend if args.uds else 'another --port, or 0 for any'}"
        raise OSError(f"cannot listen on {where}: {why}") from None
    if not args.uds:
        args.port = sock.getsockname()[1]
    return sock


def _bind(sock: socket.socket, address: Any) -> None:
    """Alone: with SO_REUSEADDR two that load their models would have one port, and the second hear
    of it when it listens. What is left of a server's connections needs it to bind, no longer."""
    try:
        sock.bind(address)
    except OSError as error:
        if sock.family == socket.AF_UNIX or error.errno != errno.EADDRINUSE:
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def unbind(sock: socket.socket, args: Namespace) -> None:
    """Undo `bind`: a file left at --uds would keep the next server from starting. One that another
    server has made since stays."""
    # First, as a closed socket's file may give its number to another.
    ours = _identity(args.uds) == args.uds_file
    sock.close()
    if args.uds and ours:
        Path(args.uds).unlink(missing_ok=True)


def _identity(path: str | None) -> tuple[int, int] | None:
    """What tells the file at `path` from others; None without one."""
    if not path:
        return None
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def url(args: Namespace) -> str:
    """Where a client on this machine finds the server."""
    if args.uds:
        return f"unix:{args.uds}"
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"
    scheme = "https" if args.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}{args.root_path or ''}"


def curl(args: Namespace) -> str:
    """`url` as the beginning of a curl command."""
    if args.uds:
        words = ["curl", "--unix-socket", args.uds, f"http://localhost{args.root_path or ''}"]
    else:
        words = ["curl", url(args)]
    return shlex.join(words)
