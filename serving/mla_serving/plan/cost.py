# SPDX-License-Identifier: Apache-2.0
"""The plan itself: what of a GPU the weights take, what is left for the cache, and the times."""

from dataclasses import dataclass

from mla_kernels.layouts import BLOCK_SIZE

from mla_serving.plan import attention, kv_cache, served
from mla_serving.plan.attention import AttentionTime
from mla_serving.plan.layout import GIB, Layout
from mla_serving.plan.model import MlaModel
from mla_serving.plan.rates import SM_10X, Rates

_FP8_ON_SM_10X = "glm_moe_dsa"  # GLM-5, by its model_type


@dataclass(frozen=True)
class Question:
    """What is planned: a model on a cluster, and the load that it should carry.

    batch, context   requests at once over the whole cluster, and the tokens each of them has
    drafts           speculative tokens of each request in a step, beside a new one
    memory           bytes of one GPU; `utilization` of them are vLLM's, as its own option says
    reserve          bytes of these for activations, CUDA graphs and communication
    """

    model: MlaModel
    layout: Layout
    gpu: str
    memory: float
    utilization: float
    reserve: float
    rates: Rates | None
    kv_cache_dtype: str
    context: int
    batch: int
    drafts: int = 0

    @property
    def mtp_layers(self) -> int:
        """Those that vLLM loads."""
        return self.model.mtp_layers if self.drafts else 0


@dataclass(frozen=True)
class Plan:
    """The answer. Bytes and tokens of "gpu" are those of the GPU that holds fewest tokens: each
    stage of a pipeline caches its layers of all requests."""

    question: Question
    weights: dict[str, float]
    kv_cache_dtype: str  # never "auto"
    row_bytes: int
    indexer_row_bytes: int
    token_bytes: int  # all layers, the whole cache of one token
    gpu_token_bytes: int  # on one GPU: the layers of its stage
    cache_bytes: float
    gpu_tokens: int
    cluster_tokens: int
    attention: AttentionTime | None

    @property
    def weight_bytes(self) -> float:
        return sum(self.weights.values())

    @property
    def requests_that_fit(self) -> int:
        """Whole requests of `context` tokens, in blocks, over the cluster."""
        layout, context = self.question.layout, self.question.context
        blocks = -(-context // (BLOCK_SIZE * layout.dcp))
        return layout.dp * (self.gpu_tokens // BLOCK_SIZE // blocks)

    @property
    def fits(self) -> bool:
        return self.requests_that_fit >= self.question.batch


def make(question: Question) -> Plan:
    """ValueError for what vLLM or the backend refuses, and for weights that leave no room."""
    model, layout = question.model, question.layout
    layout.check(model)
    dtype = _kv_cache_dtype(question)
    served.check(model, layout, dtype, question.context, question.drafts)
    usable = question.memory * question.utilization
    stages = [
        (layout.weights(model, layers), kv_cache.token_bytes(model, dtype, layers))
        for layers in layout.stages(model.layers, question.mtp_layers)
    ]

    def room(weights: dict[str, float]) -> float:
        return usable - sum(weights.values()) - question.reserve

    weights, gpu_token = min(stages, key=lambda stage: room(stage[0]) / stage[1])
    cache = room(weights)
    if cache <= 0:
        raise ValueError(
            f"the weights of {model.name} do not fit: {sum(weights.values()) / GIB:.1f} GiB a GPU "
            f"and {question.reserve / GIB:.1f} GiB of working memory, of {usable / GIB:.1f} GiB "
            f"({question.utilization:g} of {question.memory / GIB:.1f}). Mend: more GPUs"
        )
    gpu_tokens = int(cache / gpu_token) // BLOCK_SIZE * BLOCK_SIZE
    times = None
    if question.rates is not None:
        times = attention.time(
            model,
            layout,
            question.rates,
            dtype,
            question.batch,
            question.context,
            question.drafts,
            question.mtp_layers,
        )
    return Plan(
        question=question,
        weights=weights,
        kv_cache_dtype=dtype,
        row_bytes=kv_cache.row_bytes(model, dtype),
        indexer_row_bytes=kv_cache.indexer_row_bytes(model),
        token_bytes=kv_cache.token_bytes(model, dtype, range(model.layers + question.mtp_layers)),
        gpu_token_bytes=gpu_token,
        cache_bytes=cache,
        gpu_tokens=gpu_tokens,
        cluster_tokens=gpu_tokens * layout.dcp * layout.dp,
        attention=times,
    )


def _kv_cache_dtype(question: Question) -> str:
    """What vLLM makes of "auto": what the checkpoint asks for, else the model's dtype, but for one
    model and kind of GPU (GlmMoeDsaForCausalLM in 0.32's model_executor/models/config.py)."""
    model = question.model
    if question.kv_cache_dtype != "auto":
        return question.kv_cache_dtype
    asks = model.kv_cache_dtype != model.dtype
    if not asks and model.model_type == _FP8_ON_SM_10X and question.gpu in SM_10X:
        return "fp8_e4m3"
    return model.kv_cache_dtype
