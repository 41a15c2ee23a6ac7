# SPDX-License-Identifier: Apache-2.0
"""Which keys each row (query token) sees: the mapping that all indexer functions share.

Without `request_ids` the T rows are B requests of T / B rows each, in order, and they are the last
tokens of their requests (decode, MTP). With `request_ids` [T] a row names its request, -1 for a
padding row, and `positions` [T] says where it stands (chunked prefill, mixed batches).
"""

import torch

from mla_kernels import checks
from mla_kernels.dispatch import triton_refusal
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.torch_modes import untraced


def check_rows(
    T: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor | None,
    request_ids: torch.Tensor | None,
    lengths: torch.Tensor | None,
    device: torch.device,
) -> None:
    """ValueError unless the arguments describe T rows."""
    checks.check_shape("block_table", block_table, ("B", "max_blocks"))
    B = block_table.shape[0]
    checks.check_shape("seq_lens", seq_lens, (B,))
    per_row = {"positions": positions, "request_ids": request_ids, "lengths": lengths}
    for name, x in {"block_table": block_table, "seq_lens": seq_lens, **per_row}.items():
        if x is not None:
            if name in per_row:
                checks.check_shape(name, x, (T,))
            checks.check_dtype(name, x, (torch.int32,))
            checks.check_device(name, x, device)
            checks.check_last_contiguous(name, x)
    if positions is not None and lengths is not None:
        raise ValueError("Expected positions or lengths, got both")
    if request_ids is not None and positions is None and lengths is None:
        raise ValueError("Expected positions (or lengths) together with request_ids, got neither")
    if request_ids is None and (T % B if B else T):
        raise ValueError(
            f"Expected a multiple of {B} rows (the requests of block_table) without request_ids, "
            f"got {T}"
        )
    if device.type == "cpu":  # where it costs no wait
        check_request_ids(request_ids, B)
        if request_ids is not None and lengths is not None:
            row = torch.where(request_ids < 0, lengths, 0).amax() if T else 0
            if row > 0:
                raise ValueError(
                    f"Expected lengths of 0 for padding rows (request_ids of -1), got {int(row)}"
                )
        capacity = block_table.shape[1] * BLOCK_SIZE
        if B and int(seq_lens.max()) > capacity:
            raise ValueError(
                f"Expected seq_lens up to {capacity}, the tokens of a row of block_table, got "
                f"{int(seq_lens.max())}"
            )


def check_request_ids(request_ids: torch.Tensor | None, B: int) -> None:
    """ValueError for a request that there is not. Reads the device."""
    if request_ids is not None and len(request_ids) and int(request_ids.max()) >= B:
        raise ValueError(f"Expected request_ids below {B}, got {int(request_ids.max())}")


@untraced
def indexer_lengths(
    seq_lens: torch.Tensor,
    T: int,
    *,
    positions: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Number of keys that each of T rows sees: the first keys of its request, causal.

    seq_lens     [B] int32, the new tokens included
    positions    [T] int32: row t sees the keys at positions 0..positions[t]; default: the rows of a
                 request are its last tokens
    request_ids  [T] int32, -1 = padding row (sees nothing); default: T / B rows a request, in order

    Returns [T] int32. Compute it once a step and pass it to every layer as `lengths`. ValueError
    for arguments that do not fit.
    """
    checks.check_shape("seq_lens", seq_lens, ("B",))
    checks.check_dtype("seq_lens", seq_lens, (torch.int32,))
    checks.check_range("T", T, 0, 2**31 - 1)
    B = seq_lens.shape[0]
    for name, x in (("positions", positions), ("request_ids", request_ids)):
        if x is not None:
            checks.check_shape(name, x, (T,))
            checks.check_dtype(name, x, (torch.int32,))
            checks.check_device(name, x, seq_lens.device)
    if request_ids is not None and positions is None:
        raise ValueError("Expected positions together with request_ids, got None")
    if request_ids is None and (T % B if B else T):
        raise ValueError(f"Expected T to be a multiple of {B} requests, got {T}")
    if request_ids is None:
        rows = T // B if B else 0
        lengths = seq_lens[:, None].expand(B, rows)
        if positions is None:
            ahead = torch.arange(1 - rows, 1, dtype=torch.int32, device=seq_lens.device)
            return (lengths + ahead).clamp_(min=0).reshape(T)
        lengths = lengths.reshape(T)
    else:
        if seq_lens.device.type == "cpu":
            check_request_ids(request_ids, B)
        if B == 0:  # padding rows only
            return torch.zeros_like(request_ids)
        lengths = seq_lens[request_ids.clamp(min=0)]
        lengths = torch.where(request_ids >= 0, lengths, 0)
    assert positions is not None
    # The last int32 is a position too: its successor is none.
    return torch.minimum(lengths, positions.clamp(max=2**31 - 2) + 1).clamp_(min=0)


@untraced
def token_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    request_ids: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Which request each of a step's T tokens belongs to and how many keys it sees, in one launch.

    query_start_loc  [B + 1] int32: tokens query_start_loc[b] to query_start_loc[b + 1] - 1 are the
                     last ones of request b
    seq_lens         [B] int32, the new tokens included
    request_ids      [T] int32, written; -1 for a token past those of the last request
    lengths          [T] int32, written; 0 for such a token

    ValueError for arguments that do not fit. Reads nothing back.
    """
    checks.check_shape("seq_lens", seq_lens, ("B",))
    checks.check_shape("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,))
    checks.check_shape("request_ids", request_ids, ("T",))
    checks.check_shape("lengths", lengths, tuple(request_ids.shape))
    tensors = {"query_start_loc": query_start_loc, "seq_lens": seq_lens}
    for name, x in (tensors | {"request_ids": request_ids, "lengths": lengths}).items():
        checks.check_dtype(name, x, (torch.int32,))
        checks.check_device(name, x, seq_lens.device)
        checks.check_last_contiguous(name, x)
    if triton_refusal(seq_lens.device) is None:
        from mla_kernels.indexer.triton.row_launchers import launch_token_rows

        launch_token_rows(query_start_loc, seq_lens, request_ids, lengths)
        return
    B, ends = seq_lens.shape[0], query_start_loc[1:]
    if B == 0:  # padding only
        request_ids.fill_(-1)
        lengths.zero_()
        return
    tokens = torch.arange(request_ids.shape[0], dtype=torch.int32, device=ends.device)
    torch.searchsorted(ends, tokens, right=True, out_int32=True, out=request_ids)
    padding = request_ids >= B
    request = request_ids.clamp(max=B - 1)
    # The last new token of a request sees all of it, the one before it one token less.
    torch.sub(seq_lens[request] + tokens + 1, ends[request], out=lengths)
    lengths.masked_fill_(padding, 0).clamp_(min=0)
    request_ids.masked_fill_(padding, -1)
