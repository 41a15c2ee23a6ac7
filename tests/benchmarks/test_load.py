# SPDX-License-Identifier: Apache-2.0
"""What benchmarks read of a load, by vLLM's own generator on a stand-in for a server."""

import http.server
import json
import threading
import time

import pytest
from mla_serving.demo_model import demo_model_path

SLOW_SECONDS, SLO_MS = 2, 1500  # a collection of garbage takes half a second with vLLM loaded
TOKENS = 3


@pytest.fixture
def server():
    """(url, [bodies asked], {number of a request: what becomes of it, "fails", "slow", "short" or
    "breaks off"})."""
    asked, fates = [], {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/v1/completions":  # /tokenize, whose model the server does not know
                return self._begin(404)
            asked.append(body)
            fate = fates.get(len(asked))
            if fate == "fails":
                return self._begin(500)
            self._begin(200)
            time.sleep(SLOW_SECONDS * (fate == "slow"))
            tokens = TOKENS - (fate == "short")
            for _ in range(tokens):
                self._send({"choices": [{"text": "a"}]})
                if fate == "breaks off":
                    return self._send({"error": {"message": "the engine has died"}})
            self._send({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": tokens}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _begin(self, status):
            self.send_response(status)
            self.end_headers()

        def _send(self, piece):
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", asked, fates
        running.shutdown()
        thread.join()


@pytest.fixture
def load(server):
    """Runs a load of six requests on the server; returns its row."""
    from load import run_load

    sizes = {"requests": 6, "input_len": 8, "output_len": TOKENS}

    def run(**how):
        how = {"seed": 1, "concurrency": 1, **how}
        return run_load(server[0], demo_model_path("v3"), served_name="model", **sizes, **how)

    return run


def test_goodput_is_of_what_was_answered_in_time(server, load):
    server[2].update({2: "fails", 3: "slow", 5: "slow", 6: "fails"})
    row = load(slo=f"ttft:{SLO_MS}")
    assert (row["completed"], row["failed"]) == (4, 2)
    assert row["goodput_s"] == pytest.approx(row["request_s"] / 2)
    assert row["output_tok_s"] == pytest.approx(row["request_s"] * TOKENS)
    slow = 1e3 * SLOW_SECONDS
    assert row["ttft_p99"] >= row["ttft_p95"] >= 0.9 * slow > row["ttft_mean"] > row["tpot_p99"]
    assert "goodput_s" not in load()


@pytest.mark.parametrize(
    ("fate", "reason"),
    [("fails", "Internal Server Error"), ("short", "2 of 3 tokens"), ("breaks off", "")],
)
def test_an_answer_that_is_not_whole_has_failed(fate, reason, server, load):
    server[2].update({2: fate, 6: fate})
    row = load()
    assert (row["completed"], row["failed"]) == (4, 2)
    assert reason in row["reason"] != ""


def test_a_load_that_does_not_end_is_given_up(server, load):
    server[2].update(dict.fromkeys(range(1, 7), "slow"))
    begin = time.monotonic()
    row = load(seconds=3)
    assert time.monotonic() - begin < 2 * 3
    assert row == {"completed": 0, "failed": 6, "reason": "not over after 3 s"}


def test_every_server_gets_the_prompts_of_a_load_and_another_load_others(server, load):
    asked = server[1]
    for seed in (1, 1, 2):
        load(seed=seed)

    first, again, others = ([ask["prompt"] for ask in asked[i : i + 6]] for i in (0, 6, 12))
    assert first == again and not set(map(str, first)) & set(map(str, others))
    assert len(set(map(str, first))) == 6
    whole = {(ask["max_tokens"], ask["temperature"], ask["ignore_eos"]) for ask in asked}
    assert whole == {(TOKENS, 0, True)}
