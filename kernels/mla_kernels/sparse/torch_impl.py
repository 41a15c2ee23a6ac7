# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention in torch: batched over tokens, their rows gathered by slot, tile by tile.

The softmax step is the dense one (decode/rescale.py). Nothing is read back from a GPU; on a CPU
trailing columns of `slots` that no token uses are left out, unless results must be deterministic:
then tokens are taken one by one, all columns of them.
"""

import torch

from mla_kernels.cache.rows import as_words, rows_as_float
from mla_kernels.decode.rescale import finish, pow2_step, scale_to_log2, start
from mla_kernels.sparse.slots import apply_sink, used_slots
from mla_kernels.torch_modes import without_modes

# Rows gathered at a time: a few MB of keys, which stay in a CPU's cache.
TILE_ROWS = 2048
TILE_ROWS_DEVICE = 2**16


@without_modes
def mla_sparse_attention_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    kv_scale: float | torch.Tensor | None,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    max_logits: torch.Tensor | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, kv_lora_rank] fp32, lse [T, H] fp32)."""
    T, H, Dk = q.shape
    block_size = kv_cache.shape[1]
    on_cpu = q.device.type == "cpu"
    used = used_slots(slots, kv_cache.shape[0] * block_size, lengths)
    slots = torch.where(used, slots, 0).long()
    if kv_cache.shape[0] == 0:  # there is no row 0 to stand in for none
        slots, used = slots[:, :0], used[:, :0]
    if on_cpu and not deterministic:
        columns = used.any(0).nonzero()
        width = int(columns.max()) + 1 if columns.numel() else 0
        slots, used = slots[:, :width], used[:, :width]
    words = as_words(kv_cache)
    state = start((T, H), kv_lora_rank, q.device)
    if slots.shape[1] == 0:
        state.acc.zero_()  # no step will write it
    scale_log2 = scale_to_log2(scale)
    queries = q.float()
    step = TILE_ROWS  # a multiple of rescale.FOLD: then tiles do not change the order of additions
    rows_at_once = TILE_ROWS if on_cpu else TILE_ROWS_DEVICE
    tokens = max(1, rows_at_once // max(1, min(step, slots.shape[1])))
    if deterministic:
        tokens = 1
    if max_logits is not None:
        max_logits.fill_(-torch.inf)
    for part in (slice(t, t + tokens) for t in range(0, T, tokens)):
        # A copy has an address of its own: products of fp32 depend on where q's rows start.
        some = queries[part].clone() if deterministic else queries[part]
        for first in range(0, slots.shape[1], step):
            tile = slots[part, first : first + step]
            hidden = ~used[part, first : first + step]
            rows = words[tile // block_size, tile % block_size].view(kv_cache.dtype)
            keys = rows_as_float(rows, q.dtype, kv_lora_rank, Dk, kv_scale).float()
            keys.masked_fill_(hidden[..., None], 0)  # 0 * NaN would reach the output
            qk = torch.bmm(some, keys.mT)
            qk.masked_fill_(hidden[:, None], -torch.inf)
            if max_logits is not None:
                top = max_logits[part]
                torch.maximum(top, qk.amax(-1) * scale, out=top)
            pow2_step(state[part], qk, keys[..., :kv_lora_rank], scale_log2, q.dtype, first == 0)
    out, lse = finish(state, "pow2", q.dtype)
    apply_sink(out, lse, sink, deterministic)
    return out, lse
