# SPDX-License-Identifier: Apache-2.0
"""`mla-backend plan`: memory, cache and the attention floor of a cluster, from a model's config.

`config` reads the model, `other_models` refuses what it would count wrongly, `model` counts its
weights, `quantization` says how they are stored, `layout` how vLLM spreads them over GPUs, `served`
refuses what the backend would, `cost` turns the rest into bytes, tokens and microseconds, `report`
shows them. No GPU and no weights are needed.
"""

import sys
from argparse import ArgumentParser, Namespace

from mla_serving.plan import options

__all__ = ["add_options", "main"]


def add_options(parser: ArgumentParser) -> None:
    """The options of `mla-backend plan`."""
    options.add(parser)


def main(args: Namespace) -> int:
    """Print the plan; 0 if the weights and the load asked for fit, 1 if not or if it failed."""
    try:
        from mla_serving.plan import cost, report  # with torch, for the kernels' layouts

        plan = cost.make(options.read(args))
    except (ImportError, OSError, ValueError) as error:
        print(f"mla-backend plan: {error}", file=sys.stderr)
        return 1
    print(report.as_json(plan) if args.json else report.as_text(plan))
    return 0 if plan.fits else 1
