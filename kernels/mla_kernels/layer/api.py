# SPDX-License-Identifier: Apache-2.0
"""The public function `mla_layer`."""

import torch

from mla_kernels import checks
from mla_kernels.decode.api import check_arguments, mla_decode
from mla_kernels.decode.plan.api import MlaDecodePlan
from mla_kernels.dispatch import triton_refusal
from mla_kernels.layer.buffers import MlaLayerBuffers
from mla_kernels.layer.torch_impl import rotate_and_append_torch
from mla_kernels.layer.weights import MlaLayerWeights
from mla_kernels.torch_modes import untraced


@torch.no_grad()
@untraced
def mla_layer(
    x: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    weights: MlaLayerWeights,
    table: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
    buffers: MlaLayerBuffers | None = None,
    plan: MlaDecodePlan | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """One decode step of a whole MLA layer, in absorbed form (DeepSeek-V2 paper, section 2.1).

    The paper's equations and no more. DeepSeek's checkpoints also have RMS norms of both latents
    (q_a_layernorm, kv_a_layernorm), YaRN's frequencies and its factor in the softmax scale, and
    rotate neighbouring elements, not halves: with their weights as they are results are wrong. The
    projections are torch's products: in fp32 they follow `torch.set_float32_matmul_precision`.

    x            [B, 1, dim], the hidden states of one new token a request
    kv_cache     [num_blocks, block_size, row] in any layout of layouts.py; the new rows are
                 appended in place. A contiguous cache [B, max_len, row] is
                 `cache.view(-1, block_size, row)` with the table `arange(...).view(B, -1)`.
    block_table  [B, max_blocks] int32
    seq_lens     [B] int32, the new token included: its position is seq_lens - 1. A request of
                 length 0 is padding: it writes no row and gives zeros.
    weights      `MlaLayerWeights.from_projections(...)`, in x's dtype
    table        `rope_table(config, positions)`, with a row for every position block_table can hold
    kv_scale     for a float8_e4m3fn cache
    buffers      `MlaLayerBuffers.allocate(...)`. With them and a plan the step allocates nothing of
                 its own and can be captured in a CUDA graph; the result is `buffers.out`.
    plan, impl   passed on to `mla_decode`

    Returns [B, 1, dim] in x's dtype. ValueError for shapes or dtypes that do not fit together.
    """
    checks.check_type("weights", weights, MlaLayerWeights)
    c = weights.config
    B = _check(x, weights, table)
    if buffers is None:
        buffers = MlaLayerBuffers.allocate(c, B, dtype=x.dtype, device=x.device)
    else:
        checks.check_type("buffers", buffers, MlaLayerBuffers)
        buffers.check_fits(c, x)
    _check_decode(buffers, kv_cache, block_table, seq_lens, weights, table, kv_scale, plan, impl)
    if B == 0 or block_table.shape[1] == 0:  # padding at most
        return buffers.out.zero_()
    rotate_and_append = rotate_and_append_torch
    if x.is_cuda and triton_refusal(x.device) is None:
        from mla_kernels.layer.triton.launcher import launch_rotate_and_append as rotate_and_append

    b = buffers
    torch.mm(x[:, 0], weights.down.t(), out=b.down)
    torch.mm(b.down[:, : c.q_lora_rank], weights.q_up.t(), out=b.q_up.flatten(1))
    absorbed = b.q[:, 0, :, : c.kv_lora_rank].transpose(0, 1)
    torch.bmm(b.q_up[..., : c.nope_dim].transpose(0, 1), weights.k_up, out=absorbed)
    rotate_and_append(c, b, kv_cache, block_table, seq_lens, table, kv_scale=kv_scale)
    mla_decode(
        b.q,
        kv_cache,
        block_table,
        seq_lens,
        scale=c.scale,
        kv_lora_rank=c.kv_lora_rank,
        kv_scale=kv_scale,
        impl=impl,
        plan=plan,
        out=b.latent,
        lse=b.lse,
    )
    torch.bmm(b.latent[:, 0].transpose(0, 1), weights.v_up, out=b.v.transpose(0, 1))
    torch.mm(b.v.flatten(1), weights.out.t(), out=b.out[:, 0])
    return b.out


def _check(x: torch.Tensor, weights: MlaLayerWeights, table: torch.Tensor) -> int:
    """What `mla_decode` does not see; the number of requests."""
    c = weights.config
    checks.check_shape("x", x, ("B", 1, c.dim))
    checks.check_dtype("x", x, (weights.out.dtype,))
    checks.check_shape("table", table, ("positions", c.rope_dim))
    checks.check_dtype("table", table, (torch.float32,))
    checks.check_contiguous("rope table", table)
    for name, tensor in (("weights", weights.out), ("table", table)):
        checks.check_device(name, tensor, x.device)
    return x.shape[0]


def _check_decode(
    buffers: MlaLayerBuffers,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    weights: MlaLayerWeights,
    table: torch.Tensor,
    kv_scale: float | torch.Tensor | None,
    plan: MlaDecodePlan | None,
    impl: str,
) -> None:
    """What `mla_decode` will check, but before the cache is written."""
    c = weights.config
    check_arguments(
        buffers.q, kv_cache, block_table, seq_lens, c.scale, c.kv_lora_rank, kv_scale, None, "pow2",
        impl, plan, buffers.latent, buffers.lse, False,
    )  # fmt: skip
    checks.check_distinct("kv_cache", kv_cache)
    capacity = block_table.shape[1] * kv_cache.shape[1]
    if table.shape[0] < capacity:
        raise ValueError(
            f"Expected a rope table of at least {capacity} positions, the capacity of "
            f"block_table, got {table.shape[0]}"
        )
    if buffers.q.device.type == "cpu":  # where it costs no wait
        checks.check_contents(block_table, seq_lens, *kv_cache.shape[:2])
