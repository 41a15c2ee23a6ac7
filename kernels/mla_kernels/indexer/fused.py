# SPDX-License-Identifier: Apache-2.0
"""`indexer_topk` by kernels, Hopper's or portable ones: scores and top-k with one workspace, of as
many rows at a time as it holds."""

import functools

import torch

from mla_kernels.indexer.triton.launcher import launch_scores, tiles_of_call
from mla_kernels.indexer.triton.row_launchers import launch_chosen_values
from mla_kernels.indexer.workspace import indexer_topk_workspace, row_words
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.topk.triton.launcher import exact_topk_triton


def indexer_topk_fused(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    request_ids: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    hopper: bool = False,
    fp8_products: bool = False,
    deterministic: bool = False,
) -> None:
    """See `indexer_topk`; into `out` [T, k]. `hopper`: the scores by the Hopper kernel."""
    (T, k), max_blocks = out.shape, block_table.shape[1]
    width = max_blocks * BLOCK_SIZE
    if T == 0 or width == 0:
        if values is not None:
            values.fill_(float("-inf"))
        out.fill_(-1)
        return
    if workspace is None:
        workspace = indexer_topk_workspace(T, max_blocks, q.device)
    words = row_words(max_blocks)
    step = workspace.numel() // (4 * words)
    if step == 0:
        raise ValueError(
            f"Expected a workspace of at least {4 * words} bytes (one row), got {workspace.numel()}"
        )
    if 16 < step < T:  # later rows as aligned as the first: no other specialisation
        step -= step % 16
    rows_per_request = T // max(block_table.shape[0], 1)
    # All turns take the tile of the whole call: of the portable kernel, another adds the heads in
    # another order.
    requests, ragged = block_table.shape[0], request_ids is not None
    launch: functools.partial[None]
    if hopper:
        from mla_kernels.indexer.hopper.launcher import launch_hopper_scores, row_tile

        tile = row_tile(T, requests, ragged=ragged, fp8_products=fp8_products)
        launch = functools.partial(launch_hopper_scores, fp8_products=fp8_products, tile=tile)
    else:
        how = {"ragged": ragged, "deterministic": deterministic}
        tiles = tiles_of_call(q, k_cache, requests, **how)
        launch = functools.partial(launch_scores, tiles=tiles)
    tables_in_turns = hopper and request_ids is None and rows_per_request == 1
    if step < T and request_ids is None and not tables_in_turns:  # one may end within a request
        request_ids = torch.arange(T, dtype=torch.int32, device=q.device) // rows_per_request
    for a in range(0, T, step):
        b = min(a + step, T)
        words_used = workspace[: 4 * (b - a) * words].view(torch.int32)
        scores = words_used[: (b - a) * width].view(torch.float32).view(b - a, width)
        room = words_used[(b - a) * width :]
        launch(
            q[a:b],
            k_cache,
            weights[a:b],
            block_table[a:b] if tables_in_turns else block_table,
            lengths[a:b],
            scores,
            request_ids=None if request_ids is None else request_ids[a:b],
        )
        exact_topk_triton(scores, k, lengths=lengths[a:b], out=out[a:b], workspace=room)
        if values is not None:  # now: the next turn overwrites the scores
            launch_chosen_values(scores, out[a:b], values[a:b])
