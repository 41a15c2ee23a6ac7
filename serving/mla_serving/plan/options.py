# SPDX-License-Identifier: Apache-2.0
"""The command line of `mla-backend plan`, and the question it asks."""

import argparse
from typing import TYPE_CHECKING

from mla_backend.attention.support import KV_CACHE_DTYPES

if TYPE_CHECKING:
    from mla_serving.plan.cost import Question

_MOST = 1_000_000_000  # tokens, requests, GPUs: far beyond any cluster, and still a number to print
_MOST_GIB = 1_000_000


def add(parser: argparse.ArgumentParser) -> None:
    """Options as vLLM names them where it has them."""
    parser.epilog = "Exit status: 1 if the weights, or --batch requests of --context, do not fit."
    parser.add_argument(
        "--model",
        required=True,
        help="config.json (or Mistral's params.json), a directory with one, or a name on the Hub",
    )
    parser.add_argument("--gpus", type=_size, required=True, help="GPUs of the whole cluster")
    parser.add_argument("--gpu", default="h200", help="their kind (default: h200)")
    parser.add_argument("--gpu-memory-gib", type=float, help="memory of one, if not its kind's")
    parser.add_argument("--tp", type=_size, help="tensor parallel size (default: the rest)")
    parser.add_argument("--dp", type=_size, default=1, help="data parallel size")
    parser.add_argument("--pp", type=_size, default=1, help="pipeline parallel size")
    parser.add_argument("--dcp", type=_size, default=1, help="decode context parallel size")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each GPU")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--context", type=_size, default=8192, help="tokens a request (8192)")
    parser.add_argument("--batch", type=_size, default=64, help="requests at once (64)")
    parser.add_argument(
        "--speculative-tokens",
        type=_count,
        default=0,
        help="num_speculative_tokens of --speculative-config: drafts a request and step (0), by "
        "the model's MTP layers if it has any",
    )
    parser.add_argument(
        "--weight-bits", type=float, help="of a quantised weight, scales included (4.5, say)"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="that of the server (0.9, as in configs/serve; vLLM's own default may differ)",
    )
    parser.add_argument(
        "--reserve-gib",
        type=float,
        default=6.0,
        help="for activations, CUDA graphs and communication: an assumption (6)",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def read(args: argparse.Namespace) -> "Question":
    """OSError for a model without config, ValueError for values that do not go together."""
    from mla_serving.plan import config, rates
    from mla_serving.plan.cost import Question
    from mla_serving.plan.layout import GIB, Layout

    gpu = args.gpu.lower()
    if gpu not in rates.MEMORY_MIB and args.gpu_memory_gib is None:
        known = ", ".join(rates.MEMORY_MIB)
        raise ValueError(
            f"Expected --gpu in {known}, or --gpu-memory-gib beside it, got {args.gpu}"
        )
    memory_gib = args.gpu_memory_gib
    if memory_gib is None:
        memory_gib = rates.MEMORY_MIB[gpu] / 1024
    if not 0 < memory_gib <= _MOST_GIB:
        raise ValueError(
            f"Expected --gpu-memory-gib above 0 and up to {_MOST_GIB}, got {memory_gib:.9g}"
        )
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ValueError(
            f"Expected --gpu-memory-utilization above 0 and up to 1, got "
            f"{args.gpu_memory_utilization:g}"
        )
    if not 0 <= args.reserve_gib <= _MOST_GIB:
        raise ValueError(f"Expected --reserve-gib of 0 to {_MOST_GIB}, got {args.reserve_gib:.9g}")
    if args.weight_bits is not None and not 0 < args.weight_bits <= 32:
        raise ValueError(f"Expected --weight-bits above 0 and up to 32, got {args.weight_bits:g}")
    others = args.dp * args.pp
    tp = args.tp or max(args.gpus // others, 1)
    if tp * others != args.gpus:
        raise ValueError(
            f"Expected --tp x --dp x --pp = --gpus, got {tp} x {args.dp} x {args.pp} and "
            f"{args.gpus}"
        )
    return Question(
        model=config.load(args.model, args.weight_bits),
        layout=Layout(tp, args.dp, args.pp, args.dcp, args.expert_parallel),
        gpu=gpu,
        memory=memory_gib * GIB,
        utilization=args.gpu_memory_utilization,
        reserve=args.reserve_gib * GIB,
        rates=rates.load(gpu),
        kv_cache_dtype=args.kv_cache_dtype,
        context=args.context,
        batch=args.batch,
        drafts=args.speculative_tokens,
    )


def _size(text: str) -> int:
    return _within(1, text)


def _count(text: str) -> int:
    return _within(0, text)


def _within(least: int, text: str) -> int:
    value = int(text)
    if not least <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"expected {least} to {_MOST}, got {text}")
    return value


_size.__name__ = _count.__name__ = "integer"  # as argparse calls what is none
