# SPDX-License-Identifier: Apache-2.0
"""How a benchmark ends: with which code, and when it is told to, with everything it started."""

import signal
from argparse import Namespace
from types import FrameType
from typing import Any

CUT_OFF = "Not whole: the run was cut off."  # the note of results until they are all there
NO_TIME = "no time was left"  # of a row that was not run, and the only reason that is no fault


def exit_code(rows: list[dict[str, Any]]) -> int:
    """1 if a row has an error, is red, or was not run for another reason than NO_TIME; else 0."""
    return int(
        any(
            "error" in row or row.get("red", False) or row.get("not_run", NO_TIME) != NO_TIME
            for row in rows
        )
    )


def lacking(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that were not run, but for repetitions without time: of their cases another was."""
    run = [row for row in rows if "not_run" not in row and "error" not in row]

    def is_repetition(row: dict[str, Any]) -> bool:
        case = {k: v for k, v in row.items() if k != "not_run"}
        return row["not_run"] == NO_TIME and any(case.items() <= other.items() for other in run)

    return [row for row in rows if "not_run" in row and not is_repetition(row)]


def shortage(rows: list[dict[str, Any]]) -> str:
    """The note of results for some of whose rows no time was left; "" if there are none."""
    late = sum(row["not_run"] == NO_TIME for row in lacking(rows))
    return f"Not whole: {NO_TIME} for {late} rows." if late else ""


def need_rows(rows: list[dict[str, Any]], args: Namespace) -> None:
    """SystemExit where nothing was chosen to be measured: results that are there stay."""
    if not rows:
        given = {name: vars(args)[name].pattern for name in ("cases", "impls") if name in args}
        asked = [f"--{name} {pattern}" for name, pattern in given.items() if pattern]
        raise SystemExit(f"nothing matches {' and '.join(asked)}; expected regular expressions")


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP raise SystemExit, so that what was started is stopped on the way out. By
    default they end this process alone, and servers would go on without it. Not what is ignored, as
    SIGHUP is under nohup."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
