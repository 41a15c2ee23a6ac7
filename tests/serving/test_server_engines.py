# SPDX-License-Identifier: Apache-2.0
"""A real server before two data-parallel engines: both answer, are watched and are told of."""

import os
import signal
import time

import pytest

from tests.serving.server_process import ServerProcess

pytestmark = pytest.mark.engine

HANG_SECONDS = 2


@pytest.fixture(scope="module")
def server(demo_checkpoint, tmp_path_factory):
    with ServerProcess(
        str(demo_checkpoint("v3")),
        *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", "64M"),
        *("--data-parallel-size", "2", "--mla-hang-timeout", str(HANG_SECONDS)),
        # vLLM has no experts for data parallelism on a CPU.
        *("--hf-overrides", '{"first_k_dense_replace": 99, "n_routed_experts": 0}'),
        *("--load-format", "dummy"),
        key="test-key",
        log=tmp_path_factory.mktemp("server") / "log",
    ) as server:
        yield server


def workers(client):
    return client.get("/mla/info").json()["attention"]["workers"]


def becomes(client, status):
    """Whether /health says `status` before long."""
    deadline = time.monotonic() + 10 * HANG_SECONDS
    while time.monotonic() < deadline:
        if client.get("/health").status_code == status:
            return True
        time.sleep(0.2)
    return False


def test_every_engine_is_told_of_and_computes(server):
    with server.client() as client:
        was = workers(client)
        assert all(worker["forward_mqa_calls"] for worker in was)  # the first answers
        body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
        for _ in range(4):
            assert client.post("/v1/completions", json=body).status_code == 200
        now = workers(client)
    assert [worker["engine"] for worker in now] == [0, 1]
    assert now[0]["pid"] != now[1]["pid"]
    for before, after in zip(was, now, strict=True):
        assert after["pid"] == before["pid"] and after["decode"]["impl"] == "torch"
        assert after["forward_mqa_calls"] > before["forward_mqa_calls"]


@pytest.mark.parametrize("engine", [0, 1])
def test_any_engine_that_hangs_fails_the_health_check(server, engine):
    with server.client() as client:
        pid = workers(client)[engine]["pid"]
        assert becomes(client, 200)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert becomes(client, 503)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert becomes(client, 200)
