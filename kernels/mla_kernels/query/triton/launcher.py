# SPDX-License-Identifier: Apache-2.0
"""Launching the join of query parts. Arguments are checked by `mla_kernels.query.api`."""

import torch
import triton

from mla_kernels.query.triton.kernel import join_query_kernel
from mla_kernels.triton_common.launch import launch

ROWS = 8
NUM_WARPS = 4


def widths(latent: int, rope: int) -> dict[str, int]:
    """The constexprs that follow from the two widths."""
    return {
        "LATENT": latent,
        "ROPE": rope,
        "LATENT_POW2": triton.next_power_of_2(latent),
        "ROPE_POW2": triton.next_power_of_2(rope),
        "ROWS": ROWS,
    }


def launch_join_query(latent: torch.Tensor, rope: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, H, R + P], contiguous, from latent [T, H, R] and rope [T, H, P]."""
    T, H, R = latent.shape
    if T == 0:
        return
    launch(
        join_query_kernel,
        (triton.cdiv(T * H, ROWS),),
        latent,
        rope,
        out,
        T * H,
        H,
        *latent.stride()[:2],
        *rope.stride()[:2],
        **widths(R, rope.shape[2]),
        num_warps=NUM_WARPS,
    )
