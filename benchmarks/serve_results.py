# SPDX-License-Identifier: Apache-2.0
"""The results of benchmarks/serve.py: JSON, a page and a plot."""

from dataclasses import replace
from pathlib import Path

from ending import lacking
from outputs import write
from partial import PARTIAL
from serve_gate import withhold
from serve_pages import plot_serve, serve_lines
from serve_report import Report, Row
from step_pages import plot_steps, steps_lines

ENGINE = ("backend", "heads", "layers")
CASE = ("shape", "loop", "concurrency", "rate", "batch", "context")


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
    picture = place.with_name(f"{place.name}.png")
    try:
        import matplotlib
    except ImportError:
        picture.unlink(missing_ok=True)  # of other rows
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    draw = plot_steps if report.mode == "steps" else plot_serve
    draw(report, picture)


def markdown(report: Report) -> str:
    """The page, with what was not measured at its end."""
    title = "Decode steps in the engine" if report.mode == "steps" else "Serving on a GPU"
    machine = ", ".join(f"{k} {v}" for k, v in report.machine.items())
    lines = [f"# {title}", "", f"{machine}.", "", f"`{report.command}`", ""]
    lines += [report.note, ""] if report.note else []
    lines += (steps_lines if report.mode == "steps" else serve_lines)(report)
    if missing := left_out(report.rows):
        lines += ["", "Not measured:", "", *missing]
    return "\n".join(lines) + "\n"


def left_out(rows: list[Row]) -> list[str]:
    """What was not measured, or not to its end, and why: one line for all cases of an engine that
    have the same reason, as an engine that has failed fails in each that follows. Not repetitions
    that were left out."""
    cases: dict[tuple[str, str], list[str]] = {}
    lack = {id(row) for row in lacking(rows)}
    for row in rows:
        if reason := row.get("error") or (id(row) in lack and row["not_run"]):
            engine = " ".join(f"{key} {row[key]}" for key in ENGINE if key in row)
            case = " ".join(f"{key} {row[key]}" for key in CASE if key in row)
            cases.setdefault((engine, reason.strip().splitlines()[0]), []).append(case)
    lines = []
    for (engine, reason), found in cases.items():
        named = "; ".join(filter(None, dict.fromkeys(found)))
        lines.append(f"* {engine}{f' ({named})' if named else ''}: {reason}")
    return lines
