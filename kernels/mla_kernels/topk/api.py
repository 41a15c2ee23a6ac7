# SPDX-License-Identifier: Apache-2.0
"""The public function `exact_topk`."""

import torch

from mla_kernels import checks
from mla_kernels.dispatch import choose_impl
from mla_kernels.topk.plan import MAX_WIDTH
from mla_kernels.topk.reference import exact_topk_reference
from mla_kernels.topk.torch_impl import exact_topk_torch
from mla_kernels.torch_modes import untraced

AVAILABLE = ("triton", "torch", "reference")
MAX_K = 2048


@untraced
def exact_topk(
    scores: torch.Tensor,
    k: int,
    *,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Indices of the k largest scores of each row: exact, and the same on every run.

    scores     [T, n] fp32, n up to 2^20, rows contiguous
    k          1..2048
    lengths    [T] int32: only the first lengths[t] scores of row t take part, the others are not
               read; default n
    out        [T, k] int32 to write into
    workspace  `exact_topk_workspace(T, n, device)`, for the Triton kernels; allocated if None.
               Calls that may run at once (on two streams) need one each, and lengths may not
               change under a call: programs that share a long row might wait for each other for
               ever

    Returns [T, k] int32. The chosen set is that of a stable descending sort: of equal scores the
    lowest indices; -0 equals 0; inf is an ordinary largest score. -inf (masked) and NaN are never
    chosen. **The indices of a row ascend**, and -1 fills it up where fewer than k can be chosen.
    ValueError for arguments that do not fit.
    """
    checks.check_shape("scores", scores, ("T", "n"))
    checks.check_dtype("scores", scores, (torch.float32,))
    checks.check_last_contiguous("scores", scores)
    T, n = scores.shape
    checks.check_range("n (scores.shape[1])", n, 0, MAX_WIDTH)
    checks.check_range("k", k, 1, MAX_K)
    k = int(k)  # NumPy's integers are none to what follows
    if lengths is not None:
        checks.check_shape("lengths", lengths, (T,))
        checks.check_dtype("lengths", lengths, (torch.int32,))
        checks.check_device("lengths", lengths, scores.device)
        checks.check_last_contiguous("lengths", lengths)
    if out is not None:
        checks.check_output("out", out, (T, k), torch.int32, scores.device)
    if workspace is not None:
        checks.check_dtype("workspace", workspace, (torch.int32,))
        checks.check_device("workspace", workspace, scores.device)
        checks.check_contiguous("workspace", workspace)
    choice = choose_impl("exact_topk", impl, scores.device, available=AVAILABLE)
    if choice.impl == "triton":
        from mla_kernels.topk.triton.launcher import exact_topk_triton

        return exact_topk_triton(scores, k, lengths=lengths, out=out, workspace=workspace)
    topk = exact_topk_reference if choice.impl == "reference" else exact_topk_torch
    chosen = topk(scores, k, lengths=lengths)
    return chosen if out is None else out.copy_(chosen)
