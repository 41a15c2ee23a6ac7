# SPDX-License-Identifier: Apache-2.0
"""Entry points that vLLM calls. Import-light: both run very early, in every process, repeatedly."""

import logging
from typing import Any

from mla_backend import compat, envs
from mla_backend.refusals import RefusalError, note_failed_starts

GENERAL_PLUGIN = "mla_backend"
PLATFORM_PLUGIN = "mla_backend_cpu"
OWN_NAME = "MLA_BACKEND"

BACKEND_CLASS = "mla_backend.attention.backend.MlaBackend"
SPARSE_BACKEND_CLASS = "mla_backend.attention.sparse.backend.SparseMlaBackend"
REFUSAL_CLASS = "mla_backend.unsupported_vllm.MlaBackend"
CPU_PLATFORM_CLASS = "mla_backend.platform.MlaCpuPlatform"
CPU_PREFILL_CLASS = "mla_backend.attention.prefill_placeholder.CpuPrefillPlaceholder"
WORKER_EXTENSION_CLASS = "mla_backend.worker.WorkerExtension"

_VLLM_CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"

# A child of vLLM's logger, so that its handlers and level apply.
logger = logging.getLogger("vllm.mla_backend")


def register() -> None:
    """`vllm.general_plugins`: make the backend selectable. Selects nothing; safe to call again.

    With a vLLM outside the supported range an error is logged and selecting CUSTOM fails with
    the same message; everything else of that vLLM works as if this plugin were not there.
    """
    note_failed_starts()
    status = compat.vllm_version_status()
    if not status.supported:
        logger.error("%s. The backend is not available.", status.message)
        try:
            compat.register_attention_backend(REFUSAL_CLASS, OWN_NAME)
        except Exception:  # its registry is elsewhere, or none: vLLM would not start for any model
            logger.debug("CUSTOM cannot be made to refuse", exc_info=True)
        return
    names = compat.register_attention_backend(BACKEND_CLASS, OWN_NAME)
    for problem in envs.problems():  # our server refuses them; nothing would ask for a wrong name
        logger.warning("%s (docs/environment.md lists the settings)", problem)
    compat.share_settings_with_ray()

    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        compat.select_class_by_layer(type(current_platform), sparse_class_path)
        compat.build_indexers_without_deepgemm(is_selected)
    else:
        compat.register_cpu_prefill_backend(CPU_PREFILL_CLASS)
        if type(current_platform).__module__ == CPU_PLATFORM_CLASS.rpartition(".")[0]:
            compat.wait_without_yielding()
    logger.debug("Registered %s as %s", BACKEND_CLASS, ", ".join(names))


def sparse_class_path(backend: Any, layer: Any, capability: Any) -> str | None:
    """For vLLM's AttentionSelectorConfig `layer`: the class that takes its sparse attention.

    None for a dense layer and for another backend than ours: vLLM's own selection stands.
    ValueError, with every reason, for a sparse layer that cannot be served.
    """
    if not (is_ours(backend) and layer.use_sparse):
        return None
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    reasons = SparseMlaBackend.validate_configuration(
        device_capability=capability, **layer._asdict()
    )
    if reasons:
        raise RefusalError(f"{backend.name} cannot serve this: {'; '.join(reasons)}")
    return SPARSE_BACKEND_CLASS


def cpu_platform() -> str | None:
    """`vllm.platform_plugins`: our CPU platform, only where vLLM would choose its own CPU one.

    Returns None on any accelerator, on a CPU platform that is not the plain one (Zen), and with
    MLA_BACKEND_CPU_PLATFORM=0.
    """
    try:
        if not envs.get("MLA_BACKEND_CPU_PLATFORM"):
            return None
    except ValueError:
        # vLLM would drop this and let its own attention answer; the platform refuses it instead.
        logger.debug("MLA_BACKEND_CPU_PLATFORM does not parse", exc_info=True)
    from vllm import platforms

    for name, detect in platforms.builtin_platform_plugins.items():
        if name == "cpu":
            continue
        try:
            if detect() is not None:
                return None
        except Exception:  # vLLM itself treats a detector that fails as "not this platform"
            logger.debug("Platform detector %s failed", name, exc_info=True)
    if platforms.builtin_platform_plugins["cpu"]() != _VLLM_CPU_PLATFORM:
        return None
    return CPU_PLATFORM_CLASS


def is_selected(vllm_config: Any) -> bool:
    """Whether a vLLM configuration names this backend, for all layers or for some."""
    attention = getattr(vllm_config, "attention_config", None)  # versions below the range have none
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    named = (getattr(attention, "backend", None), *per_kind.values())
    return any(map(is_ours, named))


def is_ours(backend: Any) -> bool:
    """Whether a member of vLLM's AttentionBackendEnum (or None) stands for this plugin's class."""
    if backend is None:
        return False
    try:
        return backend.get_path() in (BACKEND_CLASS, REFUSAL_CLASS)
    except (AttributeError, ValueError):  # an enum of old; CUSTOM, registered by nobody
        return False
