# SPDX-License-Identifier: Apache-2.0
"""One count of requests for several processes: exact, and open to nobody once it is closed."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time

import pytest
from mla_serving.server.shared_gate import SharedGate

LIMIT, PROCESSES, ROUNDS = 2, 4, 5000


def come_and_go(gate, barrier, answers):
    most = entered = refused = 0
    barrier.wait()
    for _ in range(ROUNDS):
        if gate.enter(limited=True):
            entered += 1
            most = max(most, gate.running)
            gate.leave()
        else:
            refused += 1
    answers.put((most, entered, refused))


def hold(gate, waiting):
    gate._lock.acquire()
    waiting.set()
    time.sleep(60)


@pytest.fixture
def spawn():
    context = multiprocessing.get_context("spawn")
    started = []

    def start(target, *args):
        started.append(context.Process(target=target, args=args))
        started[-1].start()
        return started[-1]

    yield context, start
    for process in started:
        process.kill()
        process.join()


def test_the_limit_is_that_of_all_processes(spawn):
    context, start = spawn
    gate, barrier, answers = SharedGate(LIMIT), context.Barrier(PROCESSES), context.Queue()
    for _ in range(PROCESSES):
        start(come_and_go, gate, barrier, answers)
    most, entered, refused = zip(*(answers.get(timeout=60) for _ in range(PROCESSES)), strict=True)
    assert max(most) <= LIMIT
    assert sum(entered) + sum(refused) == PROCESSES * ROUNDS
    assert gate.running == 0 and gate.refused == sum(refused)


def test_what_is_not_limited_counts_too():
    gate = SharedGate(1)
    assert gate.enter() and gate.enter()  # GET
    assert gate.running == 2
    assert not gate.enter(limited=True)
    gate.leave()
    assert not gate.enter(limited=True)
    gate.leave()
    assert gate.enter(limited=True)
    assert gate.refused == 2


def test_without_a_limit_all_are_taken():
    gate = SharedGate()
    assert all(gate.enter(limited=True) for _ in range(100))


def test_nobody_enters_a_gate_that_is_closed():
    gate = SharedGate()
    gate.draining = True
    assert gate.draining and not gate.enter() and not gate.enter(limited=True)
    assert (gate.running, gate.refused) == (0, 2)


def test_it_waits_for_requests_of_other_processes():
    """That is, for what changes without its event loop."""
    gate = SharedGate()
    gate.enter()
    assert not asyncio.run(gate.wait_idle(0.05))
    threading.Timer(0.2, gate.leave).start()
    assert asyncio.run(gate.wait_idle(20))


def test_a_process_that_died_as_it_counted_keeps_no_server_from_ending(spawn):
    context, start = spawn
    gate, waiting = SharedGate(), context.Event()
    process = start(hold, gate, waiting)
    assert waiting.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    gate.draining = True
    assert gate.draining and asyncio.run(gate.wait_idle(1))
