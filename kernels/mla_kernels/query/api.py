# SPDX-License-Identifier: Apache-2.0
"""The public function `join_query`."""

import torch

from mla_kernels import checks
from mla_kernels.dispatch import triton_refusal
from mla_kernels.torch_modes import untraced, without_modes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@untraced
def join_query(q_latent: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """Queries [T, H, R + P] of an absorbed MLA layer from their latent [T, H, R] and rope [T, H, P]
    parts, as `mla_decode` wants them: torch.cat for parts of any strides at the speed of a copy.

    The latent part comes out of a batched product over heads as a transposed view, which torch.cat
    copies element by element. H 1 and more, T * H up to 2^30, bf16, fp16 or fp32; the last
    dimension of both must be contiguous. ValueError for parts that do not fit each other.
    """
    checks.check_shape("q_latent", q_latent, ("T", "H", "R"))
    T, H, R = q_latent.shape
    checks.check_range("T * H", T * H, 0, 2**30)
    checks.check_shape("q_rope", q_rope, (T, H, "P"))
    checks.check_dtype("q_latent", q_latent, DTYPES)
    checks.check_dtype("q_rope", q_rope, (q_latent.dtype,))
    checks.check_device("q_rope", q_rope, q_latent.device)
    checks.check_last_contiguous("q_latent", q_latent)
    checks.check_last_contiguous("q_rope", q_rope)
    if triton_refusal(q_latent.device) is not None:
        return join_query_torch(q_latent, q_rope)
    from mla_kernels.query.triton.launcher import launch_join_query

    q = q_latent.new_empty(T, H, R + q_rope.shape[2])
    launch_join_query(q_latent, q_rope, q)
    return q


@without_modes
def join_query_torch(q_latent: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """[..., R + P] of parts that fit each other, on any device."""
    return torch.cat((q_latent, q_rope), dim=-1)
