# SPDX-License-Identifier: Apache-2.0
"""An MLA model: its shape, and how many weights each part of a layer has."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mla_kernels.layouts import MlaDims

from mla_serving.plan.quantization import Scheme

PLAIN_BYTES = 2  # of a weight that is not quantised: bf16 or fp16
FP32_BYTES = 4


@dataclass(frozen=True)
class MlaModel:
    """What of a config.json the plan needs. Widths and counts are elements, not bytes.

    Layers of LongCat-Flash are `twofold`: two attentions and two dense MLPs, beside the experts.
    Layers for multi-token prediction (MTP), which make drafts, have the numbers behind its own.
    """

    name: str
    model_type: str
    hidden: int
    layers: int
    mtp_layers: int
    twofold: bool
    heads: int
    q_lora_rank: int | None
    dims: MlaDims
    nope: int
    v: int
    vocab: int
    tied: bool
    max_context: int  # tokens of a request; 0: config.json does not say
    dense_width: int
    dense_layers: int
    moe_layer_freq: int
    experts: int
    expert_width: int
    shared_experts: int
    zero_experts: int  # those that pass a token on: the router has them, no weights do
    router_bias: bool
    index_heads: int
    index_dim: int
    index_topk: int
    index_shared: frozenset[int]  # layers that read what an earlier layer's indexer chose
    dtype: str
    scheme: Scheme | None  # of the linear layers; None: all in `dtype`
    plain_parts: tuple[str, ...]  # of a layer: those that `scheme` does not touch
    kv_cache_dtype: str  # what "auto" is by the checkpoint

    @property
    def sparse(self) -> bool:
        return self.index_topk > 0

    def quantised(self, layer: int, matrix: str) -> bool:
        if self.scheme is None or matrix.partition(".")[0] in self.plain_parts:
            return False
        return self.scheme.covers(f"model.layers.{layer}.{matrix}")

    def block(self, matrix: str, layers: Sequence[int]) -> int:
        """Of whole multiples of it are the slices of `matrix` that GPUs can hold, in elements.

        A matrix whose input is cut is cut between groups; of AWQ's and GPTQ's experts vLLM has
        kernels for smaller ones, of 32.
        """
        if self.scheme is None or not any(self.quantised(layer, matrix) for layer in layers):
            return 1
        group = self.scheme.group if matrix.endswith(("o_proj", "down_proj")) else 1
        if self.scheme.vllm_names and ".experts." in matrix:
            group = math.gcd(group, 32)
        return math.lcm(*self.scheme.sides, group)

    def stored(self, layer: int, matrices: Mapping[str, int]) -> float:
        """Bytes of matrices of `layer`, each as the checkpoint has it, scales included."""
        bits = (self.scheme and self.scheme.bits) or 0
        sizes = {True: bits / 8, False: PLAIN_BYTES}
        return sum(n * sizes[self.quantised(layer, name)] for name, n in matrices.items())

    # Weights of one layer (or of one expert) by matrix, as the makers' releases name them.
    @property
    def attentions(self) -> tuple[str, ...]:
        """Of one layer, by path; each has a cache."""
        return ("self_attn.0", "self_attn.1") if self.twofold else ("self_attn",)

    @property
    def dense_mlps(self) -> tuple[str, ...]:
        """Of one layer that has dense MLPs, by path."""
        return ("mlps.0", "mlps.1") if self.twofold else ("mlp",)

    @property
    def attention_replicated(self) -> dict[str, int]:
        """Every tensor-parallel rank has all of them."""
        one = {"q_a_proj": self.hidden * self.q_lora_rank} if self.q_lora_rank else {}
        one["kv_a_proj_with_mqa"] = self.hidden * self.dims.head_dim
        return _each(self.attentions, one)

    @property
    def attention_sharded(self) -> dict[str, int]:
        """Split by heads."""
        q_in, name = (self.q_lora_rank, "q_b_proj") if self.q_lora_rank else (self.hidden, "q_proj")
        one = {
            name: q_in * self.heads * (self.nope + self.dims.rope_dim),
            "kv_b_proj": self.dims.kv_lora_rank * self.heads * (self.nope + self.v),
            "o_proj": self.heads * self.v * self.hidden,
        }
        return _each(self.attentions, one)

    def absorbed(self, layer: int) -> int:
        """Elements that are taken out of kv_b_proj in the model's dtype, as it is quantised."""
        kv_b = {k: n for k, n in self.attention_sharded.items() if k.endswith(".kv_b_proj")}
        return sum(n for name, n in kv_b.items() if self.quantised(layer, name))

    @property
    def indexer(self) -> dict[str, int]:
        """Of one Lightning Indexer; replicated."""
        q_in = self.q_lora_rank or self.hidden
        return {"self_attn.indexer.wq_b": q_in * self.index_heads * self.index_dim}

    @property
    def indexer_unquantised(self) -> int:
        """Keys, head weights and norm of one Lightning Indexer; replicated. vLLM joins the first
        two in one matrix of the model's dtype, also where the checkpoint has wk in fp8."""
        if not self.sparse:
            return 0
        return self.hidden * (self.index_dim + self.index_heads) + 2 * self.index_dim

    def indexers(self, layers: range) -> int:
        """How many of `layers` have an indexer, and a cache of its keys."""
        return sum(layer not in self.index_shared for layer in layers) if self.sparse else 0

    @property
    def mtp(self) -> int:
        """What an MTP layer has beside a layer's weights; replicated, never quantised. Embedding
        and head are the model's."""
        return 2 * self.hidden * self.hidden + 3 * self.hidden

    @property
    def norms(self) -> int:
        """Of one layer; replicated, never quantised."""
        one = 2 * self.hidden + (self.q_lora_rank or 0) + self.dims.kv_lora_rank
        return len(self.attentions) * one

    @property
    def router(self) -> int:
        """Replicated, never quantised; vLLM has that of LongCat-Flash in fp32."""
        return (self.experts + self.zero_experts) * (self.hidden + self.router_bias)

    @property
    def router_bytes(self) -> int:
        return self.router * (FP32_BYTES if self.twofold else PLAIN_BYTES)

    @property
    def dense_mlp(self) -> dict[str, int]:
        """All of one layer that has dense MLPs."""
        return _each(self.dense_mlps, self._mlp(self.dense_width))

    @property
    def expert(self) -> dict[str, int]:
        """The first of a layer, for all of them."""
        return _each(["mlp.experts.0"], self._mlp(self.expert_width))

    @property
    def shared_mlp(self) -> dict[str, int]:
        """All shared experts of a layer: they are one matrix each of this width."""
        width = self.shared_experts * self.expert_width
        return _each(["mlp.shared_experts"], self._mlp(width))

    def _mlp(self, width: int) -> dict[str, int]:
        return {f"{name}_proj": self.hidden * width for name in ("gate", "up", "down")}

    @property
    def embeddings(self) -> int:
        """Input embedding and output head (one matrix if tied)."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    def is_moe(self, layer: int) -> bool:
        moe = layer >= self.dense_layers and layer % self.moe_layer_freq == 0
        return self.experts > 0 and moe

    def is_dense(self, layer: int) -> bool:
        return self.twofold or not self.is_moe(layer)

    @property
    def parameters(self) -> int:
        """All weights of the language model; an MTP layer is not counted."""
        moe = sum(map(self.is_moe, range(self.layers)))
        dense = sum(map(self.is_dense, range(self.layers)))
        attention = _sum(self.attention_replicated) + _sum(self.attention_sharded) + self.norms
        experts = self.router + self.experts * _sum(self.expert) + _sum(self.shared_mlp)
        indexers = self.indexers(range(self.layers))
        layers = (
            self.layers * attention
            + indexers * (_sum(self.indexer) + self.indexer_unquantised)
            + dense * _sum(self.dense_mlp)
            + moe * experts
        )
        return layers + self.embeddings + self.hidden


def _each(paths: Iterable[str], matrices: Mapping[str, int]) -> dict[str, int]:
    return {f"{path}.{name}": n for path in paths for name, n in matrices.items()}


def _sum(matrices: Mapping[str, int]) -> int:
    return sum(matrices.values())
