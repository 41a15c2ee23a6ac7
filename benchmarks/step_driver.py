# SPDX-License-Identifier: Apache-2.0
"""Decode steps of several engines on one GPU: all hold their memory, and take turns."""

import contextlib
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cells import FEWEST_SAMPLES
from ending import NO_TIME
from serve_gate import ALONE, alone, drift

WORKER = Path(__file__).with_name("step_worker.py")
# A host has slow spells of a quarter of a second and more, in which any engine takes up to 1.6
# times as long: many short rounds, of which the lowest counts.
ROUNDS = 6
ANSWER_SECONDS = 900  # beside those that a command takes: an engine that compiles is built by then
Row = dict[str, Any]


class Engine:
    """A worker process, which imports vLLM and then waits; its log is in `log`."""

    def __init__(
        self,
        backend: str,
        options: Row,
        log: Path,
        worker: Path = WORKER,
        env: dict[str, str] | None = None,
        label: str | None = None,
    ) -> None:
        """backend: vLLM's name; label: that of the rows, if it is another."""
        self.backend = label or backend
        self.log = log
        spec = {"engine": {**options, "attention_backend": backend}}
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(worker), json.dumps(spec)],
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        assert self._process.stdin and self._process.stdout
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        self._patience: float = ANSWER_SECONDS

    def tell(self, do: str, **command: Any) -> None:
        """Send a command; `answer` waits for what comes of it."""
        self._patience = ANSWER_SECONDS + command.get("seconds", 0)
        with contextlib.suppress(BrokenPipeError):  # `answer` says that the process has ended
            print(json.dumps({"do": do, **command}), file=self._in, flush=True)

    def answer(self) -> Row:
        """The next line, {"error": ...} if the process ended instead, or hangs and is killed."""
        if not select.select([self._out], [], [], self._patience)[0]:
            self.kill()
            return {"error": f"the engine has given no answer in {self._patience:.0f} s"}
        line = self._out.readline()
        if line:
            row: Row = json.loads(line)
            return row
        said = self.log.read_text().splitlines()
        # A frame of C++ names c10::Error, not what happened.
        tail = [text for text in said if "Error" in text and "frame #" not in text][-1:]
        return {"error": "the engine has died: " + "".join(tail)[-300:]}

    def ask(self, do: str, **command: Any) -> Row:
        self.tell(do, **command)
        return self.answer()

    def kill(self) -> None:
        """At once: there is nothing to keep, and the GPU's memory is wanted."""
        self._process.kill()
        self._process.wait()


def all_ask(engines: list[Engine], do: str, **command: Any) -> list[Row]:
    """All engines do it at the same time."""
    for engine in engines:
        engine.tell(do, **command)
    return [engine.answer() for engine in engines]


def summary(rounds: list[list[float]], batch: int) -> Row:
    """Of the round with the lower median: what disturbs the host for a while is not the engine."""
    best = min(rounds, key=statistics.median)
    mean = statistics.fmean(best)
    found = {
        "steps": len(best),
        "step_ms": statistics.median(best),
        "rounds_ms": [statistics.median(times) for times in rounds],
        "mean_ms": mean,
        "out_tok_s": 1e3 * batch / mean,
    }
    if len(best) >= FEWEST_SAMPLES["p99"]:
        found["p99_ms"] = sorted(best)[int(0.99 * (len(best) - 1))]
    return found


def measure(
    engines: list[Engine],
    cases: list[tuple[int, int]],
    *,
    group: Row,
    nats: float,
    steps: int,
    seconds: float,
    deadline: float,
    save: Callable[[Row], None],
) -> None:
    """Every case on every engine: first all are timed, then all are profiled, as a profiler may
    leave something behind. `save` gets each row, also those that were not run, and those that were
    profiled, or for whose profile no time was left, again.

    group    what the rows of these engines have in common     seconds  bound one round of a case
    nats     by which an engine may differ from the first (serve_gate.py); else it is not timed
    deadline (monotonic) bounds the whole
    """
    if time.monotonic() > deadline:  # engines take minutes to build
        for batch, context in cases:
            for row in keyed(engines, group, batch, context).values():
                save(row | {"not_run": NO_TIME})
        return
    alive = []
    for engine, built in zip(engines, all_ask(engines, "build"), strict=True):
        if "error" in built:
            print(engine.log.read_text()[-4000:], file=sys.stderr)
            save({**group, "backend": engine.backend, **built})
        else:
            alive.append(engine)
    alive = agreeing(alive, group, nats, save)
    rows: dict[tuple[int, int, str], Row] = {}
    for batch, context in cases:
        of = keyed(alive, group, batch, context)
        if time.monotonic() > deadline:
            for row in of.values():
                save(row | {"not_run": NO_TIME})
            continue
        running = start(alive, batch, context, of)
        rounds: dict[str, list[list[float]]] = {engine.backend: [] for engine in running}
        for _ in range(ROUNDS):
            running.reverse()  # so that no engine always follows the same one
            for engine in running:
                said = engine.ask("time", steps=steps, seconds=seconds)
                if "error" in said:
                    of[engine.backend].update(said)
                else:
                    rounds[engine.backend].append(said["ms"])
        all_ask(running, "stop")
        for engine in alive:
            row = of[engine.backend]
            if "error" not in row:
                row.update(summary(rounds[engine.backend], batch))
                rows[batch, context, engine.backend] = row
            save(row)
    for batch, context in cases:
        timed = [engine for engine in alive if (batch, context, engine.backend) in rows]
        of = {engine.backend: rows[batch, context, engine.backend] for engine in timed}
        if time.monotonic() > deadline:
            for row in of.values():
                row["not_profiled"] = NO_TIME
                save(row)
            continue
        running = start(timed, batch, context, of)
        for engine in running:
            of[engine.backend].update(engine.ask("profile"))
        all_ask(running, "stop")
        for row in of.values():
            save(row)


def keyed(engines: list[Engine], group: Row, batch: int, context: int) -> dict[str, Row]:
    """The rows of one case before anything is known of it, by backend."""
    key = {**group, "batch": batch, "context": context}
    return {engine.backend: {**key, "backend": engine.backend} for engine in engines}


def agreeing(
    engines: list[Engine], group: Row, nats: float, save: Callable[[Row], None]
) -> list[Engine]:
    """Those that say what the first says; none, if engines of other vLLM backends were asked and
    only those of one agree (serve_gate.alone). Who of them is wrong is then not known."""
    said = all_ask(engines, "say")
    answers = [answer["answers"] for answer in said if "answers" in answer]
    first = next((one for one in answers if drift(one, one) == 0), [])  # NaN is no yardstick
    green = []
    for engine, answer in zip(engines, said, strict=True):
        row = {**group, "backend": engine.backend}
        apart = drift(first, answer["answers"]) if first and "answers" in answer else math.inf
        compared = math.isfinite(apart) and len(engines) > 1
        gate = {"nats_from_first": apart if compared else None}
        if apart <= nats:
            save(row | gate)
            green.append(engine)
            continue
        differs = f"differs from the first engine by {apart:.2g} nats"
        save(row | gate | {"red": True})
        save(row | {"error": answer.get("error", differs)})
    if not alone([engine.backend for engine in green], [engine.backend for engine in engines]):
        return green
    for engine in green:
        save({**group, "backend": engine.backend, "error": ALONE})
    return []


def start(engines: list[Engine], batch: int, context: int, rows: dict[str, Row]) -> list[Engine]:
    """Those that hold the requests now; the others' errors go to `rows`, by backend."""
    running = []
    said = all_ask(engines, "start", batch=batch, context=context)
    for engine, answer in zip(engines, said, strict=True):
        if "error" in answer:
            rows[engine.backend].update(answer)
            engine.ask("stop")
        else:
            running.append(engine)
    return running
