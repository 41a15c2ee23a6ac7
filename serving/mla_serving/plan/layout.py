# SPDX-License-Identifier: Apache-2.0
"""How vLLM spreads a model over GPUs: tensor, data, pipeline, expert and context parallelism."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mla_serving.plan.model import PLAIN_BYTES, MlaModel

GIB = 1024**3
# GLM-4.7-Flash: vLLM's Glm4MoE has no form for split tokens, as its DeepSeek and openPangu have.
_NEVER_SPLITS = "glm4_moe_lite"


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; tp * dp * pp is the number of GPUs.

    tp  one request's attention heads, split              dp  engines that share the experts
    pp  stages of layers                                  dcp ranks of tp that share a cache
    ep  whole experts on a rank instead of slices of all
    """

    tp: int
    dp: int = 1
    pp: int = 1
    dcp: int = 1
    ep: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.dp * self.pp

    def query_heads(self, model: MlaModel) -> int:
        """Those that one GPU computes: the ranks that share a cache gather theirs."""
        return model.heads // self.tp * self.dcp

    def check(self, model: MlaModel) -> None:
        """ValueError for what vLLM would refuse for this model."""
        if self.tp % self.dcp:
            raise ValueError(f"Expected --dcp to divide --tp {self.tp}, got {self.dcp}")
        if model.heads % self.tp:
            raise ValueError(
                f"Expected --tp to divide the {model.heads} attention heads, got {self.tp}"
            )
        if self.pp > model.layers:
            raise ValueError(f"Expected --pp up to {model.layers} (layers), got {self.pp}")
        ranks = self.tp * self.dp
        if self.ep and ranks > model.experts > 0:
            raise ValueError(
                f"Expected at most {model.experts} GPUs a stage (experts of the model), got {ranks}"
            )
        self._check_slices(model)

    def _check_slices(self, model: MlaModel) -> None:
        """ValueError where a GPU's slice of a matrix would not be of whole blocks of scales. vLLM
        takes a matrix that is not cut as it is, except an expert's."""
        every, heads, tp = range(model.layers), model.heads, self.tp
        dense = [layer for layer in every if model.is_dense(layer)]
        moe = [layer for layer in every if model.is_moe(layer)]
        attention, mlp = model.attentions[0], model.dense_mlps[0]
        q = f"{attention}.q_b_proj" if model.q_lora_rank else f"{attention}.q_proj"
        kv = f"{attention}.kv_b_proj"
        shared = model.shared_experts * model.expert_width
        shared_ranks, dense_ranks = self._shared_ranks(model), self._dense_ranks(model)
        slices: list[tuple[str, str, Sequence[int], int, int]] = [
            ("queries", q, every, heads * (model.nope + model.dims.rope_dim), tp),
            ("keys and values", kv, every, heads * (model.nope + model.v), tp),
            ("the attention's output", f"{attention}.o_proj", every, heads * model.v, tp),
            ("dense MLPs", f"{mlp}.down_proj", dense, model.dense_width, dense_ranks),
            ("shared experts", "mlp.shared_experts.down_proj", moe, shared, shared_ranks),
        ]
        if not self.ep:
            ranks = tp * self.dp
            slices += [("experts", "mlp.experts.0.down_proj", moe, model.expert_width, ranks)]
        for what, matrix, layers, width, ranks in slices:
            unit = model.block(matrix, layers)
            if layers and (ranks > 1 or what == "experts") and width % (ranks * unit):
                experts = "--expert-parallel, or more stages (--pp)"
                raise ValueError(
                    f"{ranks} GPUs cannot slice {what} of width {width}"
                    + (f" in blocks of {unit}" if unit > 1 else "")
                    + f". Mend: {experts if what == 'experts' else 'a lower --tp'}"
                )

    def stages(self, layers: int, mtp_layers: int = 0) -> list[range]:
        """Layers of each pipeline stage, as vLLM's get_pp_indices cuts them; those for MTP are of
        the last."""
        sizes = [layers // self.pp] * self.pp
        for i in range(layers % self.pp):
            sizes[-(i + 2)] += 1
        starts = [sum(sizes[:i]) for i in range(self.pp)]
        sizes[-1] += mtp_layers
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def weights(self, model: MlaModel, layers: range) -> dict[str, float]:
        """Bytes of weights by part, on a GPU of the stage with these layers. "MTP" is what such
        layers have that others have not.

        dcp changes none. GLM-5's config asks vLLM for `dcp_q_replicate` (from 0.29 on), with which
        a rank holds q_b_proj and W_UK of its whole group, but its model on CUDA has no such form.
        Dense models have it where `--dcp-q-replicate` or VLLM_DCP_Q_REPLICATE asks, which the plan
        does not know.
        """
        names = ("attention", "dense MLPs", "routed experts", "shared experts, routers")
        parts = dict.fromkeys((*names, "MTP", "embeddings", "absorbed W_UK, W_UV"), 0.0)
        for layer in layers:
            stored = partial(model.stored, layer)
            sharded = stored(model.attention_sharded) / self.tp
            parts["attention"] += (
                stored(model.attention_replicated) + sharded + model.norms * PLAIN_BYTES
            )
            if model.indexers(range(layer, layer + 1)):
                parts["attention"] += (
                    stored(model.indexer) + model.indexer_unquantised * PLAIN_BYTES
                )
            if layer >= model.layers:
                parts["MTP"] += model.mtp * PLAIN_BYTES
            if model.is_moe(layer):
                parts["routed experts"] += self._experts_per_rank(model) * stored(model.expert)
                shared = stored(model.shared_mlp) / self._shared_ranks(model)
                parts["shared experts, routers"] += shared + model.router_bytes
            if model.is_dense(layer):
                parts["dense MLPs"] += stored(model.dense_mlp) / self._dense_ranks(model)
            parts["absorbed W_UK, W_UV"] += model.absorbed(layer) / self.tp * PLAIN_BYTES
        parts["embeddings"] = self._embeddings(model, layers) / self.tp * PLAIN_BYTES
        return {name: size for name, size in parts.items() if size}

    @property
    def _splits_tokens(self) -> bool:
        """Of MoE layers over tp, where vLLM's model can (ParallelConfig.use_sequence_parallel_moe):
        then each GPU has all of what computes its share of them."""
        return self.ep and self.dp > 1

    def _shared_ranks(self, model: MlaModel) -> int:
        """Over how many GPUs a shared expert is sliced."""
        whole = self._splits_tokens and model.model_type != _NEVER_SPLITS
        return 1 if whole else self.tp

    def _dense_ranks(self, model: MlaModel) -> int:
        """Over how many GPUs a dense MLP is sliced. vLLM's model of DeepSeek-V3.2 and GLM-5 on CUDA
        splits the tokens of all layers, but in a pipeline; before 0.29 it did not."""
        whole = self._splits_tokens and model.sparse and self.pp == 1
        return 1 if whole else self.tp

    def _experts_per_rank(self, model: MlaModel) -> float:
        ranks = self.tp * self.dp
        return math.ceil(model.experts / ranks) if self.ep else model.experts / ranks

    def _embeddings(self, model: MlaModel, layers: range) -> int:
        one = model.vocab * model.hidden
        if self.pp == 1:
            return model.embeddings
        drafts = layers.stop > model.layers  # from embeddings, which the last stage has not
        return one * ((layers.start == 0) + (layers.stop >= model.layers) + drafts)
