# SPDX-License-Identifier: Apache-2.0
"""Every vLLM name that the server uses: module paths move between 0.26 and 0.33, signatures not.

| name | 0.26 | 0.32 | 0.33 |
|---|---|---|---|
| build_app | entrypoints.openai.api_server | entrypoints.launchers.app | as 0.32 |
| init_app_state | entrypoints.openai.api_server | launchers.api_server.app_state | as 0.32 |
| build_async_engine_client | entrypoints.openai.api_server | launchers.api_server.entry | as 0.32 |
| make_arg_parser, validate | entrypoints.openai.cli_args | launchers.cli_args | common.cli_args |
| get_uvicorn_log_config | serve.utils.server_utils | launchers.utils.server_utils | as 0.32 |
| validate_api_server_args | openai.api_server | launchers.launcher | common.cli_args |
| SSLCertRefresher | serve.utils.ssl | launchers.utils.ssl | as 0.32 |

vLLM's launcher of several HTTP processes, `run_multi_api_server` in entrypoints.cli.serve, calls by
the same names in 0.26, 0.29, 0.32 and 0.33 what `run_api_servers` gives it; how it hands on the
addresses of engines, in between, differs.

`ask_workers` uses what is private to vLLM's engine client, `_call_utility_async` and `core_engines`
(seen alike in 0.26, 0.29 and 0.32); without them /mla/info knows of no worker.

Importing this module imports vLLM: seconds.
"""

import asyncio
import importlib
import importlib.metadata
import multiprocessing
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import vllm
from huggingface_hub import constants as hub
from huggingface_hub.errors import LocalEntryNotFoundError
from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector
from vllm import envs, logger
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs, set_process_title, set_ulimit
from vllm.v1.utils import shutdown

from mla_backend.attention import support

VLLM_VERSION = str(vllm.__version__)
_ENTRYPOINTS = "vllm.entrypoints"


def _first(name: str, *modules: str) -> Any:
    """`name` from the first of `modules` (below vllm.entrypoints) that has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(f"{_ENTRYPOINTS}.{module}"), name)
        except AttributeError:
            continue
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(_ENTRYPOINTS):
                raise  # the module is there; a dependency of it is not
    text = f"vLLM {VLLM_VERSION} has no {name} in any of {', '.join(modules)}"
    raise ImportError(text, name=_ENTRYPOINTS)


_CLI_ARGS = ("common.cli_args", "launchers.cli_args", "openai.cli_args")

build_app = _first("build_app", "launchers.app", "openai.api_server")
init_app_state = _first("init_app_state", "launchers.api_server.app_state", "openai.api_server")
build_async_engine_client = _first(
    "build_async_engine_client", "launchers.api_server.entry", "openai.api_server"
)
make_arg_parser = _first("make_arg_parser", *_CLI_ARGS)
validate_parsed_serve_args = _first("validate_parsed_serve_args", *_CLI_ARGS)
get_uvicorn_log_config = _first(
    "get_uvicorn_log_config", "launchers.utils.server_utils", "serve.utils.server_utils"
)
validate_api_server_args = _first(
    "validate_api_server_args", "common.cli_args", "launchers.launcher", "openai.api_server"
)
SSLCertRefresher = _first("SSLCertRefresher", "launchers.utils.ssl", "serve.utils.ssl")

__all__ = [
    "VLLM_VERSION",
    "FlexibleArgumentParser",
    "SSLCertRefresher",
    "api_keys",
    "ask_workers",
    "build_app",
    "build_async_engine_client",
    "count_engines",
    "end",
    "engine_gauges",
    "get_uvicorn_log_config",
    "has_command",
    "init_app_state",
    "is_cpu",
    "is_our_cpu",
    "keep_alive_seconds",
    "log_config_file",
    "make_arg_parser",
    "model_uses_mla",
    "name_process",
    "prepare",
    "run_api_servers",
    "validate_parsed_serve_args",
]


def has_command() -> bool:
    """Whether `vllm serve` starts: vLLM's own command asks for the version of a package vllm."""
    try:
        return bool(importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        return False


def is_cpu() -> bool:
    """Whether vLLM runs on its CPU platform (or ours, which is one)."""
    return bool(current_platform.is_cpu())


def is_our_cpu() -> bool:
    """Whether vLLM's platform is this project's, which alone selects our attention on a CPU."""
    from mla_backend.platform import MlaCpuPlatform

    return isinstance(current_platform, MlaCpuPlatform)


def model_uses_mla(args: Namespace) -> bool:
    """Whether vLLM will give this model MLA attention layers that the backend can be asked for.
    Reads the model's config; FileNotFoundError if that is not to be had."""
    try:
        config = AsyncEngineArgs.from_cli_args(args).create_model_config()
    except LocalEntryNotFoundError:
        named = (args.model, args.tokenizer, args.hf_config_path)
        absent = [name for name in named if name and not Path(name).exists()]
        if not absent or not hub.HF_HUB_OFFLINE:
            raise
        revision = f" at --revision {args.revision}" if args.revision else ""
        raise FileNotFoundError(
            f"{' or '.join(absent)}{revision} is not in the Hugging Face Hub's cache, and no path "
            "here; set HF_HUB_OFFLINE=0 to fetch it, or give a path"
        ) from None
    return support.is_mla_model(config)


def prepare(args: Namespace) -> None:
    """What `vllm serve` does between parsing and starting: logging, parser plugins, file limit.

    Raises KeyError for a tool or reasoning parser that nobody registered.
    """
    if hasattr(logger, "configure_logging_from_args"):  # 0.32+
        logger.configure_logging_from_args(args)
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    validate_api_server_args(args)
    set_ulimit()


def api_keys(args: Namespace) -> list[str]:
    """The keys that a client may send: --api-key, else VLLM_API_KEY, as in vLLM."""
    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def keep_alive_seconds() -> int:
    """How long an idle connection is kept."""
    return int(envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE)


def log_config_file(args: Namespace) -> str | None:
    """The user's own configuration of logs, if there is one."""
    config = getattr(args, "logging_config", None)  # 0.32+
    if config is not None:
        return config.pylogging_config_file  # type: ignore[no-any-return]
    return getattr(args, "log_config_file", None)


def engine_gauges(processes: int) -> dict[str, list[float]]:
    """vLLM's own gauges by name, one value per engine (several with data parallelism).

    Updated with every step of the engine; empty with --disable-log-stats. Of several HTTP
    `processes` an engine tells one of them: the latest of what any has heard.
    """
    names = (
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    )
    return {
        family.name: [sample.value for sample in family.samples]
        for family in _families(processes)
        if family.name in names
    }


def _families(processes: int) -> Iterable[Any]:
    """Of one process its own metrics, whatever is in PROMETHEUS_MULTIPROC_DIR. Of several what
    their files say of gauges: to read all files takes a second for 16 engines, in which nothing
    else is answered."""
    if processes == 1:
        return REGISTRY.collect()
    folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
    files = Path(folder).glob("gauge_mostrecent_*.db")
    return MultiProcessCollector.merge(map(str, files), accumulate=True)


def run_api_servers(
    args: Namespace,
    sock: socket.socket,
    target: Callable[..., None],
    supervise: Callable[[Any, list[BaseProcess], Any, Any], None],
) -> None:
    """vLLM's launcher of `args.api_server_count` HTTP processes: it starts engines and processes,
    has them supervised, and ends them.

    With a socket of ours, for which it would make one, and signals as they are. Its function is run
    with some of the names that it uses; vLLM's module stays as it is.

    Args:
        args: the settings.
        sock: bound; closed here once the processes have it.
        target: run in each process, called with the ids of the other processes that were started
            (of engines, and of their coordinator), the socket's address, the socket, `args` and
            which client of the engines this is (`client_config` of build_async_engine_client).
        supervise: called when all engines are loaded, with vLLM's configuration, the processes, the
            manager of the engines of this machine and the coordinator of data-parallel ones (None:
            there are none); the server ends when it returns.
    """
    module = importlib.import_module(f"{_ENTRYPOINTS}.cli.serve")
    configs = []

    def launch(vllm_config: Any, *more: Any, **named: Any) -> Any:
        configs.append(vllm_config)
        return module.launch_core_engines(vllm_config, *more, **named)

    def start(**named: Any) -> Any:
        others = [process.pid for process in multiprocessing.active_children()]
        started = module.APIServerProcessManager(target_server_fn=partial(target, others), **named)
        sock.close()  # or clients would be kept waiting after those processes have ended
        return started

    def wait(api_server_manager: Any, engine_manager: Any = None, coordinator: Any = None) -> None:
        supervise(configs[0], api_server_manager.processes, engine_manager, coordinator)

    ours = {
        "setup_server": lambda args, **_: (str(sock.getsockname()), sock),
        "launch_core_engines": launch,
        "APIServerProcessManager": start,
        "wait_for_completion_or_failure": wait,
        "signal": SimpleNamespace(signal=lambda *_: None, SIGTERM=None, SIGINT=None),
    }
    code = module.run_multi_api_server.__code__
    # One that it does not read would be replaced for nothing.
    if missing := ours.keys() - (vars(module).keys() & code.co_names):
        raise ImportError(f"vLLM {VLLM_VERSION} starts no HTTP processes by {sorted(missing)}")
    FunctionType(code, {**vars(module), **ours})(args)


def end(processes: Iterable[BaseProcess], seconds: float) -> None:
    """By SIGTERM, and what is left after that time by SIGKILL, with all that it started."""
    shutdown(list(processes), timeout=seconds)


def name_process(index: int) -> str:
    """Name this HTTP process in the list of processes and in vLLM's log. Returns what names it in
    other lines, "" where vLLM marks all that a process prints (0.26 and 0.29 do)."""
    set_process_title("APIServer", str(index))
    name = f"ApiServer_{index}"
    decorate_logs(name)
    marked = hasattr(sys.stdout, "_original_write")
    return "" if marked else f"{name} pid={os.getpid()}"


def count_engines(engine: Any) -> int:
    """Data-parallel engines that this server hands requests to."""
    return len(engine.engine_core.core_engines)


async def ask_workers(engine: Any, method: str) -> list[dict[str, Any]]:
    """What `method` of each worker says, with the number of its engine (data-parallel rank).

    vLLM's own collective_rpc asks all engines and returns the answers of the first alone.
    """
    core = engine.engine_core
    calls = [
        core._call_utility_async("collective_rpc", method, None, (), None, engine=identity)
        for identity in core.core_engines
    ]
    numbers = [int.from_bytes(identity, "little") for identity in core.core_engines]
    answers = zip(numbers, await asyncio.gather(*calls), strict=True)
    return [{"engine": number, **worker} for number, workers in answers for worker in workers]
