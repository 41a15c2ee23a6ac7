# SPDX-License-Identifier: Apache-2.0
"""The results of benchmarks/serve.py: JSON, a page and a plot."""

from dataclasses import replace
from pathlib import Path

from outputs import write
from partial import PARTIAL
from serve_gate import withhold
from serve_pages import plot_serve, serve_lines
from serve_report import Report
from step_pages import plot_steps, steps_lines


def write_results(report: Report, folder: Path, ending: str = "") -> None:
    """`report.stem` + `ending` in `folder`: .json, .md and .png; those that are there stay if
    nothing came."""
    if not report.rows:
        return
    report.write_json(folder, ending)
    write_pages(report, folder / f"{report.stem}{ending}")


def write_so_far(report: Report, folder: Path) -> None:
    """The rows as they came and a page of those that a gate stands behind, both PARTIAL."""
    report.write_json(folder, PARTIAL)
    sound = replace(report, rows=withhold(report.rows))
    write(folder / f"{report.stem}{PARTIAL}.md", markdown(sound))


def write_pages(report: Report, place: Path) -> None:
    """`place` with .md and .png added to its name."""
    write(place.with_name(f"{place.name}.md"), markdown(report))
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    draw = plot_steps if report.mode == "steps" else plot_serve
    draw(report, place.with_name(f"{place.name}.png"))


def markdown(report: Report) -> str:
    """The page, with what was not measured at its end."""
    title = "Decode steps in the engine" if report.mode == "steps" else "Serving on a GPU"
    machine = ", ".join(f"{k} {v}" for k, v in report.machine.items())
    lines = [f"# {title}", "", f"{machine}.", "", f"`{report.command}`", ""]
    lines += [report.note, ""] if report.note else []
    lines += (steps_lines if report.mode == "steps" else serve_lines)(report)
    left_out = [row for row in report.rows if "error" in row or "not_run" in row]
    if left_out:
        lines += ["", "Not measured:", ""]
        for row in left_out:
            case = " ".join(f"{k} {v}" for k, v in row.items() if k not in ("error", "not_run"))
            lines.append(f"* {case}: {row.get('error') or row['not_run']}")
    return "\n".join(lines) + "\n"
