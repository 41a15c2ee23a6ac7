# SPDX-License-Identifier: Apache-2.0
"""What a fresh process sees: run as a script, prints one line of JSON. Imports nothing of ours.

vLLM's engine and workers are such processes. It stands alone so that it also runs where this
package cannot be imported, which is one of the faults that it is there to find.
"""

import importlib
import importlib.metadata
import json
from typing import Any

GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
# Distributions whose PyPI builds break imports beside a torch that they were not built for.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# What an engine and a server start with. vLLM's platform and plugins import far less: they load
# without transformers, openai or fastapi.
ENGINE_MODULES = ("vllm.engine.arg_utils", "vllm.v1.engine.async_llm")


def error_text(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def entry_points() -> list[dict[str, str]]:
    """Every vLLM plugin, with the reason why it does not load ("" if it does)."""
    found = []
    for group in GROUPS:
        for entry in importlib.metadata.entry_points(group=group):
            problem = ""
            try:
                entry.load()
            except Exception as error:
                problem = error_text(error)
            owner = entry.dist.name if entry.dist else ""
            found.append({"group": group, "name": entry.name, "dist": owner, "error": problem})
    return found


def import_errors() -> dict[str, str]:
    """For each installed companion of torch, why it cannot be imported ("" if it can)."""
    errors = {}
    for name in TORCH_COMPANIONS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            importlib.import_module(name)
            errors[name] = ""
        except Exception as error:
            errors[name] = error_text(error)
    return errors


def gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        capability = list(torch.cuda.get_device_capability(index))
        found.append({"name": name, "capability": capability, "free": free, "total": total})
    return found


def vllm_view() -> dict[str, str]:
    """The platform class that vLLM settles on, and the class behind its backend name CUSTOM."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    try:
        custom = AttentionBackendEnum.CUSTOM.get_path()
    except ValueError:  # nobody registered it
        custom = ""
    platform = type(current_platform)
    return {"platform": f"{platform.__module__}.{platform.__qualname__}", "custom": custom}


def engine_error() -> str:
    """Why vLLM's engine cannot be imported ("" if it can)."""
    for name in ENGINE_MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            return error_text(error)
    return ""


def main() -> None:
    seen: dict[str, Any] = {"errors": {}}
    for name, look in (
        ("entry_points", entry_points),
        ("import_errors", import_errors),
        ("gpus", gpus),
        ("vllm", vllm_view),
        ("engine_error", engine_error),
    ):
        try:
            seen[name] = look()
        except Exception as error:
            seen["errors"][name] = error_text(error)
    print("\n" + json.dumps(seen))


if __name__ == "__main__":
    main()
