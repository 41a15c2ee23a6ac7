# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: vLLM wraps the linear layers of a model and asks no attention backend."""

import functools
from collections.abc import Callable
from typing import Any


def check_adapters(check: Callable[[str, list[str], Any], None]) -> None:
    """Have `check(name, modules, model)` see every adapter that this process loads from now on: its
    name and the modules of the model that vLLM would change by it. What it raises is vLLM's answer.

    Safe to call again.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter
    if hasattr(load, "checked"):
        return

    @functools.wraps(load)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        adapter = load(self, lora_request)
        manager = self._adapter_manager
        # --lora-target-modules leaves others out.
        changed = [name for name in adapter.loras if name in manager.modules]
        check(lora_request.lora_name, changed, manager.model)
        return adapter

    _load_adapter.checked = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = _load_adapter
