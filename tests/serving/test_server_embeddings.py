# SPDX-License-Identifier: Apache-2.0
"""A real server that embeds prompts: `mla-backend serve MODEL --runner pooling`."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.server_process import ServerProcess

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(demo_checkpoint, tmp_path_factory):
    server = ServerProcess(
        str(demo_checkpoint("v3")),
        *("--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", "256M", "--runner", "pooling"),
        key="test-key",
        log=tmp_path_factory.mktemp("server") / "log",
    )
    with server:
        yield server


def test_embeddings_are_those_of_transformers(server, demo_checkpoint):
    prompts = [[3 + 37 * i % 2000 for i in range(n)] for n in (1, 65, 200)]
    with server.client() as client:
        body = {"model": "demo", "input": prompts}
        answer = client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        alone = client.post("/v1/embeddings", json=body | {"input": prompts[2]}).json()
        (worker,) = client.get("/mla/info").json()["attention"]["workers"]
        assert worker["backends"] == {"CUSTOM": 4} and worker["forward_mha_tokens"] > 0
        assert client.post("/v1/completions", json={"model": "demo", "prompt": "x"}).is_error
        assert client.get("/health").status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 1 + 65 + 200
    found = torch.tensor([item["embedding"] for item in answer.json()["data"]])
    loaded = AutoModelForCausalLM.from_pretrained(demo_checkpoint("v3"), dtype=torch.float32)
    for row, prompt in zip(found, prompts, strict=True):
        with torch.no_grad():
            state = loaded.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        assert (row - state / state.norm()).abs().max() < 1e-5
    assert found[2] == pytest.approx(alone["data"][0]["embedding"], abs=1e-5)
    assert "embeddings" in server.log.read_text()  # the request to try that it shows


def test_what_no_embedding_has_is_refused(server):
    with server.client() as client:
        long = client.post("/v1/embeddings", json={"model": "demo", "input": [5] * 600})
    assert long.status_code == 400 and "512" in long.text
