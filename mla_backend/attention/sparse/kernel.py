# SPDX-License-Identifier: Apache-2.0
"""Which sparse kernels an engine uses, and the scratch that its layers share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary, ref

import torch
from mla_kernels import indexer_topk_workspace, mla_sparse_workspace
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse.choice import RESCALES, choose_sparse_impl, is_few
from vllm import envs as vllm_envs
from vllm.logger import init_logger

from mla_backend import envs
from mla_backend.attention.choice import choose
from mla_backend.attention.kernel import rescale_on
from mla_backend.attention.sparse import fp8_indexer
from mla_backend.attention.sparse.shared_choice import SharedChoice
from mla_backend.refusals import cannot_serve
from mla_backend.stats import STATS

logger = init_logger("vllm.mla_backend")

# benchmarks/results/h200/sparse.md
_ONE_SCALE = (
    "--kv-cache-dtype fp8 is one scale for the whole cache, and attention by the general portable "
    "kernel alone, which takes 1.6 to 1.9 times as long as with fp8_ds_mla. vLLM's FLASHMLA_SPARSE "
    "takes fp8 for fp8_ds_mla; here say so: --kv-cache-dtype fp8_ds_mla."
)


@dataclass(frozen=True)
class SparseKernel:
    """Implementations, settled at start-up. `indexer` may be "auto": each of its ops has its own
    best one, the same for all steps. fp8_products: see `mla_kernels.indexer_scores`."""

    attention: str
    indexer: str
    rescale: str
    deterministic: bool  # vLLM's batch-invariant mode
    fp8_products: bool = False

    @classmethod
    def choose(
        cls,
        device: torch.device,
        dims: MlaDims,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        num_heads: int,
    ) -> "SparseKernel":
        """By MLA_BACKEND_IMPL; the choice and its reason go to STATS and to the log.

        num_heads are those of this rank, under DCP those that the ranks of a group gather. As for
        dense layers the choice is the same for all steps, so that all tokens of a request are
        rounded alike. ValueError if what is asked for cannot run here, or for an
        MLA_BACKEND_RESCALE that sparse attention does not have on this device.
        """
        rescale = rescale_on(device)
        if rescale not in (RESCALES if device.type == "cpu" else ("pow2",)):
            raise cannot_serve(
                f"MLA_BACKEND_RESCALE={rescale} with a sparse model, whose attention rescales by "
                "powers of two (on a CPU also as flash). Mend: unset MLA_BACKEND_RESCALE"
            )
        indexer, deterministic = envs.get("MLA_BACKEND_IMPL"), bool(vllm_envs.VLLM_BATCH_INVARIANT)
        choice = choose(
            choose_sparse_impl,
            device,
            dims=dims,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            few=is_few(None, num_heads, kv_cache_dtype) and not deterministic,
            rescale=rescale,
        )
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        fp8 = fp8_indexer.is_on(capability, indexer, deterministic=deterministic)
        scores = "products in fp8" if fp8 else "exact products"
        STATS.sparse = {
            "impl": choice.impl,
            "reason": choice.reason,
            "rescale": rescale,
            "scores": scores,
        }
        logger.info_once(
            "Sparse attention by %s: %s; scores of the indexer by %s.",
            choice.impl,
            choice.reason,
            scores,
        )
        if device.type == "cuda" and kv_cache_dtype == torch.float8_e4m3fn:
            logger.warning_once(_ONE_SCALE)
        if indexer == "hopper":  # which the write of the keys and the top-k have not
            indexer = "auto"
        return cls(choice.impl, indexer, rescale, deterministic, fp8)


# By engine, and by what was asked for. Made while the model is built, so that vLLM counts them when
# it sizes the KV cache; all layers of an engine, a draft's too, share them. The layers alone keep
# them: they go with their engine, and no other engine of the process gets memory that this one's
# sleep may take away.
_WORKSPACES: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

# What says that an engine, the id() of its layers' dict, is still the same one. Drafts have configs
# of their own with that dict; a dict that is gone may leave its id to another engine's.
_ENGINES: dict[int, ref[Any]] = {}

_Made = TypeVar("_Made")


def _engine(compilation_config: Any) -> int:
    """A number of the engine that no other one with workspaces has."""
    engine = id(compilation_config.static_forward_context)
    if engine not in _ENGINES or _ENGINES[engine]() is None:
        for key in [key for key in _WORKSPACES if key[0] == engine]:
            _WORKSPACES.pop(key, None)  # it may go by itself meanwhile
        _ENGINES[engine] = ref(compilation_config)
    return engine


def _shared(vllm_config: Any, asked: tuple[Any, ...], make: Callable[[], _Made]) -> _Made:
    """What `make` makes, once for all layers of an engine that ask for the same."""
    key = (_engine(vllm_config.compilation_config), *asked)
    workspace: _Made | None = _WORKSPACES.get(key)
    if workspace is None:
        workspace = _WORKSPACES[key] = make()
    return workspace


def attention_workspace(
    vllm_config: Any,
    tokens: int,
    heads: int,
    topk: int,
    kv_lora_rank: int,
    device: torch.device,
    impl: str,
) -> torch.Tensor:
    """See `mla_kernels.mla_sparse_workspace`."""

    def make() -> torch.Tensor:
        return mla_sparse_workspace(
            tokens, heads, topk, device=device, kv_lora_rank=kv_lora_rank, impl=impl
        )

    asked = ("attention", tokens, heads, topk, kv_lora_rank, device, impl)
    return _shared(vllm_config, asked, make)


def topk_workspace(
    vllm_config: Any, rows: int, max_blocks: int, device: torch.device, impl: str
) -> torch.Tensor | None:
    """See `mla_kernels.indexer_topk_workspace`; None where the implementation takes none."""
    if device.type == "cpu" or impl in ("torch", "reference"):
        return None
    asked = ("topk", rows, max_blocks, device)
    return _shared(vllm_config, asked, lambda: indexer_topk_workspace(rows, max_blocks, device))


def slots_buffer(
    vllm_config: Any, tokens: int, topk: int, device: torch.device
) -> torch.Tensor | None:
    """[tokens, topk] int32 for the slots that a layer attends to under decode context parallelism;
    None without. A kernel that sees slots change can wait for ever: they lie where no collective
    and no other tensor of a CUDA graph ever writes."""
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return None

    def make() -> torch.Tensor:
        return torch.empty(tokens, topk, dtype=torch.int32, device=device)

    return _shared(vllm_config, ("slots", tokens, topk, device), make)


def shared_choice(
    vllm_config: Any, tokens: int, topk: int, device: torch.device
) -> SharedChoice | None:
    """How the ranks choose together under decode context parallelism; None without."""
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    if ranks == 1:
        return None
    asked = ("choice", ranks, tokens, topk, device)
    return _shared(vllm_config, asked, lambda: SharedChoice(ranks, topk, tokens, device))
