# SPDX-License-Identifier: Apache-2.0
"""The real server as a process of its own, as `mla-backend serve` starts it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from benchmarks.ports import free_port

START_SECONDS = 300
STOP_SECONDS = 60


class ServerProcess:
    """`mla-backend serve ARGS` on a free port; `log` collects what it prints, `given` is added to
    the environment."""

    def __init__(self, *args, key, log, given=()):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.key = key
        self.log = log
        command = [str(Path(sys.executable).with_name("mla-backend")), "serve", *args]
        command += ["--port", self.url.rpartition(":")[2], "--api-key", key]
        dropped = ("VLLM_", "MLA_", "HF_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | dict(given)
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"the server is not ready: {self.log.read_text()[-4000:]}")

    def __enter__(self):
        """Once it is ready."""
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *raised):
        self.stop()

    def client(self, **kwargs):
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, **kwargs)

    def wait_exit(self):
        return self.process.wait(STOP_SECONDS)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.wait_exit()
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, 9)
