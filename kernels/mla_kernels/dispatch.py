# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs where: the choice behind impl="auto", with its reason."""

from dataclasses import dataclass

import torch

from mla_kernels import checks
from mla_kernels.arch import device_arch
from mla_kernels.versions import no_triton

IMPLS = ("auto", "hopper", "triton", "torch", "reference")


@dataclass(frozen=True)
class Choice:
    """An implementation and why it was chosen, in words for the doctor and /mla/info."""

    impl: str
    reason: str


def choose_impl(
    op: str,
    impl: str,
    device: torch.device,
    *,
    available: tuple[str, ...],
    hopper_refusal: str | None = None,
) -> Choice:
    """The implementation of `op` that runs on `device` when `impl` is asked for.

    available       implementations that the op has at all, "reference" and "torch" among them
    hopper_refusal  why the Hopper kernel cannot take these arguments (None: it can)

    ValueError if `impl` is unknown, or named and cannot run here: nothing else is used instead.
    """
    checks.check_choice("impl", impl, IMPLS)
    if impl != "auto":
        if impl not in available:
            raise ValueError(f"Expected impl of {op} in {['auto', *available]}, got {impl!r}")
        refusal = _refusal(impl, device, hopper_refusal)
        if refusal:
            raise ValueError(f"impl={impl!r} of {op} cannot run here: {refusal}")
        return Choice(impl, "asked for by name")
    passed_over: list[str] = []
    for candidate in ("hopper", "triton"):
        if candidate in available:
            refusal = _refusal(candidate, device, hopper_refusal)
            if refusal is None and device.type != "cpu":
                return Choice(candidate, "; ".join([_merit(candidate, device), *passed_over]))
            passed_over.append(f"{candidate}: {refusal or 'its interpreter is for tests'}")
    why = "batched torch" if device.type == "cpu" else "no kernel fits"
    return Choice("torch", "; ".join([f"{why} on {device.type}", *passed_over]))


def triton_refusal(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`; None if they can."""
    if refused := no_triton():
        return refused
    if device.type == "cpu":
        from mla_kernels.triton_common.runtime import INTERPRET

        return None if INTERPRET else "the tensors are on the CPU and TRITON_INTERPRET is not set"
    try:
        device_arch(device)
    except ValueError as error:
        return str(error)
    return None


def _refusal(impl: str, device: torch.device, hopper_refusal: str | None) -> str | None:
    if impl in ("torch", "reference"):
        return None
    if impl == "triton":
        return triton_refusal(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an sm_90 GPU, the tensors are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it needs an sm_90 GPU, {device} is sm_{capability[0]}{capability[1]}"
    return triton_refusal(device) or hopper_refusal


def _merit(impl: str, device: torch.device) -> str:
    if impl == "hopper":
        return "sm_90, and the arguments fit the Hopper kernel"
    return f"portable kernel on {device_arch(device).name}"
