# SPDX-License-Identifier: Apache-2.0
"""The public functions `indexer_scores` and `indexer_topk`."""

import functools

import torch

from mla_kernels import checks
from mla_kernels.dispatch import Choice, choose_impl
from mla_kernels.indexer.cache import check_indexer_cache
from mla_kernels.indexer.reference import indexer_scores_reference
from mla_kernels.indexer.rows import check_rows, indexer_lengths
from mla_kernels.indexer.torch_impl import indexer_scores_torch
from mla_kernels.indexer.values import write_values
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.topk.api import MAX_K
from mla_kernels.topk.reference import exact_topk_reference
from mla_kernels.topk.torch_impl import exact_topk_torch
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import Recordings, kind
from mla_kernels.versions import no_triton

AVAILABLE = ("hopper", "triton", "torch", "reference")
MAX_HEADS = 64
HEAD_DIM = 128

_RECORDINGS = Recordings(512)


@untraced
def indexer_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    clean: bool = True,
    fp8_products: bool = False,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Lightning Indexer scores (DeepSeek-V3.2 report, equation 1) over a paged cache of keys.

        score[t, s] = scale[s] * sum over heads h of weights[t, h] * relu(q[t, h] . k[s])

    q            [T, H, 128] bf16 or float8_e4m3fn, H up to 64
    k_cache      [num_blocks, 64, 132] uint8 (`IndexerLayout`: e4m3 codes, then fp32 scales) or
                 [num_blocks, 64, 128] bf16 (no scale)
    weights      [T, H] fp32; the caller folds in the scale of an fp8 q and any softmax scale
    block_table  [B, max_blocks] int32
    seq_lens     [B] int32, the new tokens included
    positions    [T] int32: row t sees the keys 0..positions[t] of its request; default: the rows of
                 a request are its last tokens
    request_ids  [T] int32, the request of each row, -1 = padding row; needs positions or lengths.
                 Default: T / B rows a request, in order
    lengths      [T] int32 from `indexer_lengths`, instead of positions: computed once a step; 0 for
                 padding rows, of whose results nothing is promised otherwise
    clean        False: entries from the end of a row's last page on are left as they are, for a
                 caller that passes `lengths` on to `exact_topk`
    fp8_products True: multiply the e4m3 codes of q and keys themselves, on Hopper's tensor cores,
                 which add them with some 14 bits: scores within 2e-4 of the exact ones (relative
                 Frobenius error), 1.4 to 1.7 times as fast where many rows share the keys.
                 Default: exact products, added in fp32
    deterministic
                 the bits of a row's scores do not depend on the other rows of the call, which then
                 do not share keys in the portable kernel, nor a product in torch
    out          [T, 64 * max_blocks] fp32 to write into

    Returns [T, 64 * max_blocks] fp32 (the sums too), -inf where row t does not see key s. A NaN in
    q, weights or a visible key makes its scores NaN. ValueError for arguments that do not fit.
    """
    _check(q, k_cache, weights, block_table, seq_lens, positions, request_ids, lengths)
    T, width = q.shape[0], block_table.shape[1] * BLOCK_SIZE
    checks.check_flags(clean=clean, fp8_products=fp8_products, deterministic=deterministic)
    fp8_products, deterministic = bool(fp8_products), bool(deterministic)
    if out is not None:
        checks.check_output("out", out, (T, width), torch.float32, q.device)
    choice = _choose("indexer_scores", impl, q, k_cache, fp8_products)
    if lengths is None:
        lengths = _lengths(choice.impl, seq_lens, T, positions, request_ids)
    args = (q, k_cache, weights, block_table, lengths)
    if choice.impl in ("hopper", "triton"):
        from mla_kernels.indexer.triton.row_launchers import launch_fill_tail

        scores = q.new_empty((T, width), dtype=torch.float32) if out is None else out
        if choice.impl == "hopper":
            from mla_kernels.indexer.hopper.launcher import launch_hopper_scores

            launch_hopper_scores(*args, scores, request_ids=request_ids, fp8_products=fp8_products)
        else:
            from mla_kernels.indexer.triton.launcher import launch_scores, tiles_of_call

            how = {"ragged": request_ids is not None, "deterministic": deterministic}
            tiles = tiles_of_call(q, k_cache, block_table.shape[0], **how)
            launch_scores(*args, scores, tiles=tiles, request_ids=request_ids)
        if clean:
            launch_fill_tail(scores, lengths)
        return scores
    if choice.impl == "reference":
        found = indexer_scores_reference(*args, request_ids=request_ids)
    else:
        found = indexer_scores_torch(*args, request_ids=request_ids, deterministic=deterministic)
    scores = q.new_full((T, width), float("-inf"), dtype=torch.float32) if out is None else out
    scores[:, : found.shape[1]] = found
    scores[:, found.shape[1] :] = float("-inf")
    return scores


@untraced
def indexer_topk(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k: int,
    *,
    positions: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    fp8_products: bool = False,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """The k keys with the largest indexer scores of each row, as `exact_topk(indexer_scores(...))`
    returns them, bit for bit.

    One workspace, and no -inf written past the rows.

    k          1..2048
    out        [T, k] int32 to write into
    values     [T, k] fp32 to write the scores of the chosen keys into, bit for bit those of
               `indexer_scores`, -inf where there is none: what the choices from several caches
               are merged by
    workspace  [bytes] uint8 from `indexer_topk_workspace`; allocated if None. More rows than it
               holds are taken in turns. Not for two calls that may run at once: see `exact_topk`
    The other arguments are those of `indexer_scores`.

    Returns [T, k] int32: ascending token positions within the row's request, then -1.
    """
    given = q, k_cache, weights, block_table, positions, request_ids, lengths, values, workspace
    modes = kind(k), kind(fp8_products), kind(deterministic), impl
    key = *map(kind, given), kind(seq_lens), kind(out), *modes
    replay = _RECORDINGS.find(key)
    if replay is not None:
        out = _chosen(q, k) if out is None else out
        replay(_operands(given, seq_lens, out))
        return out
    checks.check_range("k", k, 1, MAX_K)
    k = int(k)  # NumPy's integers are none to what follows
    checks.check_flags(fp8_products=fp8_products, deterministic=deterministic)
    fp8_products, deterministic = bool(fp8_products), bool(deterministic)
    _check(q, k_cache, weights, block_table, seq_lens, positions, request_ids, lengths)
    T = q.shape[0]
    if out is not None:
        checks.check_output("out", out, (T, k), torch.int32, q.device)
    if values is not None:
        checks.check_output("values", values, (T, k), torch.float32, q.device)
    if workspace is not None:
        checks.check_workspace(workspace, q.device)
    choice = _choose("indexer_topk", impl, q, k_cache, fp8_products)
    if choice.impl in ("hopper", "triton"):
        out = _chosen(q, k) if out is None else out
        launch = functools.partial(
            _topk_by_kernels, choice.impl, *given, seq_lens, out, fp8_products, deterministic
        )
        _RECORDINGS.record(key, _operands(given, seq_lens, out), launch)
        return out
    if lengths is None:
        lengths = _lengths(choice.impl, seq_lens, T, positions, request_ids)
    args = (q, k_cache, weights, block_table, lengths)
    if choice.impl == "reference":
        scores = indexer_scores_reference(*args, request_ids=request_ids).float()
        chosen = exact_topk_reference(scores, k, lengths=lengths)
    else:
        scores = indexer_scores_torch(*args, request_ids=request_ids, deterministic=deterministic)
        chosen = exact_topk_torch(scores, k, lengths=lengths)
    if values is not None:
        write_values(scores, chosen, values)
    return chosen if out is None else out.copy_(chosen)


def _chosen(q: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty((q.shape[0], k), dtype=torch.int32, device=q.device)


def _operands(
    given: tuple[torch.Tensor | None, ...], seq_lens: torch.Tensor, out: torch.Tensor
) -> list[torch.Tensor]:
    """Every tensor that a launch may be given, or views of it. seq_lens, which may be the very
    tensor that the lengths are, only where these are not given."""
    lengths = given[6]
    return [x for x in (*given, seq_lens if lengths is None else None, out) if x is not None]


def _topk_by_kernels(
    impl: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor | None,
    request_ids: torch.Tensor | None,
    lengths: torch.Tensor | None,
    values: torch.Tensor | None,
    workspace: torch.Tensor | None,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    fp8_products: bool,
    deterministic: bool,
) -> None:
    """The launches of "hopper" or "triton" into `out` [T, k]."""
    from mla_kernels.indexer.fused import indexer_topk_fused

    if lengths is None:
        lengths = _lengths(impl, seq_lens, q.shape[0], positions, request_ids)
    indexer_topk_fused(
        q,
        k_cache,
        weights,
        block_table,
        lengths,
        out,
        request_ids=request_ids,
        values=values,
        workspace=workspace,
        hopper=impl == "hopper",
        fp8_products=fp8_products,
        deterministic=deterministic,
    )


def _choose(
    op: str, impl: str, q: torch.Tensor, k_cache: torch.Tensor, fp8_products: bool
) -> Choice:
    hopper_refusal = None
    if q.device.type == "cuda" and no_triton() is None:  # else that is what refuses it
        from mla_kernels.indexer.hopper.launcher import refusal

        hopper_refusal = refusal(q, k_cache)
    if fp8_products:
        if impl not in ("auto", "hopper"):
            raise ValueError(f"fp8_products=True needs impl='hopper' or 'auto', got impl={impl!r}")
        impl = "hopper"
    return choose_impl(op, impl, q.device, available=AVAILABLE, hopper_refusal=hopper_refusal)


def _lengths(
    impl: str,
    seq_lens: torch.Tensor,
    T: int,
    positions: torch.Tensor | None,
    request_ids: torch.Tensor | None,
) -> torch.Tensor:
    if impl not in ("hopper", "triton"):
        return indexer_lengths(seq_lens, T, positions=positions, request_ids=request_ids)
    if seq_lens.shape[0] == T and positions is None and request_ids is None:
        return seq_lens  # one row a request; the kernels take a negative length for 0
    from mla_kernels.indexer.triton.row_launchers import launch_lengths

    return launch_lengths(seq_lens, T, positions, request_ids)


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor | None,
    request_ids: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> None:
    checks.check_shape("q", q, ("T", "H", HEAD_DIM))
    checks.check_dtype("q", q, (torch.bfloat16, torch.float8_e4m3fn))
    T, H, D = q.shape
    checks.check_range("heads (q.shape[1])", H, 1, MAX_HEADS)
    check_indexer_cache(k_cache, D)
    checks.check_shape("weights", weights, (T, H))
    checks.check_dtype("weights", weights, (torch.float32,))
    for name, x in (("q", q), ("weights", weights)):
        checks.check_last_contiguous(name, x)
    for name, x in (("k_cache", k_cache), ("weights", weights)):
        checks.check_device(name, x, q.device)
    check_rows(T, block_table, seq_lens, positions, request_ids, lengths, q.device)
    room = block_table.shape[1] * BLOCK_SIZE
    checks.check_range("width of scores (64 * block_table.shape[1])", room, 0, checks.MAX_TOKENS)
