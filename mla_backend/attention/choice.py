# SPDX-License-Identifier: Apache-2.0
"""The implementation of an engine's attention, or words for why there is none."""

from collections.abc import Callable
from typing import Any

import torch
from mla_kernels.dispatch import Choice

from mla_backend import envs
from mla_backend.attention import support
from mla_backend.refusals import RefusalError


def choose(kernels: Callable[..., Choice], device: torch.device, **arguments: Any) -> Choice:
    """What `kernels`, a `choose_*_impl` of mla_kernels, takes by MLA_BACKEND_IMPL.

    ValueError if what is asked for cannot run here, and on a GPU if nothing but torch can: that
    waits for the GPU in every step, so no CUDA graph could hold it.
    """
    asked = envs.get("MLA_BACKEND_IMPL")
    try:
        choice = kernels(asked, device, **arguments)
    except ValueError as error:
        if asked == "auto":  # then the variable is not what to change
            raise
        beside = _rescale_at_fault(kernels, asked, device, arguments)
        raise RefusalError(
            f"MLA_BACKEND_IMPL={asked}{beside}: {error}. Mend: unset MLA_BACKEND_IMPL"
            + (" or MLA_BACKEND_RESCALE" if beside else "")
        ) from None
    if asked == "auto" and device.type != "cpu" and choice.impl in support.SLOW_IMPLS:
        raise RefusalError(
            f"no kernel serves this model here ({choice.reason}). {support.ELSE}, or "
            "MLA_BACKEND_IMPL=torch, which is slow"
        )
    return choice


def _rescale_at_fault(
    kernels: Callable[..., Choice], asked: str, device: torch.device, arguments: dict[str, Any]
) -> str:
    """MLA_BACKEND_RESCALE, in words, if without it `asked` could run; else ""."""
    rescale = envs.get("MLA_BACKEND_RESCALE")
    if rescale in ("auto", "pow2"):
        return ""
    try:
        kernels(asked, device, **{**arguments, "rescale": "pow2"})
    except ValueError:
        return ""
    return f" with MLA_BACKEND_RESCALE={rescale}"
