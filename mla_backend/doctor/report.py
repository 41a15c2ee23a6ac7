# SPDX-License-Identifier: Apache-2.0
"""The result of a check, and how results are shown."""

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
_WIDTH = 100  # of a line of text


@dataclass(frozen=True)
class Result:
    """`fail`: something would break. `warn`: it works, but not as one might expect."""

    name: str
    status: Status
    found: str
    mend: str = ""


def as_json(results: list[Result]) -> str:
    """{"schema": 1, "ok": bool, "checks": [{"name", "status", "found", "mend"}]}"""
    ok = all(result.status != "fail" for result in results)
    checks = [asdict(result) for result in results]
    return json.dumps({"schema": 1, "ok": ok, "checks": checks}, indent=2)


def as_text(results: list[Result]) -> str:
    column = max(len(result.name) for result in results)
    lines = []
    for result in results:
        head = f"{result.status:<4}  {result.name:<{column}}  "
        lines += _wrap(result.found, head)
        if result.mend:
            lines += _wrap(f"mend: {result.mend}", " " * len(head))
    count = {s: sum(r.status == s for r in results) for s in ("ok", "warn", "fail")}
    lines.append("")
    lines.append(", ".join(f"{number} {status}" for status, number in count.items()))
    return "\n".join(lines)


def _wrap(text: str, head: str) -> list[str]:
    indent = " " * len(head)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
