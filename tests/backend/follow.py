# SPDX-License-Identifier: Apache-2.0
"""transformers' DeepSeek-V3.2 made to read the tokens that an engine chose, after a check."""

import contextlib

import torch

# Rows whose scores are computed at once: 64 heads of 2600 tokens are 170 MB then.
BLOCK = 256


def to_fp8_and_back(x, least):
    """e4m3 with one power-of-two scale for each row of the last dimension."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=least)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class Follow:
    """In place of `DeepseekV32Indexer.forward`: the tokens that the engine chose, after a check.

    transformers leaves the fp8 rounding of queries and keys out; it is done here. A last bit of
    fp32 moves a few of them to the next code, so tokens whose scores all but tie change places, and
    then everything after them is another text. So transformers goes on with the engine's choice,
    and `gaps` says how far that is from its own: for every row the best score that was left out
    less the worst that was chosen, in standard deviations of the row's scores. Up to 0 they choose
    the same.

    choices: [layers, tokens - 1, index_topk] of one request, -1 is no token (see choices.py). The
    last token was not fed back to the engine; its output is not looked at.
    """

    def __init__(self, choices):
        self.choices, self.gaps = choices, []

    def forward(self, indexer, hidden_states, q_resid, position_embeddings, *_, **__):
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

        rope = indexer.qk_rope_head_dim
        q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
        rotated = apply_rotary_pos_emb(
            q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2
        )
        q = to_fp8_and_back(torch.cat([rotated[0], q[..., rope:]], -1)[0], 1e-10)
        k = to_fp8_and_back(torch.cat([rotated[1], k[..., rope:]], -1)[0, :, 0], 1e-4)
        weights = indexer.weights_proj(hidden_states)[0]

        chosen = self.choices[indexer.layer_idx].to(q.device, torch.int64)
        assert len(chosen) == len(k) - 1, "choices of another request"
        for rows in torch.arange(len(chosen), device=q.device).split(BLOCK):
            scores = torch.einsum("shd,td->sht", q[rows], k).relu()
            scores = torch.einsum("sht,sh->st", scores, weights[rows])
            self.check(scores, chosen[rows], rows, indexer.index_topk)
        # What is left of a row names token 0 again: such a row has chosen all tokens.
        taken = torch.zeros(1, len(k), chosen.shape[1], dtype=torch.int32, device=q.device)
        taken[0, :-1] = chosen.clamp(min=0)
        return taken

    def check(self, scores, chosen, positions, topk):
        """scores [rows, tokens] of the tokens at `positions` [rows], which chose `chosen`."""
        T = scores.shape[1]
        taken = torch.zeros(len(scores), T + 1, dtype=torch.bool, device=scores.device)
        taken = taken.scatter_(1, chosen.where(chosen >= 0, T), True)[:, :T]
        seen = torch.arange(T, device=scores.device) <= positions[:, None]
        assert not (taken & ~seen).any(), "tokens of the future were chosen"
        counts = (positions + 1).clamp(max=topk)
        assert (taken.sum(1) == counts).all(), "chosen twice, or not at all"
        assert ((chosen >= 0).sum(1) == counts).all(), "too many were chosen"
        best_left = scores.masked_fill(taken | ~seen, -torch.inf).amax(1)
        worst_taken = scores.masked_fill(~taken, torch.inf).amin(1)
        spread = torch.where(seen, scores, torch.nan)
        spread = (spread - spread.nanmean(1, keepdim=True)).square().nansum(1) / positions
        some_left = positions >= topk
        self.gaps += ((best_left - worst_taken) / spread.sqrt())[some_left].tolist()


@contextlib.contextmanager
def following(choices):
    """Inside, transformers reads `choices` for one request. Yields the Follow, for its gaps."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    own, follow = DeepseekV32Indexer.forward, Follow(choices)
    DeepseekV32Indexer.forward = lambda *args, **kwargs: follow.forward(*args, **kwargs)
    try:
        yield follow
    finally:
        DeepseekV32Indexer.forward = own
