# SPDX-License-Identifier: Apache-2.0
"""The public function `merge_topk`: the top-k of rows whose scores several ranks have."""

import torch

from mla_kernels import checks
from mla_kernels.dispatch import choose_impl
from mla_kernels.topk.api import MAX_K
from mla_kernels.topk.merge_torch import merge_topk_reference, merge_topk_torch
from mla_kernels.topk.plan import MAX_MERGED, next_power_of_2
from mla_kernels.torch_modes import untraced

AVAILABLE = ("triton", "torch", "reference")


@untraced
def merge_topk(
    candidates: torch.Tensor,
    rank: int,
    *,
    interleave: int = 1,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """One rank's share of the k best tokens of each row, which `ranks` ranks hold together.

    Token p lies on rank p // interleave % ranks (vLLM's decode context parallelism), which counts
    its own tokens from 0 in their order. A token of the k best of all is among the k best of its
    rank, so those are enough.

    candidates  [ranks, T, 2, k] int32: of each rank what `indexer_topk` chose among its own tokens,
                ascending, then -1, and the bits of their fp32 scores (`values`). k up to 2048, and
                up to 16384 for all ranks together, k rounded up to a power of two
    rank        0..ranks - 1
    interleave  tokens that a rank takes in turn
    out         [T, k] int32 to write into, rows any distance apart; not part of candidates

    Returns [T, k] int32: which of its own tokens this rank has among the k best, ascending, then
    -1. All ranks' shares together are what `exact_topk` chooses among the scores of all tokens: of
    equal scores the lowest positions, whichever rank has them; -0 equals 0. Nothing is read back.
    ValueError for arguments that do not fit.
    """
    checks.check_shape("candidates", candidates, ("ranks", "T", 2, "k"))
    checks.check_dtype("candidates", candidates, (torch.int32,))
    checks.check_contiguous("candidates", candidates)
    ranks, T, _, k = candidates.shape
    checks.check_range("k (candidates.shape[3])", k, 1, MAX_K)
    checks.check_range("ranks (candidates.shape[0])", ranks, 1, MAX_MERGED // next_power_of_2(k))
    checks.check_range("rank", rank, 0, ranks - 1)
    checks.check_range("interleave", interleave, 1, 2**20)
    if ranks * (2**20 + int(interleave)) > 2**31:
        raise ValueError(
            f"Expected tokens of all ranks below 2^31, got {ranks} ranks of up to 2^20 tokens and "
            f"interleave {interleave}"
        )
    rank, interleave = int(rank), int(interleave)  # NumPy's integers are none to Triton
    if out is None:
        out = torch.empty((T, k), dtype=torch.int32, device=candidates.device)
    else:
        checks.check_output("out", out, (T, k), torch.int32, candidates.device)
    choice = choose_impl("merge_topk", impl, candidates.device, available=AVAILABLE)
    if choice.impl == "triton":
        from mla_kernels.topk.triton.merge_launcher import launch_merge_topk

        launch_merge_topk(candidates, rank, interleave, out)
        return out
    merge = merge_topk_reference if choice.impl == "reference" else merge_topk_torch
    return out.copy_(merge(candidates, rank, interleave))
