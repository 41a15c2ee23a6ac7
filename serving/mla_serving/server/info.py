# SPDX-License-Identifier: Apache-2.0
"""What /mla/info says: which attention computes, on what cache, and how full it is."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims

import mla_backend
from mla_serving.server.admission import AnyGate

_WORKER_TIMEOUT_SECONDS = 2.0


class Info:
    """Collects the answer of /mla/info.

    Args:
        engine: vLLM's engine client.
        gate: the server's own count of requests.
        served: names under which the model is served.
        gauges: vLLM's gauges by name, one value per engine (`vllm_api.engine_gauges`).
        ask: asks every worker of every engine (`vllm_api.ask_workers`).
        vllm_version: of the running vLLM.
    """

    def __init__(
        self,
        engine: Any,
        gate: AnyGate,
        served: list[str],
        gauges: Callable[[], dict[str, list[float]]],
        ask: Callable[[str], Awaitable[list[dict[str, Any]]]],
        vllm_version: str,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._served = served
        self._gauges = gauges
        self._ask = ask
        self._vllm_version = vllm_version
        self._workers: list[dict[str, Any]] | None = None
        self._asking: asyncio.Task[None] | None = None

    async def read(self) -> dict[str, Any]:
        """The whole answer, ready for JSON. Numbers that vLLM does not keep are null."""
        config = self._engine.vllm_config
        gauges = self._gauges()
        model = config.model_config
        return {
            "version": mla_backend.__version__,
            "vllm": self._vllm_version,
            "model": {
                "served_names": self._served,
                "dtype": _name(model.dtype),
                "max_model_len": model.max_model_len,
            },
            "attention": {
                "backend": getattr(config.attention_config.backend, "name", None),
                "workers": await self._ask_workers(),
            },
            "cache": _cache(config, gauges),
            "requests": {
                "running": _total(gauges, "vllm:num_requests_running"),
                "waiting": _total(gauges, "vllm:num_requests_waiting"),
            },
            "server": {
                "draining": self._gate.draining,
                "http_requests": self._gate.running,
                "refused": self._gate.refused,
            },
        }

    async def _ask_workers(self) -> list[dict[str, Any]] | None:
        """Each worker's own account of what it computed with; the last one known when one is busy
        for long. None where another worker extension than ours is in use."""
        if self._engine.errored:
            return self._workers
        # One question is open at a time: a hung engine is not buried under those of a monitor.
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._read_workers())
        await asyncio.wait({self._asking}, timeout=_WORKER_TIMEOUT_SECONDS)
        return self._workers

    async def _read_workers(self) -> None:
        with contextlib.suppress(Exception):  # the rest of the answer is good without them
            self._workers = await self._ask("mla_backend_stats")


def _total(gauges: dict[str, list[float]], name: str) -> int | None:
    return int(sum(gauges[name])) if name in gauges else None


def _cache(config: Any, gauges: dict[str, list[float]]) -> dict[str, Any]:
    cache, model = config.cache_config, config.model_config
    blocks = cache.num_gpu_blocks
    usage = gauges.get("vllm:kv_cache_usage_perc")
    used = None
    if usage and blocks:
        # Each engine keeps one block aside as padding; its gauge is a share of the others.
        used = round(sum(share * (blocks // len(usage) - 1) for share in usage))
    dtype = _name(model.dtype) if cache.cache_dtype == "auto" else cache.cache_dtype
    return {
        "dtype": dtype,
        "layout": _layout(model.hf_text_config, cache.block_size, dtype),
        "block_size": cache.block_size,
        "blocks_total": blocks,
        "blocks_used": used,
    }


def _layout(model: Any, block_size: int, dtype: str) -> str | None:
    """One line on what a cache block of an MLA model holds; `mla_kernels.layouts` has the bytes."""
    latent = getattr(model, "kv_lora_rank", None)
    if latent is None:
        return None
    rope = model.qk_rope_head_dim
    if dtype == "fp8_ds_mla":
        row = Fp8DsMlaLayout(MlaDims(latent, rope)).row_bytes
        return f"[blocks, {block_size}, {row}] uint8: {latent} fp8, fp32 scales, {rope} bf16 rope"
    return f"[blocks, {block_size}, {latent + rope}] {dtype}: {latent} latent, {rope} rope"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
