# SPDX-License-Identifier: Apache-2.0
"""How vLLM comes to this backend's classes: by `--attention-backend`, and by layer."""

from collections.abc import Callable
from typing import Any


def register_attention_backend(class_path: str, own_name: str) -> list[str]:
    """Let `--attention-backend` find the class; returns the names that select it.

    CUSTOM works in every version; names of one's own exist where the enum can grow (0.32+). Ours is
    an alias: a member made at run time pickles by its value, which a spawned engine reads before
    it has loaded plugins.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, class_path)
    names = ["CUSTOM"]
    if hasattr(AttentionBackendEnum, "register"):
        AttentionBackendEnum._member_map_[own_name] = AttentionBackendEnum.CUSTOM
        names.append(own_name)
    return names


def select_class_by_layer(platform: Any, choose: Callable[[Any, Any, Any], str | None]) -> None:
    """Let `choose(backend, layer, capability)` name the class of a layer before vLLM does.

    One name of `--attention-backend` stands for one class in every version, so sparse layers of a
    backend that has a class for dense ones cannot be selected otherwise. On a CPU the platform
    class is ours and asks by itself.
    """
    stock = platform.get_attn_backend_cls.__func__
    if hasattr(stock, "by_layer"):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        capability = cls.get_device_capability()
        path = choose(selected_backend, attn_selector_config, capability)
        return path or stock(cls, selected_backend, attn_selector_config, *args, **kwargs)

    get_attn_backend_cls.by_layer = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
