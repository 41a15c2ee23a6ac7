# SPDX-License-Identifier: Apache-2.0
"""Whether the Hugging Face Hub can be reached: vLLM asks it again and again for minutes, and then
says that the model's name is wrong."""

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_ENDPOINT = "https://huggingface.co"
_PORTS = {"https": 443, "http": 80}
_SECONDS = 5.0  # for a connection
# Nobody is asked with one of these, and with the last someone else.
_OTHERS = ("TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE")


def unreachable(model: str | None, environ: Mapping[str, str]) -> str | None:
    """Why the Hub answers no connection; None if it does, or if it is not for us to tell: the user
    set HF_HUB_OFFLINE, there is a proxy, or the model is of another store (s3://...)."""
    if "HF_HUB_OFFLINE" in environ or any(map(environ.get, _OTHERS)) or "://" in (model or ""):
        return None
    endpoint = environ.get("HF_ENDPOINT") or _ENDPOINT
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname, url.port or _PORTS.get(url.scheme)
    except ValueError:  # huggingface_hub says what is wrong with it
        return None
    proxies = getproxies()
    proxied = {"all", url.scheme} & proxies.keys()
    if host is None or port is None or (proxied and not proxy_bypass(host)):
        return None
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except OSError as error:
        return f"{endpoint} cannot be reached ({error.strerror or error})"
    return None
