# SPDX-License-Identifier: Apache-2.0
"""One online-softmax step in its three forms, in torch.

A state holds per row the accumulator O and the sum l, both relative to 2^k. A step takes the raw
products q . k of a block of tokens and their values. The forms differ in how k follows the row
maximum and how O follows k:

    pow2   k is an integer, moved only when the maximum is more than 2^tau above it; O and l are
           multiplied by an exact power of two (AMLA section 3 with a lazy threshold, numerics.py)
    amla   k is the maximum; P carries a bf16 factor S16 in [2^-.5, 2^.5], so that O follows by an
           integer added to its bits (AMLA Algorithm 2, corrected as in its Appendix A, guarded)
    flash  k is the maximum; O is multiplied by exp2(k - k') (FlashAttention, the paper's Base)
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch

from mla_kernels.numerics import EXPONENT_FLOOR, GRID_OFFSET, LN2, LOG2E, TAU

# Tokens added to O at a time. Fixed, so that the result does not depend on the size of a block.
FOLD = 64


@dataclass(frozen=True)
class State:
    """acc [..., R, DV], l [..., R, 1], k [..., R, 1], all fp32; acc is relative to 2^k * s16.

    Steps change the tensors in place, so a state of views steps some of the requests.
    """

    acc: torch.Tensor
    l: torch.Tensor
    k: torch.Tensor

    def __getitem__(self, requests: slice) -> "State":
        return State(self.acc[requests], self.l[requests], self.k[requests])


def start(rows: torch.Size | tuple[int, ...], value_dim: int, device: torch.device) -> State:
    """The state before any token, for rows [..., R]; the first step writes acc."""
    acc = torch.empty(*rows, value_dim, dtype=torch.float32, device=device)
    l = torch.zeros(*rows, 1, dtype=torch.float32, device=device)
    return State(acc, l, torch.full_like(l, EXPONENT_FLOOR))


def scale_to_log2(scale: float) -> float:
    """scale * log2(e), rounded to fp32 as the kernels hold it."""
    # float: NumPy rounds a product to the precision of its own number, which may be an fp16.
    return ctypes.c_float(float(scale) * LOG2E).value


def grid_scores(qk: torch.Tensor, scale_log2: float) -> torch.Tensor:
    """fma(qk, scale_log2, GRID_OFFSET) in fp32: scores in log2 units, snapped to 2^-12."""
    return qk.double().mul_(scale_log2).add_(GRID_OFFSET).float()


def pow2_int(e: torch.Tensor) -> torch.Tensor:
    """2^e for integer-valued e <= 0, exactly; 0 for e < -126."""
    return ((e.clamp(min=-127).int() + 127) << 23).view(torch.float32)


def any_of(flags: torch.Tensor) -> bool:
    """Whether one is set. Only a CPU looks; elsewhere the host would wait, so there it is True."""
    return flags.device.type != "cpu" or bool(flags.any())


def scale_state(state: State, factor: torch.Tensor) -> None:
    state.acc.mul_(factor)
    state.l.mul_(factor)


def add_block(
    state: State, p: torch.Tensor, weights: torch.Tensor, v: torch.Tensor, first: bool
) -> None:
    """acc += p @ v and l += the row sums of `weights`, in place, FOLD tokens after another."""
    N = p.shape[-1]
    acc, p, v = (x if x.dim() == 3 else x.view(-1, *x.shape[-2:]) for x in (state.acc, p, v))
    products = zip(p.split(FOLD, -1), v.split(FOLD, 1), strict=True) if N > FOLD else ((p, v),)
    beta = 0 if first else 1  # 0: whatever acc holds is ignored
    for part, rows in products:
        acc.baddbmm_(part, rows, beta=beta)
        beta = 1
    if N % FOLD:  # a sum over fewer terms is added up in another order
        weights = torch.nn.functional.pad(weights, (0, -N % FOLD))
    if N <= FOLD:
        state.l.add_(weights.sum(-1, keepdim=True))
        return
    for sums in weights.unflatten(-1, (-1, FOLD)).sum(-1).split(1, -1):
        state.l.add_(sums)


def pow2_step(
    state: State,
    qk: torch.Tensor,
    v: torch.Tensor,
    scale_log2: float,
    p_dtype: torch.dtype,
    first: bool,
    tau: float = TAU,
) -> None:
    """qk [..., R, N] fp32 (-inf where masked), v [..., N, DV] fp32; P is rounded to p_dtype.

    first: the state has seen no block yet.

    With fp32 values P is not rounded and the scores stay off the grid, which would cost precision.
    """
    on_grid = p_dtype != torch.float32
    offset = GRID_OFFSET if on_grid else 0.0
    t = grid_scores(qk, scale_log2) if on_grid else qk * scale_log2
    base = t.amax(-1, keepdim=True).ceil_().clamp_(min=EXPONENT_FLOOR + offset)
    if first:
        state.k.copy_(base).sub_(offset)
    else:
        row_max = base - offset
        if any_of(moves := row_max > state.k + tau):
            k = torch.where(moves, row_max, state.k)
            scale_state(state, pow2_int(state.k - k))
            state.k.copy_(k)
        base = state.k + offset
    p = t.sub_(base).exp2_()
    if on_grid:
        p = p.to(p_dtype).float()
    # The sum of the ROUNDED P: numerator and denominator see the same weights.
    add_block(state, p, p, v, first)


def flash_step(
    state: State,
    qk: torch.Tensor,
    v: torch.Tensor,
    scale_log2: float,
    p_dtype: torch.dtype,
    first: bool,
) -> None:
    """The paper's Base (Algorithm 1); arguments as in `pow2_step`."""
    t = qk * scale_log2
    k = torch.maximum(t.amax(-1, keepdim=True), state.k)
    if not first and any_of(k > state.k):
        scale_state(state, torch.exp2(state.k - k))
    state.k.copy_(k)
    p = t.sub_(k).exp2_()
    add_block(state, p.to(p_dtype).float(), p, v, first)


def amla_factor(k: torch.Tensor, p_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(S16, n, c) of a reference k: 2^k = 2^-n S32, S16 = S32 rounded to p_dtype, c = S16 / S32."""
    n = torch.round(-k)
    s32 = torch.exp2(k + n)
    s16 = s32.to(p_dtype).float()
    return s16, n, s16 / s32


def amla_step(
    state: State,
    qk: torch.Tensor,
    v: torch.Tensor,
    scale_log2: float,
    p_dtype: torch.dtype,
    first: bool,
) -> None:
    """Algorithm 2 with Appendix A's c = S16 / S32; arguments as in `pow2_step`."""
    t = qk * scale_log2
    k = torch.maximum(t.amax(-1, keepdim=True), state.k)
    p = t.sub_(k).exp2_()
    s16, n, c = amla_factor(k, p_dtype)
    if not first:
        _s16, n_before, c_before = amla_factor(state.k, p_dtype)
        down = (n_before - n).clamp(max=30).int()
        mantissa = torch.round(1.5 * (c / c_before - 1.0) * 2**23).int()
        step = torch.where(k > state.k, mantissa - (down << 23), 0)
        state.acc.copy_(add_to_bits(state.acc, step, down))
        state.l.mul_(torch.exp2(state.k - k))
    state.k.copy_(k)
    add_block(state, (p * s16).to(p_dtype).float(), p, v, first)


def add_to_bits(x: torch.Tensor, step: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x with `step` added to its bits: about x * 2^-down. Numbers whose exponent does not survive
    `down` (zeros and subnormals too) become 0: the bare add would make huge ones of them."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    return torch.where(exponent >= down + 2, (bits + step).view(torch.float32), 0.0)


def finish(state: State, rescale: str, p_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [..., R, DV], lse [..., R]) fp32; rows that saw no token give zeros and -inf.

    `out` is the state's accumulator, divided in place.
    """
    weight = state.l * amla_factor(state.k, p_dtype)[0] if rescale == "amla" else state.l
    out = state.acc.div_(weight)
    if out.device.type != "cpu" or not state.l.all():  # as `any_of`
        out.masked_fill_(state.l == 0, 0.0)
    lse = state.l.log2().add_(state.k).mul_(LN2)  # log2(0) = -inf
    return out, lse.squeeze(-1)


class Step(Protocol):
    """The common signature of the three steps."""

    def __call__(
        self,
        state: State,
        qk: torch.Tensor,
        v: torch.Tensor,
        scale_log2: float,
        p_dtype: torch.dtype,
        first: bool,
    ) -> None: ...


STEPS: dict[str, Step] = {"pow2": pow2_step, "amla": amla_step, "flash": flash_step}
RESCALES = tuple(STEPS)
