# SPDX-License-Identifier: Apache-2.0
"""Whether the options of TLS go together: Python says so only when the model is loaded, and names
no file."""

from argparse import Namespace
from pathlib import Path

from uvicorn.config import SSL_PROTOCOL_VERSION, create_ssl_context

_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_OTHERS = ("ssl_ciphers", "ssl_cert_reqs", "enable_ssl_refresh")
_DEFAULT_CIPHERS = "TLSv1"  # as in uvicorn


def check(args: Namespace) -> None:
    """Raises ValueError for a file that is not there or none of TLS, and for what needs others."""
    for name in _FILES:
        path = getattr(args, name)
        try:
            missing = path and not Path(path).exists()
        except OSError as error:  # a folder that may not be searched
            raise ValueError(f"{_option(name)} {path}: {error.strerror}") from None
        if missing:
            raise ValueError(f"{_option(name)} {path}: no such file or directory")
    given = [name for name in (*_FILES, *_OTHERS) if getattr(args, name)]
    if not given:
        return
    if not args.ssl_certfile:
        raise ValueError(f"{_option(given[0])} needs --ssl-certfile; without one this is no HTTPS")
    try:
        if _may_be_read_twice(args):
            create_ssl_context(
                args.ssl_certfile,
                args.ssl_keyfile,
                None,
                SSL_PROTOCOL_VERSION,
                args.ssl_cert_reqs,
                args.ssl_ca_certs,
                args.ssl_ciphers or _DEFAULT_CIPHERS,
            )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        said = " ".join(f"{_option(name)} {getattr(args, name)}" for name in given)
        raise ValueError(f"{said}: {error}") from None


def _may_be_read_twice(args: Namespace) -> bool:
    """Not a pipe, nor a key whose passphrase a terminal is asked for."""
    paths = [Path(path) for name in _FILES if (path := getattr(args, name))]
    if not all(path.is_file() or path.is_dir() for path in paths):
        return False
    key = Path(args.ssl_keyfile or args.ssl_certfile)
    return key.is_dir() or b"ENCRYPTED" not in key.read_bytes()


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
