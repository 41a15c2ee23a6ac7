# SPDX-License-Identifier: Apache-2.0
"""The Preload Pipeline of the AMLA paper (section 4.1, appendix B): order, preload count, timeline.

`[Ci]` is a stage on the matrix units (Cube cores there, tensor cores here), `[Vi]` one on the
vector units. Plain Python: durations in any one unit, nothing here touches a GPU.
"""

from mla_kernels.pipeline.chain import Chain
from mla_kernels.pipeline.cycle import Cycle
from mla_kernels.pipeline.order import MAX_SEARCHED_PAIRS, fewest_preloads, plan_cycle
from mla_kernels.pipeline.render import timeline_png, timeline_text
from mla_kernels.pipeline.timeline import Event, Timeline, simulate

__all__ = [
    "MAX_SEARCHED_PAIRS",
    "Chain",
    "Cycle",
    "Event",
    "Timeline",
    "fewest_preloads",
    "plan_cycle",
    "simulate",
    "timeline_png",
    "timeline_text",
]
