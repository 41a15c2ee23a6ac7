# SPDX-License-Identifier: Apache-2.0
"""Environment variables of vLLM and Hugging Face that we set when the user has not."""

import os
from collections.abc import MutableMapping
from pathlib import Path

import psutil

GIB = 1024**3


def set_before_import(model: str | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """What must be in place before vLLM and transformers are imported.

    No usage statistics; no Hub look-ups for a model that is on this machine (None: the demo
    model); vLLM's log from WARNING up, so that our progress lines can be read.
    """
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("DO_NOT_TRACK", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if model is None or Path(model).is_dir():
        environ.setdefault("HF_HUB_OFFLINE", "1")


def kv_cache_gib(available: int, weights: int) -> int:
    """GiB for the KV cache of a CPU server out of `available` bytes, for `weights` bytes of model.

    An eighth, because vLLM touches all of it at once and the rest of the machine is not ours; no
    more than half of what the weights and 2 GiB of working memory leave; at least 1.
    """
    left = (available - weights - 2 * GIB) / 2
    return max(1, int(min(left, available / 8) / GIB))


def set_cpu_kv_cache(model: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Size the KV cache of a CPU server by the free memory (vLLM would take nearly all of it)."""
    if environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return
    weights = sum(f.stat().st_size for f in Path(model).glob("*.safetensors"))
    gib = kv_cache_gib(psutil.virtual_memory().available, weights)
    environ["VLLM_CPU_KVCACHE_SPACE"] = str(gib)


def set_no_compile(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep the engine's processes from torch.compile, which vLLM uses even in eager mode."""
    environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def debugging() -> bool:
    """Whether the user asked vLLM for its debug log: then failures come with their traceback."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG"
