# SPDX-License-Identifier: Apache-2.0
"""Environment variables of vLLM and Hugging Face that we set when the user has not."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from mla_backend.memory import available_bytes

GIB = 1024**3


def set_before_import(local: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """What must be in place before vLLM and transformers are imported.

    No usage statistics; no Hub look-ups where all that is named is on this machine; vLLM's log from
    WARNING up, so that our progress lines can be read; and what vLLM's own command sets: engines
    are no forks of this process, whose threads may hold locks, and so can be bound to memory nodes.
    """
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("DO_NOT_TRACK", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if local:
        environ.setdefault("HF_HUB_OFFLINE", "1")


def kv_cache_gib(available: int, weights: int, workers: int = 1) -> int:
    """GiB for the KV cache of each of a CPU server's workers, out of `available` bytes, for
    `weights` bytes of model in all of them.

    An eighth in all, because vLLM touches all of it at once and the rest of the machine is not
    ours; no more than half of what the weights and 2 GiB of working memory a worker leave; at least
    1 each.
    """
    left = (available - weights - 2 * GIB * workers) / 2
    return max(1, int(min(left, available / 8) / workers / GIB))


def check_cpu_kv_cache(environ: Mapping[str, str] = os.environ) -> None:
    """ValueError for a size of the user's that vLLM would refuse without its name, or take for no
    cache. vLLM reads it even beside --kv-cache-memory-bytes, which then counts no more."""
    given = environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if given and not (given.strip().isdecimal() and int(given)):
        raise ValueError(f"VLLM_CPU_KVCACHE_SPACE={given!r}: expected whole GiB, 1 or more")


def set_cpu_kv_cache(
    model: str,
    workers: int = 1,
    replicas: int = 1,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Size the KV cache of a CPU server's workers by the free memory (vLLM would take nearly all of
    it). workers: of each replica, tensor times pipeline parallel; replicas: data parallel, here.
    """
    if environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return
    weights = sum(f.stat().st_size for f in Path(model).glob("*.safetensors"))
    every = max(1, workers * replicas)  # vLLM refuses 0 by its option's name
    gib = kv_cache_gib(available_bytes(), weights * replicas, every)
    environ["VLLM_CPU_KVCACHE_SPACE"] = str(gib)


def set_no_compile(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep the engine's processes from torch.compile, which vLLM uses even in eager mode."""
    environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def debugging() -> bool:
    """Whether the user asked vLLM for its debug log: then failures come with their traceback."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG"
