# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: ours, and vLLM as it is without this project's plugins."""

import contextlib
import http.client
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import TracebackType

import psutil
from ports import free_port
from serve_cases import engine_of

from mla_backend import refusals

TELLING_SERVER = Path(__file__).with_name("telling_server.py")
START_SECONDS = 600
HEALTH_SECONDS = 10
STOP_SECONDS = 60
TREE_SECONDS = 10  # of the engine's processes, after the server's own
BACKENDS = ("ours", "stock")  # on a CPU; any other name is one of vLLM's --attention-backend
QUIET = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
# What vLLM's server says of an engine that did not start, whose reason stands far above.
NO_REASON = "See root cause above"
# What a line has that names a cause, unlike code that raises it. The second is how pydantic goes
# on below "ValidationError: 1 validation error for ModelConfig".
NAMING = re.compile(r"\w(Error|Exception)(: |$)|  Value error, |mla-backend serve: ")
# What vLLM logs of kernels: that it watches (not where it warms none up), and, with
# --jit-monitor-verbose each time, what it sees.
WATCHES = "JIT monitor activated"
LATE = re.compile(r"JIT compilation during inference: (\S+?)(?: \(|\. )")
# No plugin of any kind, so that vLLM chooses its own best attention for this CPU.
STOCK = {"VLLM_PLUGINS": "", "MLA_BACKEND_CPU_PLATFORM": "0"}


class StartError(RuntimeError):
    """A server has ended, or is not ready in time."""


class Server:
    """One server process on a free port of 127.0.0.1, its output in `log`.

    The same model, options and environment for all backends; `ours` is `mla-backend serve`,
    `stock` vLLM's own API server without plugins, any other vLLM's with that attention backend.
    """

    def __init__(self, backend: str, model: Path, options: list[str], log: Path) -> None:
        self.backend = backend
        self.port = free_port()
        if backend == "ours":
            entry = [sys.executable, "-m", "mla_serving.cli", "serve"]
        elif backend not in BACKENDS:
            entry = [sys.executable, str(TELLING_SERVER)]
        else:
            entry = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        env = STOCK if backend == "stock" else {}
        if backend not in BACKENDS:
            name, env = engine_of(backend)
            options = [*options, "--attention-backend", name]
        options = [*options, "--host", "127.0.0.1", "--port", str(self.port)]
        self.log, self._failure = log, log.with_suffix(".failure")
        self._tree: set[psutil.Process] = set()
        self.started = time.monotonic()
        self._failure.unlink(missing_ok=True)  # of an earlier run
        _reach_without_proxy()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [*entry, "--model", str(model), *options],
                env={**_shared(), **QUIET, **refusals.listening(self._failure), **env},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> set[int]:
        """Of the server and of the processes that it started."""
        return {self.pid, *(process.pid for process in self._children())}

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Server":
        return self

    def wait_ready(self) -> float:
        """Seconds from its start until it was ready. StartError if it does not get there."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_SECONDS):
                    seconds = time.monotonic() - self.started
                    self._tree.update(self._children())  # who outlives a server that crashes
                    return seconds
            except (OSError, http.client.HTTPException):  # not there yet, or not well
                time.sleep(0.5)
        print(self.log.read_text()[-4000:], file=sys.stderr)  # its folder may go with this process
        reason = f"it was not ready after {START_SECONDS} s"
        if self._process.poll() is not None:
            reason = self.failure()
        raise StartError(f"{self.backend} did not start: {reason}")

    def failure(self) -> str:
        """The first failure of its engines, as `mla-backend serve` says it, or else what the last
        line of its log says that names one."""
        if self._failure.exists():
            return self._failure.read_text()
        named = [
            line
            for line in self.log.read_text().splitlines()
            if NAMING.search(line) and NO_REASON not in line
        ]
        return named[-1].strip().partition(" [type=")[0] if named else "it did not say why"

    def attention(self) -> str:
        """The attention class that vLLM says it chose."""
        for line in self.log.read_text().splitlines():
            if "Using " in line and "MLA" in line and "prefill" not in line and "backend" in line:
                return line.partition("Using ")[2].split()[0].rstrip(".")
        return "CUSTOM" if self.backend == "ours" else "unknown"

    def compiled_late(self) -> Counter[str] | None:
        """How often it has made a kernel ready since it started, by the kernel's name: compiled it,
        or read from disk what another server had compiled. None if vLLM does not watch."""
        log = self.log.read_text(errors="replace")
        return Counter(LATE.findall(log)) if WATCHES in log else None

    def terminate(self) -> None:
        """Ask it to end, without waiting."""
        self._tree.update(self._children())
        self._process.terminate()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing of it is left: what does not end when it is asked to is killed."""
        try:
            self.terminate()
            self._process.wait(STOP_SECONDS)
            psutil.wait_procs(self._tree, TREE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in self._tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.kill()
            self._process.wait()


def _shared() -> dict[str, str]:
    """The environment, without what would be an option of ours alone, or a key that no request
    has."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MLA_SERVE_") and name != "VLLM_API_KEY"
    }


def _reach_without_proxy() -> None:
    """Whatever proxy is set, this process and vLLM's load generator ask 127.0.0.1 itself."""
    names = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY", ""), "127.0.0.1"]
    os.environ["no_proxy"] = ",".join(filter(None, names))
