# SPDX-License-Identifier: Apache-2.0
"""One server computes prompts, another one the answers: NIXL brings the KV cache over.

Needs NIXL, which no package of this project brings: pip install --no-deps nixl nixl-cu12.
"""

import json

import pytest

from tests.serving.server_process import ServerProcess, free_port

pytest.importorskip("nixl")
pytestmark = pytest.mark.engine

MODEL, KEY = "demo", "test-key"
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
# Else both bind their threads to the same cores.
ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
GREEDY = {"model": MODEL, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module", params=["v3", "v3.2"])
def servers(request, demo_checkpoint, tmp_path_factory):
    """Clients of (prefill, decode)."""
    logs = tmp_path_factory.mktemp("servers")

    def server(name):
        return ServerProcess(
            str(demo_checkpoint(request.param)),
            *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "1024", "--kv-cache-memory-bytes", "256M"),
            *("--kv-transfer-config", json.dumps(CONNECTOR)),
            key=KEY,
            log=logs / name,
            given={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **ONE_CORE},
        )

    both = [server("prefill"), server("decode")]  # both start, then both are awaited
    with both[0] as prefill, both[1] as decode, prefill.client() as p, decode.client() as d:
        yield p, d


def ask(client, tokens, new, **more):
    body = {**GREEDY, "prompt": tokens, "max_tokens": new, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("length", [5, 64, 65, 200, 700])
def test_the_other_server_goes_on_as_the_first_would(servers, length):
    """Prompts of a part of a block, a whole one, and several."""
    prefill, decode = servers
    prompt = [20 + (7 * i + i * i + length) % 200 for i in range(length)]
    handed = ask(prefill, prompt, 1, kv_transfer_params=PREFILL)["kv_transfer_params"]
    assert handed["remote_num_tokens"] == length
    there = ask(decode, prompt, 16, kv_transfer_params=handed)["choices"][0]["logprobs"]
    here = ask(prefill, prompt, 16)["choices"][0]["logprobs"]
    assert there["tokens"] == here["tokens"]
    assert there["token_logprobs"] == pytest.approx(here["token_logprobs"], abs=2e-3)


def test_they_were_handed_over(servers):
    """And not computed anew."""
    lines = servers[1].get("/metrics").text.splitlines()
    (count,) = (line for line in lines if line.startswith("vllm:nixl_xfer_time_seconds_count"))
    assert float(count.split()[-1]) == 5
