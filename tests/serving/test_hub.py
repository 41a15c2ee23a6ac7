# SPDX-License-Identifier: Apache-2.0
"""Without a network a server says so at once, and looks for models in the Hub's cache alone."""

import os
import socket
import subprocess
import sys

import pytest
from mla_serving import hub

MLA = "org/name"


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed():
    """An address that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def test_an_endpoint_that_answers(listening):
    assert hub.unreachable(MLA, {"HF_ENDPOINT": listening}) is None


def test_an_endpoint_that_does_not(closed):
    said = hub.unreachable(MLA, {"HF_ENDPOINT": closed})
    assert said == f"{closed} cannot be reached (Connection refused)"
    assert hub.unreachable(None, {"HF_ENDPOINT": closed}) == said  # of a tokenizer that was named


@pytest.mark.parametrize(
    "model, environ",
    [
        (MLA, {"HF_HUB_OFFLINE": "0"}),
        (MLA, {"HF_HUB_OFFLINE": "1"}),
        (MLA, {"HF_HUB_OFFLINE": ""}),
        (MLA, {"TRANSFORMERS_OFFLINE": "1"}),
        (MLA, {"VLLM_USE_MODELSCOPE": "True"}),
        ("s3://bucket/model", {}),
    ],
)
def test_what_is_not_for_us_to_tell(model, environ, closed):
    assert hub.unreachable(model, {"HF_ENDPOINT": closed, **environ}) is None


@pytest.mark.parametrize("endpoint", ["hub.example", "ftp://127.0.0.1", "http://[", "http://a:b"])
def test_an_endpoint_that_is_none_is_the_hubs_to_refuse(endpoint):
    assert hub.unreachable(MLA, {"HF_ENDPOINT": endpoint}) is None


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_behind_a_proxy_a_connection_of_ours_says_nothing(variable, closed, monkeypatch):
    monkeypatch.setenv(variable, "http://proxy.example:3128")
    for no_proxy, refused in (("", False), ("127.0.0.1", True)):
        monkeypatch.setenv("no_proxy", no_proxy)
        assert bool(hub.unreachable(MLA, {"HF_ENDPOINT": closed})) is refused


def test_a_server_without_a_network_ends_at_once(closed, tmp_path):
    environ = {
        k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE" and k not in hub._OTHERS
    }
    environ |= {"HF_ENDPOINT": closed, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "mla_serving.cli", "serve", MLA]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"{closed} cannot be reached (Connection refused): models are looked for" in done.stdout
    assert f"{MLA} is not in the Hugging Face Hub's cache" in done.stderr


def test_a_plan_without_a_network_ends_at_once(closed, tmp_path):
    """The Hub's client would be tried for half a minute, with lines about every time."""
    environ = {
        k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE" and k not in hub._OTHERS
    }
    environ |= {"HF_ENDPOINT": closed, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "mla_serving.cli", "plan", "--model", MLA, "--gpus", "8"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    (said,) = done.stderr.splitlines()
    assert f"({closed} cannot be reached (Connection refused)). Give the path of a config" in said
