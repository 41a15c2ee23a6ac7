# SPDX-License-Identifier: Apache-2.0
"""A server of a profile of configs/serve, with its sizes cut to the GPUs at hand.

A profile of two machines is two groups of processes on this one, each of which sees half of the
GPUs; they find each other over the loopback.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines import NO_MULTICAST

from benchmarks.ports import free_port

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
START_SECONDS = 300
ANSWER_SECONDS = 120
STOP_SECONDS = 10
# What a small model on shared GPUs needs; otherwise a profile is taken as it is.
SMALL = {
    "max-model-len": 4096,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 512,
    "gpu-memory-utilization": 0.05,
    "kv-cache-memory-bytes": 2**30,
}
LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
OURS = [sys.executable, "-m", "mla_serving.cli", "serve"]
HEADLESS = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def sizes(profile, gpus):
    """(options of every node, further ones of each node) of a profile on so many GPUs; as its file
    says how each node is started."""
    if profile == "gpu":
        return {}, [{}]
    if profile == "gpu-tp8":
        return {"tensor-parallel-size": gpus}, [{}]
    if profile == "gpu-dp8-ep":
        return {"data-parallel-size": gpus}, [{}]
    if profile == "multi-node":
        every = {"nnodes": 2, "master-addr": "127.0.0.1", "master-port": free_port()}
        every["tensor-parallel-size"] = gpus // 2
        return every, [{"node-rank": 0}, {"node-rank": 1}]
    if profile == "multi-node-dp-ep":
        every = {"data-parallel-address": "127.0.0.1", "data-parallel-rpc-port": free_port()}
        every |= {"data-parallel-size": gpus, "data-parallel-size-local": gpus // 2}
        return every, [{}, {"data-parallel-start-rank": gpus // 2}]
    raise ValueError(f"no way is known to start {profile} with {gpus} GPUs")


def workers(profile, gpus):
    """Ranks of a profile on so many GPUs; none if they are too few."""
    return 1 if profile == "gpu" else gpus // 2 * 2


class ProfileServer:
    """All nodes of `profile`, which serve `model` on the GPUs that `gpus` names."""

    def __init__(self, profile, model, gpus, folder):
        self.port, self.nodes = free_port(), []
        every, nodes = sizes(profile, len(gpus))
        folder.mkdir(parents=True, exist_ok=True)
        share = len(gpus) // len(nodes)
        self.logs = [folder / f"node{at}" for at in range(len(nodes))]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MLA_")}
        for at, own in enumerate(nodes):
            options = SMALL | every | own
            if not at:
                options |= {"host": "127.0.0.1", "port": self.port}
            command = [*(HEADLESS if at else OURS), str(model)]
            command += ["--config", str(CONFIGS / f"{profile}.yaml"), "--disable-custom-all-reduce"]
            command += [f"--{name}={value}" for name, value in options.items()]
            command += ["--headless"] * bool(at)
            seen = gpus[at * share : (at + 1) * share]
            env = environ | NO_MULTICAST | LOOPBACK | {"CUDA_VISIBLE_DEVICES": ",".join(seen)}
            with self.logs[at].open("w") as log:
                self.nodes.append(
                    subprocess.Popen(
                        command, env=env, stdout=log, stderr=log, cwd="/", start_new_session=True
                    )
                )

    def __enter__(self):
        """Once it is ready."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and all(node.poll() is None for node in self.nodes):
            with contextlib.suppress(OSError):
                self.get("/health")
                return self
            time.sleep(0.5)
        self.__exit__()
        ends = (log.read_text(errors="replace")[-3000:] for log in self.logs)
        raise AssertionError("\n---\n".join(["the server did not start", *ends]))

    def __exit__(self, *raised):
        for node in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(max(deadline - time.monotonic(), 0.1))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()

    def get(self, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            text = answer.read()
            return json.loads(text) if text else None

    def answer(self, model, requests):
        """Greedy answers to all requests at once, as `engine_run.py` has them."""

        def ask(request):
            body = {
                "model": model,
                "prompt": request["prompt"],
                "max_tokens": request["max_tokens"],
                "temperature": 0,
                "logprobs": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            choice = self.get("/v1/completions", body)["choices"][0]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            return {"prompt": request["prompt"], "tokens": tokens, "logprobs": logprobs}

        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(ask, requests))
