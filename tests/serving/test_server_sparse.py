# SPDX-License-Identifier: Apache-2.0
"""A real server of the model with sparse attention that `make serve FAMILY=v3.2` serves."""

import pytest

from tests.serving.server_process import ServerProcess

pytestmark = pytest.mark.engine

LAYERS, TOPK = 4, 512


@pytest.fixture(scope="module")
def client(demo_checkpoint, tmp_path_factory):
    server = ServerProcess(
        str(demo_checkpoint("v3.2")),
        *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", "256M"),
        key="test-key",
        log=tmp_path_factory.mktemp("server") / "log",
    )
    with server, server.client() as client:
        yield client


def attention(client):
    (worker,) = client.get("/mla/info").json()["attention"]["workers"]
    return worker


def test_a_prompt_longer_than_the_indexer_chooses(client):
    prompt = [3 + 37 * i % 2000 for i in range(TOPK + 88)]
    body = {"model": "demo", "prompt": prompt, "max_tokens": 5, "ignore_eos": True}
    was = attention(client)
    answer = client.post("/v1/completions", json={**body, "temperature": 0})
    assert answer.status_code == 200, answer.text
    now = attention(client)
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 5)
    assert answer.json()["choices"][0]["text"]
    assert now["backends"] == {"CUSTOM": LAYERS}
    assert now["sparse"]["impl"] == "torch" and "cpu" in now["sparse"]["reason"]
    # Every layer chose for every token but the last one, which is not read again.
    for name in ("indexer_tokens", "forward_mqa_tokens"):
        assert now[name] - was[name] == LAYERS * (len(prompt) + 4), name
    # No prompt went past the sparse layers, but for a short one at start-up.
    assert now["forward_mha_calls"] == was["forward_mha_calls"]
