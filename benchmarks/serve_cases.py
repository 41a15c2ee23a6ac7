# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/serve.py compares: backends, load shapes and decode steps, most telling first."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import count

OURS = "CUSTOM"
# Ours with queries of e4m3, which FLASHMLA always has where the cache is fp8.
FP8_QUERY = "CUSTOM+fp8_query"
BACKENDS = (OURS, "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
FP8_BACKENDS = (OURS, FP8_QUERY, "FLASHMLA", "TRITON_MLA")
FP8_CACHES = ("fp8", "fp8_e4m3")
CACHE_GIB = 19  # of an engine of steps, and of servers that share a GPU
LABELS = {OURS: "mla-backend", FP8_QUERY: "mla-backend, fp8 queries"}
MODEL = Path(__file__).parents[1] / "configs" / "models" / "deepseek-v3-5-layers"
RELEASED_HEADS = 128
# DeepSeek-V3.2: sparse attention.
SPARSE_MODEL = MODEL.with_name("deepseek-v3.2-5-layers")
SPARSE_BACKENDS = (OURS, "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")
SPARSE_FP8_BACKENDS = SPARSE_BACKENDS[:2]  # the last one takes rows of 16 bits alone
SPARSE_FP8_CACHE = "fp8_ds_mla"  # what vLLM makes of any fp8 for FLASHMLA_SPARSE, not for ours
SPARSE_BATCHES, SPARSE_CONTEXTS = (1, 8, 32, 128), (8192, 32768)
# Layers of an engine by heads, the deepest first, for caches that are too large for more of them.
# A released model has 61, whose steps are longer than the host needs for one (5 ms for 128
# requests): so as many as four engines on one H200 have room for.
DEPTHS = {128: (12, 6, 1), 16: (30, 8, 2)}

# (requests, tokens of each). A run that is short of time has done the first ones.
STEPS = (
    (96, 16384), (32, 16384), (128, 4096), (8, 16384), (1, 16384), (32, 65536), (96, 4096),
    (8, 65536), (1, 65536), (32, 4096), (128, 16384), (96, 1024), (8, 4096), (1, 4096),
    (32, 1024), (128, 1024), (8, 1024), (1, 1024), (96, 65536), (128, 65536),
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Shape:
    """Tokens of a request: prompt / answer."""

    input_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From "8192/1024"; ArgumentTypeError for anything else."""
        parts = text.split("/")
        if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
            raise ArgumentTypeError(f"expected PROMPT/ANSWER in tokens, got {text}")
        return cls(int(parts[0]), int(parts[1]))

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}"


@dataclass(frozen=True)
class Load:
    """A closed loop of `concurrency` clients, or an open one of `rate` requests a second, or of
    `share` of the rate of our fullest closed loop of that shape."""

    shape: Shape
    concurrency: int | None = None
    rate: float | None = None
    share: float | None = None


SHORT, MIDDLE, LONG = SHAPES = (Shape(1024, 1024), Shape(8192, 1024), Shape(32768, 256))
CONCURRENCY = (1, 8, 32, 96, 128)
SHARES = (0.5, 0.8)
# Open loops of a given rate come before closed ones of more clients, whose long prompts take
# minutes.
OPEN_AFTER = 64
FEWEST = 2  # requests of a closed loop
# Once, in about two minutes of one GPU for four servers; the most telling first.
REDUCED = (
    Load(MIDDLE, 32), Load(SHORT, 32), Load(LONG, 8), Load(SHORT, 1), Load(SHORT, 128),
    Load(SHORT, share=0.7), Load(MIDDLE, 8),
)  # fmt: skip


def loads(
    shapes: list[Shape], concurrency: list[int], rates: list[float] | None, *, reduced: bool
) -> list[Load]:
    """REDUCED, or for each shape closed loops and open ones, `rates` or else SHARES.

    In the order of the prompts' tokens at a time: a run short of time leaves the longest out. A
    share is behind all closed loops of its shape, any of which may be the fullest.
    """
    if reduced:
        return list(REDUCED)
    most = max([OPEN_AFTER, *concurrency])

    def tokens(load: Load) -> int:
        return load.shape.input_len * (load.concurrency or (most if load.share else OPEN_AFTER))

    closed = [Load(shape, clients) for shape in shapes for clients in concurrency]
    if rates is None:
        opened = [Load(shape, share=share) for shape in shapes for share in SHARES]
    else:
        opened = [Load(shape, rate=rate) for shape in shapes for rate in rates]
    return sorted(closed + opened, key=tokens)


def width_of(model: str) -> str:
    """Of what dense layers have the width, in words; `model` as settings name it."""
    if model in (MODEL.name, SPARSE_MODEL.name):
        return "DeepSeek-V3's width"
    return f"the width of configs/models/{model}"


def depths_of(heads: int, asked: list[int] | None) -> list[int]:
    """Layers of engines of so many heads, the deepest first: those asked for, or DEPTHS."""
    return sorted(asked or DEPTHS.get(heads, DEPTHS[RELEASED_HEADS]), reverse=True)


def label(backend: str) -> str:
    """A backend's name on a page."""
    return LABELS.get(backend, backend)


def engine_of(backend: str) -> tuple[str, dict[str, str]]:
    """vLLM's name of a backend that is compared, and its environment."""
    if backend in (OURS, FP8_QUERY):
        return OURS, {"MLA_BACKEND_FP8_QUERY": str(int(backend == FP8_QUERY))}
    return backend, {}


def step_cases(batches: list[int] | None, contexts: list[int] | None) -> list[tuple[int, int]]:
    """STEPS, or every pair of what was asked for, in the order of STEPS where they are in it."""
    if batches is None and contexts is None:
        return list(STEPS)
    batches = batches or sorted({b for b, _ in STEPS})
    contexts = contexts or sorted({c for _, c in STEPS})
    asked = [(b, c) for c in contexts for b in batches]
    return sorted(asked, key=lambda case: STEPS.index(case) if case in STEPS else len(STEPS))


def heads_of_a_rank(text: str) -> int:
    """The argument that says how many heads one of several tensor-parallel GPUs has."""
    heads = count(text)
    if RELEASED_HEADS % heads:
        allowed = [n for n in range(1, RELEASED_HEADS + 1) if not RELEASED_HEADS % n]
        raise ArgumentTypeError(f"expected one of {', '.join(map(str, allowed))}, got {heads}")
    return heads


def dense_overrides(layers: int, heads: int) -> dict[str, Any]:
    """DeepSeek-V3 with `layers` dense layers, and of `heads` heads: those of one rank of
    RELEASED_HEADS / heads tensor-parallel ones, whose share of the MLP goes with them."""
    ranks = RELEASED_HEADS // heads
    return {
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 18432 // ranks,
    }
