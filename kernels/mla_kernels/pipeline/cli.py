# SPDX-License-Identifier: Apache-2.0
"""`python -m mla_kernels.pipeline C1 V1 C2 V2 ...`: the cycle, its preload count, the timeline."""

import argparse
from pathlib import Path

from mla_kernels.pipeline.order import fewest_preloads, plan_cycle
from mla_kernels.pipeline.render import timeline_png, timeline_text
from mla_kernels.pipeline.timeline import simulate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mla_kernels.pipeline", description=__doc__)
    parser.add_argument(
        "durations",
        type=float,
        nargs="+",
        metavar="TIME",
        help="[C1] [V1] [C2] ... in any one unit; an odd count ends in [Vn] = 0",
    )
    parser.add_argument("--blocks", type=int, default=6, help="blocks that go through the chain")
    parser.add_argument(
        "--fewest",
        action="store_true",
        help="try every order for the smallest preload count, instead of the theorem's n",
    )
    parser.add_argument("--width", type=int, default=100, help="columns of the timeline")
    parser.add_argument("--png", type=Path, help="also draw it to this file (needs matplotlib)")
    args = parser.parse_args(argv)
    try:
        cycle = (fewest_preloads if args.fewest else plan_cycle)(args.durations)
        timeline = simulate(cycle, args.blocks)
        print(timeline.summary(), timeline_text(timeline, args.width), sep="\n\n")
        if args.png:
            timeline_png(timeline, args.png)
    except (ValueError, ImportError, OverflowError, OSError) as problem:
        parser.error(str(problem))
    return 0
