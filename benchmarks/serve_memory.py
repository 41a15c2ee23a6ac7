# SPDX-License-Identifier: Apache-2.0
"""Whether servers that run together can fit one GPU."""

import argparse
from typing import Any

from machine import nvidia_smi
from mla_serving.plan import checkpoint
from mla_serving.plan.model import from_config

# Context, CUDA graphs and working memory of a server: 1.9 to 12 were measured (results/).
OTHER_GIB = 1.9
_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


def what_does_not_fit(args: argparse.Namespace, overrides: dict[str, Any]) -> str:
    """Why servers with --together cannot fit the largest GPU here. "" if they may, or where that
    cannot be told, as with options that share weights out, or weights in fewer bits.

    overrides  of the model's config.json
    """
    sizes = [int(mib) for (mib,) in nvidia_smi("memory.total") if mib.isdigit()]
    if not (args.together and sizes and args.dtype in _BYTES) or args.server_options:
        return ""
    try:
        config, name = checkpoint.read(str(args.model))
        model = from_config(config | overrides, name)
    except ValueError:  # no model that the plan knows
        return ""
    if model.scheme:
        return ""
    weights = model.parameters * _BYTES[args.dtype] / 2**30
    servers, most = len(args.backends), max(sizes) / 1024
    need = servers * (weights + args.cache_gib + OTHER_GIB)
    if need < most:
        return ""
    return (
        f"{servers} servers together, each with {weights:.1f} GiB of weights, {args.cache_gib:g} "
        f"of cache and {OTHER_GIB} or more beside, take {need:.0f}, and the GPU has {most:.0f}: "
        "give fewer --backends or --layers, a smaller --cache-gib, or leave out --together"
    )
