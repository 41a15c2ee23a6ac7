# SPDX-License-Identifier: Apache-2.0
"""What the backend, and of drafts vLLM, would refuse on a GPU, so that no plan promises it. The
limits are its own."""

from mla_kernels.indexer.api import HEAD_DIM as INDEX_DIM
from mla_kernels.indexer.api import MAX_HEADS as MAX_INDEX_HEADS
from mla_kernels.topk.api import MAX_K
from mla_kernels.topk.plan import MAX_MERGED, MAX_WIDTH, next_power_of_2

from mla_backend.attention import support
from mla_serving.plan.layout import Layout
from mla_serving.plan.model import MlaModel
from mla_serving.plan.rates import SM_10X, SM_80

# Later ones compute the indexer's keys there in ways that it refuses (mla_backend.compat).
_LAST_OF_SPARSE = dict.fromkeys(SM_80, "0.28") | dict.fromkeys(SM_10X, "0.32")


def check(
    model: MlaModel, layout: Layout, kv_cache_dtype: str, context: int, drafts: int = 0
) -> None:
    """ValueError naming the value, what is allowed and, where there is one, the mend."""
    _check_rows(model, kv_cache_dtype)
    _check_heads(model, layout)
    _check_drafts(model, drafts)
    if model.sparse:
        _check_ranks(model, layout)
        _check_stages(model, layout)
        _check_indexer(model)
        _check_context(model, layout, context)


def last_vllm(model: MlaModel, gpu: str) -> str | None:
    """The last vLLM with which the backend serves `model` on such GPUs; None: its newest."""
    return _LAST_OF_SPARSE.get(gpu) if model.sparse else None


def _check_rows(model: MlaModel, kv_cache_dtype: str) -> None:
    widths = f"{model.dims.kv_lora_rank} + {model.dims.rope_dim}"
    sizes = support.SPARSE_HEAD_SIZES if model.sparse else support.HEAD_SIZES
    allowed = [support.HEAD_SIZES[size] for size in sizes]
    if widths not in allowed:
        kind = "sparse" if model.sparse else "dense"
        raise ValueError(
            f"{model.name} has cache rows of {widths} elements (kv_lora_rank + qk_rope_head_dim); "
            f"the vLLM backend serves {kind} attention of {' or '.join(allowed)} only"
        )
    if kv_cache_dtype == "nvfp4":
        raise ValueError(
            f"{model.name} asks for a cache of nvfp4, which our kernels do not read. Mend: "
            f"--kv-cache-dtype {model.dtype} or fp8"
        )
    if kv_cache_dtype in support.DTYPES and kv_cache_dtype != model.dtype:
        raise ValueError(
            f"Expected --kv-cache-dtype auto, {model.dtype} (the model's) or one of fp8, got "
            f"{kv_cache_dtype}"
        )


def _check_heads(model: MlaModel, layout: Layout) -> None:
    heads, most = layout.query_heads(model), support.MAX_HEADS
    if heads > most:
        gathered = f" x --dcp {layout.dcp}" if layout.dcp > 1 else ""
        mend = f"--tp of {-(-model.heads * layout.dcp // most)} or more"
        raise ValueError(
            f"{model.heads} attention heads / --tp {layout.tp}{gathered} are {heads} on a GPU; our "
            f"kernels take {most}. Mend: {mend}" + (", or a lower --dcp" if gathered else "")
        )


def _check_drafts(model: MlaModel, drafts: int) -> None:
    if not model.sparse and drafts > support.MAX_QUERY_LEN - 1:
        raise ValueError(
            f"Expected --speculative-tokens up to {support.MAX_QUERY_LEN - 1} for dense attention, "
            f"whose kernels take {support.MAX_QUERY_LEN} query tokens a request, got {drafts}"
        )
    turn = model.mtp_layers  # of each one draft; vLLM repeats all of them or none
    if 0 < turn < drafts and drafts % turn:
        raise ValueError(
            f"Expected --speculative-tokens up to {turn} or a multiple of it for the {turn} MTP "
            f"layers of {model.name}, got {drafts}"
        )


def _check_ranks(model: MlaModel, layout: Layout) -> None:
    most = MAX_MERGED // next_power_of_2(model.index_topk)
    if layout.dcp > most:
        raise ValueError(
            f"Expected --dcp up to {most} for the sparse attention of {model.name}, whose ranks "
            f"bring {model.index_topk} candidates each, got {layout.dcp}"
        )


def _check_stages(model: MlaModel, layout: Layout) -> None:
    for stage in layout.stages(model.layers)[1:]:
        if stage.start in model.index_shared:
            raise ValueError(
                f"--pp {layout.pp} begins a stage at layer {stage.start} of {model.name}, which "
                "reads the choice of an earlier one: vLLM does not pass the choice on. Mend: "
                "--pp 1, or another number of stages; where no other fits, the server's "
                "VLLM_PP_LAYER_PARTITION cuts them elsewhere, which the plan does not know"
            )


def _check_context(model: MlaModel, layout: Layout, context: int) -> None:
    if -(-context // layout.dcp) > MAX_WIDTH:
        raise ValueError(
            f"Expected --context up to {MAX_WIDTH * layout.dcp} for the sparse attention of "
            f"{model.name}, whose top-k takes {MAX_WIDTH} scores on a GPU, got {context}"
        )


def _check_indexer(model: MlaModel) -> None:
    for key, value, low, high in (
        ("index_n_heads", model.index_heads, 1, MAX_INDEX_HEADS),
        ("index_head_dim", model.index_dim, INDEX_DIM, INDEX_DIM),
        ("index_topk", model.index_topk, 1, MAX_K),
    ):
        if not low <= value <= high:
            allowed = f"{low}" if low == high else f"{low} to {high}"
            raise ValueError(
                f"{model.name} has {key} {value}; our indexer's kernels take {allowed}"
            )
