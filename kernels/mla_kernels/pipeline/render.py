# SPDX-License-Identifier: Apache-2.0
"""A timeline as text and as a picture."""

from pathlib import Path

from mla_kernels import checks
from mla_kernels.pipeline.chain import UNITS
from mla_kernels.pipeline.timeline import Timeline


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """One line a unit, `width` columns for the whole time; "C1.0" is [C1] of block 0, "." idle.

    The third line marks the phases. A stage too short for its name shows as much as fits; one of
    duration 0 does not show. Raises ValueError unless width is in 20..10000.
    """
    checks.check_type("timeline", timeline, Timeline)
    checks.check_range("width", width, 20, 10_000)
    scale = width / timeline.end
    rows = [["."] * width for _ in UNITS]
    for event in timeline.events:
        left, right = round(event.start * scale), round(event.end * scale)
        name = f"|{timeline.cycle.chain.label(event.stage)}.{event.block}"
        rows[event.unit][left:right] = name[: right - left].ljust(right - left, "=")
    marks = [" "] * width
    for phase in ("preload", "steady", "drain"):
        starts = [e.start for e in timeline.events if e.phase == phase]
        if starts:
            left = round(min(starts) * scale)
            marks[left:] = " " * (width - left)  # one that begins with the phase before is that one
            marks[left : left + len(phase) + 1] = "^" + phase
    lines = [f"{unit:7}{''.join(row)}|" for unit, row in zip(UNITS, rows, strict=True)]
    return "\n".join([*lines, " " * 7 + "".join(marks)[:width].rstrip()])


def timeline_png(timeline: Timeline, path: Path) -> None:
    """The timeline drawn to `path`, a colour a block. Needs matplotlib (the extra `bench`)."""
    checks.check_type("timeline", timeline, Timeline)
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.6))
    axes = figure.subplots()
    colours = colormaps["tab10"]
    for event in timeline.events:
        if event.end == event.start:
            continue
        left, long = float(event.start), float(event.end - event.start)
        row = len(UNITS) - 1 - event.unit
        colour = colours(event.block % 10)
        axes.barh(row, long, left=left, height=0.8, color=colour, edgecolor="black", linewidth=0.6)
        if event.end - event.start > timeline.end / 60:
            name = f"{timeline.cycle.chain.label(event.stage)}\n{event.block}"
            axes.text(left + long / 2, row, name, ha="center", va="center", fontsize=7)
    steady = [e.start for e in timeline.events if e.phase == "steady"]
    drain = [e.start for e in timeline.events if e.phase == "drain"]
    for phase in (steady, drain):
        if phase:
            axes.axvline(float(min(phase)), color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(UNITS)), reversed(UNITS))
    axes.set_xlim(0, float(timeline.end))
    axes.set_xlabel("time (a colour a block; dashed: steady loop and drain begin)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
