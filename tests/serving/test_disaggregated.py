# SPDX-License-Identifier: Apache-2.0
"""One server computes prompts, another one the answers: NIXL brings the KV cache over.

Needs NIXL, which no package of this project brings: pip install --no-deps nixl nixl-cu12.
"""

import json
from contextlib import ExitStack

import pytest

from benchmarks.ports import free_port
from tests.serving.server_process import ServerProcess

pytest.importorskip("nixl")
pytestmark = pytest.mark.engine

MODEL, KEY = "demo", "test-key"
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
# Else both bind their threads to the same cores.
ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
MEETINGS = 8
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

    with ExitStack() as stack:
        both = []
        for name in ("prefill", "decode"):  # both start, then both are awaited
            both.append(server(name))
            stack.callback(both[-1].stop)
        for one in both:
            one.wait_ready()
        prefill, decode = clients = [stack.enter_context(one.client()) for one in both]
        meet(prefill, decode)
        yield clients


def meet(prefill, decode):
    """Their first exchange of addresses fails if it takes 5 s, as it may on a busy machine."""
    for _ in range(MEETINGS):
        handed = ask(prefill, [20, 21, 22], 1, kv_transfer_params=PREFILL)["kv_transfer_params"]
        body = {**GREEDY, "prompt": [20, 21, 22], "max_tokens": 1, "kv_transfer_params": handed}
        if decode.post("/v1/completions", json=body).status_code == 200:
            return
    raise AssertionError("the servers did not meet")


def ask(client, tokens, new, **more):
    body = {**GREEDY, "prompt": tokens, "max_tokens": new, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def transfers(client):
    lines = client.get("/metrics").text.splitlines()
    counts = (line for line in lines if line.startswith("vllm:nixl_xfer_time_seconds_count"))
    return sum(float(line.split()[-1]) for line in counts)


@pytest.mark.parametrize("length", [5, 64, 65, 200, 700])
def test_the_other_server_goes_on_as_the_first_would(servers, length):
    """Prompts of a part of a block, a whole one, and several."""
    prefill, decode = servers
    prompt = [20 + (7 * i + i * i + length) % 200 for i in range(length)]
    handed = ask(prefill, prompt, 1, kv_transfer_params=PREFILL)["kv_transfer_params"]
    assert handed["remote_num_tokens"] == length
    before = transfers(decode)
    there = ask(decode, prompt, 16, kv_transfer_params=handed)["choices"][0]["logprobs"]
    assert transfers(decode) == before + 1  # and not computed anew
    here = ask(prefill, prompt, 16)["choices"][0]["logprobs"]
    assert there["tokens"] == here["tokens"]
    assert there["token_logprobs"] == pytest.approx(here["token_logprobs"], abs=2e-3)
