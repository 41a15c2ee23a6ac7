# SPDX-License-Identifier: Apache-2.0
"""Rows of a benchmark as they come, and the name of results that are not those of all its cases."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ending import need_rows

PARTIAL = "_partial"  # behind the names of results, so that a whole page is not replaced by a part
Case = TypeVar("Case")
Report = dict[str, Any]


def lacks(chosen: Iterable[Any], every: Iterable[Any]) -> bool:
    """Whether something of `every` is not among what was chosen, in any order."""
    return not set(every) <= set(chosen)


def take_away(folder: Path, stem: str) -> None:
    """What is there of `stem` under PARTIAL, once all of it is there."""
    for path in folder.glob(f"{stem}{PARTIAL}.*"):
        path.unlink()


def gather(
    stem: str,
    report: Report,
    cases: Sequence[Case],
    bench: Callable[[Case], list[dict[str, Any]]],
    write_report: Callable[[Report, Path, str], None],
    args: Namespace,
    *,
    some: bool,
) -> list[dict[str, Any]]:
    """The rows of `cases`, which go into `report`; some: not all that the benchmark has.

    `write_report(report, args.results, ending)` writes `stem` + ending .json and what belongs to
    it: after each case with PARTIAL and a note that says how many there are, so that a run that is
    cut off leaves what it has; at the end without, and what was PARTIAL goes, unless `some`.
    SystemExit where there is no row."""
    rows: list[dict[str, Any]] = []
    report["rows"] = rows
    for done, case in enumerate(cases, 1):
        rows += bench(case)
        if rows and done < len(cases):
            note = f"Not whole: {done} of {len(cases)} cases, then the run was cut off."
            write_report({**report, "note": note}, args.results, PARTIAL)
    need_rows(rows, args)
    write_report(report, args.results, PARTIAL if some else "")
    if not some:
        take_away(args.results, stem)
    return rows
