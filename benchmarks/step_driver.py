# SPDX-License-Identifier: Apache-2.0
"""Decode steps of several engines on one GPU: all start together, one runs at a time, in turns."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

WORKER = Path(__file__).with_name("step_worker.py")
STOP_SECONDS = 30
Row = dict[str, Any]


class Engine:
    """A step_worker process; its log is in `log`."""

    def __init__(self, backend: str, options: Row, log: Path) -> None:
        self.backend = backend
        self.log = log
        spec = {"backend": backend, "engine": {**options, "attention_backend": backend}}
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        assert self._process.stdin and self._process.stdout
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout

    def ask(self, case: Row) -> Row:
        try:
            print(json.dumps(case), file=self._in, flush=True)
        except BrokenPipeError:
            return {"error": f"the engine has died; see {self.log.name}"}
        return self.answer()

    def answer(self) -> Row:
        """The next line, {"error": ...} if the process ended instead."""
        line = self._out.readline()
        if line:
            row: Row = json.loads(line)
            return row
        tail = [text for text in self.log.read_text().splitlines() if "Error" in text][-1:]
        return {"error": "the engine has died: " + "".join(tail)[-300:]}

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(
    engines: list[Engine],
    cases: list[tuple[int, int]],
    *,
    heads: int,
    max_tokens: int,
    steps: int,
    seconds: float,
    deadline: float,
    save: Callable[[Row], None],
) -> None:
    """Every case on every engine; `save` gets each row as it comes, also those that were not run.

    max_tokens  of cache in an engine; seconds bound one measurement, deadline (monotonic) the whole
    """
    alive = []
    for engine in engines:
        ready = engine.answer()
        if "error" in ready:
            print(engine.log.read_text()[-4000:], file=sys.stderr)
            save({"heads": heads, "backend": engine.backend, **ready})
        else:
            alive.append(engine)
    for batch, context in cases:
        case = {"batch": batch, "context": context, "steps": steps, "seconds": seconds}
        for engine in alive:
            key = {"heads": heads, "batch": batch, "context": context, "backend": engine.backend}
            if batch * (context + 64) > max_tokens:
                save({**key, "not_run": "does not fit the cache of these engines"})
            elif time.monotonic() > deadline:
                save({**key, "not_run": "no time was left"})
            else:
                save({**key, **engine.ask(case)})
