# SPDX-License-Identifier: Apache-2.0
"""How far a result is from its reference, and how far it may be."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Error:
    """fro: relative Frobenius error of the whole; row: of the worst row; peak: largest absolute
    error over the largest absolute reference value."""

    fro: float
    row: float
    peak: float


def measure(out: torch.Tensor, reference: torch.Tensor) -> Error:
    """Errors of `out` against `reference` [..., D]; NaN anywhere in `out` gives infinities."""
    x, ref = out.double().flatten(0, -2), reference.double().flatten(0, -2)
    if not bool(torch.isfinite(x).all()):
        return Error(torch.inf, torch.inf, torch.inf)
    diff = x - ref
    norm = ref.norm(dim=-1)
    rows = diff.norm(dim=-1) / norm.clamp(min=1e-30)
    return Error(
        fro=float(diff.norm() / ref.norm().clamp(min=1e-30)),
        row=float(rows[norm > 0].max()) if bool((norm > 0).any()) else 0.0,
        peak=float(diff.abs().max() / ref.abs().max().clamp(min=1e-30)) if diff.numel() else 0.0,
    )


@dataclass(frozen=True)
class Bar:
    """Largest errors allowed, and the bar on the largest single element."""

    fro: float
    row: float
    peak: float = 7e-3

    def failures(self, error: Error) -> list[str]:
        pairs = (("fro", error.fro, self.fro), ("row", error.row, self.row))
        over = [f"{name} {have:.3e} > {bar:.3e}" for name, have, bar in pairs if not have <= bar]
        if not error.peak <= self.peak:
            over.append(f"peak {error.peak:.3e} > {self.peak:.3e}")
        return over


# bf16 output against an fp64 golden, q and k i.i.d. with the given distribution, 8K context:
# twelve distributions of the AMLA paper's Tables 3 and 4 (N4: normal of variance 4, U3: -3..3).
PAPER_BARS = {
    "N1": Bar(2.0e-3, 2.8e-3),
    "N4": Bar(2.2e-3, 5e-3),
    "N9": Bar(2.0e-3, 5e-3),
    "N16": Bar(1.8e-3, 5e-3),
    "N25": Bar(1.6e-3, 5e-3),
    "N100": Bar(1.05e-3, 5e-3),
    "U1": Bar(2.2e-3, 3e-3),
    "U3": Bar(2.3e-3, 5e-3),
    "U5": Bar(2.05e-3, 5e-3),
    "U10": Bar(1.6e-3, 5e-3),
    "U20": Bar(1.0e-3, 5e-3),
    "U60": Bar(0.45e-3, 4e-3),
}
SHORT_BAR = Bar(2.7e-3, 5e-3)  # 2..256 tokens, standard deviation up to 1
LONG_BAR = Bar(1.9e-3, 2.3e-3)  # 128K tokens, N1
# fp32 O / l against `mirror`, which rounds P as the kernels do: by standard deviation of q and k.
MIRROR_BAR = Bar(1e-4, 5e-4)
MIRROR_BAR_PEAKY = Bar(5e-4, 8e-3)
