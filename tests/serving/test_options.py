# SPDX-License-Identifier: Apache-2.0
"""The options of this server alone refuse values that would mean nothing."""

from pathlib import Path

import pytest


def _parse_all(given):
    from mla_serving.server import args
    from mla_serving.server.settings import read_settings

    return args.parse(read_settings(given, {}))


@pytest.fixture(scope="module")
def parser():
    from mla_serving.server.args import make_parser

    return make_parser()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--mla-max-body-mib", "0", "a number above 0, got 0"),
        ("--mla-max-body-mib", "-1", "a number above 0, got -1"),
        ("--mla-max-requests", "-1", "a whole number, 0 or more, got -1"),
        ("--mla-max-requests", "1.5", "a whole number, 0 or more, got 1.5"),
        ("--mla-drain-timeout", "-1", "seconds, 0 or more, got -1"),
        ("--drain-timeout", "inf", "seconds, 0 or more, got inf"),
        ("--mla-hang-timeout", "nan", "seconds, 0 or more, got nan"),
        ("--mla-hang-timeout", "soon", "seconds, 0 or more, got soon"),
        ("--mla-demo", "v9", "invalid choice: 'v9'"),
    ],
)
def test_refused(parser, option, value, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args([f"{option}={value}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert option in error
    assert said in error
    assert len(error.splitlines()) == 2  # one of them says how to ask for the options


def test_help_says_where_our_options_are(parser):
    (group,) = [g for g in parser._action_groups if g.title == "mla-backend"]
    assert len(group._group_actions) == 7
    assert f"--help={group.title} shows" in parser.description


def test_taken(parser):
    args = parser.parse_args(["--mla-max-requests", "3", "--mla-hang-timeout", "0"])
    assert (args.mla_max_requests, args.mla_hang_timeout, args.mla_max_body_mib) == (3, 0, 8)
    assert isinstance(args.mla_max_requests, int)


@pytest.mark.parametrize("option", ["mla-open-metrics", "mla-no-warmup"])
def test_a_flag_of_ours_can_be_taken_back(parser, option, tmp_path):
    from mla_serving.server.settings import read_settings

    (file := tmp_path / "options.yaml").write_text(f"{option}: true\n")
    name = option.replace("-", "_")
    variable = {f"MLA_SERVE_{name.upper()}": "1"}
    options = parser._option_string_actions
    for source, environ in (([], variable), (["--config", str(file)], {})):
        for words, expected in (([], True), ([f"--no-{option}"], False)):
            given = read_settings([*source, *words], environ).arguments(options)
            assert getattr(parser.parse_args(given), name) is expected
    assert getattr(parser.parse_args([]), name) is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([""], "the model's name is empty"),
        (["--model", ""], "the model's name is empty"),
        (["m", "--api-key", ""], "--api-key is empty"),
        (["m", "--api-key", "a", ""], "--api-key is empty"),
        (["m", "--served-model-name", ""], "--served-model-name is empty"),
        (["m", "--api-key", "a"], None),
        ([], None),
    ],
)
def test_empty_values(parser, given, said):
    from mla_serving.server.args import _parse, _refuse_empty

    args = _parse(parser, given)
    if said is None:
        return _refuse_empty(args)
    with pytest.raises(ValueError, match=said):
        _refuse_empty(args)


def test_what_is_given_empty_is_not_vllms_default(demo_checkpoint, monkeypatch):
    """vLLM would listen on every address, and compute with its own attention."""
    from mla_serving.server import args as server_args
    from mla_serving.server.settings import read_settings

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(server_args.toolchain, "compile_obstacle", lambda: None)
    given = [str(demo_checkpoint("v3")), "--attention-backend", ""]
    args = server_args.parse(read_settings(given, {"MLA_SERVE_HOST": ""}))
    assert args.host == "127.0.0.1"
    assert getattr(args.attention_backend, "name", args.attention_backend) == "CUSTOM"
    args = server_args.parse(read_settings([*given, "--host", "0.0.0.0"], {}))
    assert args.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ([], 30),
        (["--shutdown-timeout", "90"], 90),
        (["--shutdown-timeout", "-5"], 30),  # vLLM refuses it, by this name
        (["--mla-drain-timeout", "5"], 5),
    ],
)
def test_vllms_word_for_the_drain_counts_too(demo_checkpoint, monkeypatch, given, seconds):
    from mla_serving.server import args as server_args
    from mla_serving.server.settings import read_settings

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(server_args.toolchain, "compile_obstacle", lambda: None)
    model = str(demo_checkpoint("v3"))
    args = server_args.parse(read_settings([model, *given], {}))
    assert args.mla_drain_timeout == seconds
    assert args.shutdown_timeout == (-5 if "-5" in given else 0)  # an engine would wait again
    both = [model, "--shutdown-timeout", "90", "--mla-drain-timeout", "5"]
    assert server_args.parse(read_settings(both, {})).mla_drain_timeout == 5


@pytest.mark.parametrize("beside", [[], ["--kv-cache-memory-bytes", "1G"]])
def test_a_wrong_cache_size_of_a_cpu_is_named(demo_checkpoint, monkeypatch, beside):
    """vLLM reads the variable whatever the option says."""
    from mla_serving.server import args as server_args
    from mla_serving.server.settings import read_settings

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    monkeypatch.setattr(server_args.vllm_api, "is_cpu", lambda: True)
    given = read_settings([str(demo_checkpoint("v3")), *beside], {})
    with pytest.raises(ValueError, match=r"^VLLM_CPU_KVCACHE_SPACE='0\.5'"):
        server_args.parse(given)


def test_every_worker_of_a_cpu_has_its_share_of_the_cache(demo_checkpoint, monkeypatch):
    from mla_serving.server import args as server_args
    from mla_serving.server.settings import read_settings

    seen = []
    monkeypatch.setattr(server_args.environment, "set_cpu_kv_cache", lambda *x: seen.append(x[1:]))
    monkeypatch.setattr(server_args.toolchain, "compile_obstacle", lambda: None)
    given = [str(demo_checkpoint("v3")), "--tensor-parallel-size", "2"]
    for more in ([], ["--pipeline-parallel-size", "2"], ["--data-parallel-size", "3"]):
        server_args.parse(read_settings([*given, *more], {}))
    assert seen == [(2, 1), (4, 1), (2, 3)]


@pytest.mark.parametrize("key", ["schl\u00fcssel", "secret\r", " secret", "a\tb"])
def test_keys_that_no_client_can_send(parser, monkeypatch, key):
    from mla_serving.server.args import _parse, _refuse_odd_keys

    with pytest.raises(ValueError, match=r"^--api-key cannot be sent") as refused:
        _refuse_odd_keys(_parse(parser, ["m", "--api-key", "good", key]))
    assert key.strip() not in str(refused.value)
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ValueError, match=r"^VLLM_API_KEY cannot be sent"):
        _refuse_odd_keys(_parse(parser, ["m"]))
    _refuse_odd_keys(_parse(parser, ["m", "--api-key", "good one"]))


def test_a_path_that_is_not_there(tmp_path):
    from mla_serving.server.args import _refuse_missing_path

    for model in (None, "deepseek-ai/DeepSeek-V2-Lite", str(tmp_path)):
        _refuse_missing_path(model)
    with pytest.raises(ValueError, match="nowhere: no such file or directory"):
        _refuse_missing_path(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("option", ["--tokenizer", "--hf-config-path"])
def test_another_path_that_is_not_there(tmp_path, option):
    with pytest.raises(ValueError, match=f"^{option} .*nowhere: no such file or directory"):
        _parse_all([str(tmp_path), option, str(tmp_path / "nowhere")])


def test_a_model_that_is_not_in_the_cache(parser, monkeypatch, tmp_path):
    """The Hub's own words name neither the model nor the variable, which the server may have set:
    for a model that is here."""
    from mla_serving.server import vllm_api
    from mla_serving.server.args import _parse

    def absent(_):
        raise vllm_api.LocalEntryNotFoundError("no snapshot folder")

    monkeypatch.setattr(vllm_api.AsyncEngineArgs, "create_model_config", absent)
    monkeypatch.setattr(vllm_api.hub, "HF_HUB_OFFLINE", False)
    with pytest.raises(FileNotFoundError, match="no snapshot folder"):  # for another reason
        vllm_api.model_uses_mla(_parse(parser, ["a/b"]))
    monkeypatch.setattr(vllm_api.hub, "HF_HUB_OFFLINE", True)
    said = "is not in the Hugging Face Hub's cache, and no path here; set HF_HUB_OFFLINE=0 to fetch"
    for given, names in [
        (["a/b"], "a/b"),
        (["a/b", "--revision", "v2"], "a/b at --revision v2"),
        ([str(tmp_path), "--tokenizer", "c/d"], "c/d"),
        (["a/b", "--tokenizer", "c/d"], "a/b or c/d"),
    ]:
        with pytest.raises(FileNotFoundError, match=f"^{names} {said}"):
            vllm_api.model_uses_mla(_parse(parser, given))
    with pytest.raises(FileNotFoundError, match="no snapshot folder"):
        vllm_api.model_uses_mla(_parse(parser, [str(tmp_path)]))


def test_an_option_that_another_one_needs(demo_checkpoint, monkeypatch):
    from mla_serving.server import vllm_api

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    given = [str(demo_checkpoint("v3")), "--enable-auto-tool-choice"]
    with pytest.raises(ValueError, match=r"^--enable-auto-tool-choice requires --tool-call-parser"):
        _parse_all(given)

    def faulty(_):
        raise TypeError("not callable")

    monkeypatch.setattr(vllm_api, "validate_parsed_serve_args", faulty)
    with pytest.raises(TypeError, match="not callable"):
        _parse_all(given)


def test_a_model_behind_an_option_of_several_values(tmp_path):
    """argparse takes it for one more: a second key that is valid, of the demo model."""
    for name in (str(tmp_path), "deepseek-ai/DeepSeek-V2-Lite"):
        said = r"^the last value of --api-key looks like a model.* `mla-backend serve MODEL --api-k"
        with pytest.raises(ValueError, match=said) as refused:
            _parse_all(["--port", "1", "--api-key", "s3cret", name])
        assert "s3cret" not in str(refused.value) and name not in str(refused.value)
        with pytest.raises(ValueError, match=f"^the last value of --served-model-name, {name}, lo"):
            _parse_all(["--served-model-name", "x", name, "--port", "1"])


def test_values_that_are_no_model(parser, monkeypatch):
    from mla_serving.server.args import _parse, _refuse_model_among
    from mla_serving.server.settings import Settings

    for given in (
        ["--api-key", "a", "b" * 5000],
        ["--api-key", "a/b"],
        ["m", "--api-key", "a", "b/c"],
        ["--model", "m", "--served-model-name", "a", "b/c"],
        ["--mla-demo", "v3", "--served-model-name", "a", "b/c"],
        ["--api-key", "a", str(Path(__file__))],
    ):
        _refuse_model_among(_parse(parser, given), Settings({}, {}, tuple(given)))
    named = _parse(parser, ["--served-model-name", "a", "b/c"])
    behind = ("--served-model-name", "a", "b/c")
    _refuse_model_among(named, Settings({}, {}, ()))  # in a file, where nothing stands behind it
    for demo in ({"mla_demo": "v3"}, {}), ({}, {"mla-demo": "v3"}):
        _refuse_model_among(named, Settings(*demo, behind))
    _refuse_model_among(named, Settings({}, {}, ("--mla_demo=v3", *behind)))


@pytest.mark.parametrize("option", ["--h11-max-header-count", "--h11-max-incomplete-event-size"])
@pytest.mark.parametrize("value", ["0", "-5"])
def test_limits_within_which_no_request_fits(option, value):
    with pytest.raises(ValueError, match=f"^{option} must be 1 or more, got {value}$"):
        _parse_all([f"{option}={value}"])


@pytest.mark.parametrize(
    ("given", "expected"), [("/api", "/api"), ("/api/", "/api"), ("/a/b//", "/a/b"), ("/", "")]
)
def test_a_root_path_ends_without_a_slash(demo_checkpoint, monkeypatch, given, expected):
    """Routes behind one would not be found."""
    from mla_serving.server import args as server_args

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(server_args.toolchain, "compile_obstacle", lambda: None)
    args = _parse_all([str(demo_checkpoint("v3")), "--root-path", given])
    assert (args.root_path or "") == expected


@pytest.mark.parametrize("given", ["api", "/a b", "/a\t", "http://x/api"])
def test_a_root_path_that_is_none(given):
    with pytest.raises(ValueError, match=r"^--root-path '.*': expected a path such as /api"):
        _parse_all(["--root-path", given])


@pytest.mark.parametrize("named", ["CUSTOM", "custom", "MLA_BACKEND", None])
def test_a_cpu_that_would_not_compute_with_ours(parser, named, monkeypatch):
    from mla_serving.server import args as server_args

    from mla_backend.compat.versions import before

    if named == "MLA_BACKEND" and before((0, 32)):
        pytest.skip("this vLLM has no such name")
    given = server_args._parse(parser, ["m", *(["--attention-backend", named] if named else [])])
    monkeypatch.setattr(server_args.vllm_api, "model_uses_mla", lambda args: True)
    monkeypatch.setattr(server_args.vllm_api, "is_cpu", lambda: True)
    defaults = server_args._attention_defaults(given)
    assert ("CUSTOM" in defaults) is (named is None)
    assert defaults[-2:] == ["--block-size", "64"]
    monkeypatch.setattr(server_args.vllm_api, "is_our_cpu", lambda: False)
    with pytest.raises(ValueError, match=r"CPU platform is not in use.* Mend: unset MLA_"):
        server_args._attention_defaults(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--api-server-count=-1", "--api-server-count must be 1 or more, got -1"),
        ("--api-server-count=0", "--api-server-count 0 is not served here"),  # vLLM's --headless
        ("--api-server-count=1.5", None),
        ("--api-server-count=3 --enable-elastic-ep", "count 3 does not go with --enable-elastic"),
    ],
)
def test_numbers_of_http_processes_that_are_none(given, said, capsys):
    if said is None:
        with pytest.raises(SystemExit) as stopped:
            _parse_all(given.split())
        assert stopped.value.code == 2 and "--api-server-count" in capsys.readouterr().err
        return
    with pytest.raises(ValueError, match=said):
        _parse_all(given.split())


def test_numbers_of_http_processes(parser, monkeypatch, tmp_path):
    from mla_serving.server.args import _parse, _refuse_other_launchers, _refuse_processes

    def taken(*given):
        args = _parse(parser, ["m", *given])
        _refuse_other_launchers(args)
        _refuse_processes(args)

    for given in ([], ["--enable-elastic-ep"], ["--api-server-count", "3"], ["-asc", "1"]):
        taken(*given)
    for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_RESPONSES_API_STORE"):
        with monkeypatch.context() as set_for_now:
            set_for_now.setenv(name, "1")
            taken("--api-server-count", "1")
            with pytest.raises(ValueError, match=f"count 3 does not go with {name}"):
                taken("--api-server-count", "3")
    folder = tmp_path / "metrics"
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    for _ in range(2):  # without the folder, then with what another server left
        taken("--api-server-count", "1")
        with pytest.raises(ValueError, match=rf"{folder}: expected a folder without metrics"):
            taken("--api-server-count", "3")
        folder.mkdir(exist_ok=True)
        (folder / "counter_7.db").touch()
    (folder / "counter_7.db").rename(folder / "notes")
    taken("--api-server-count", "3")


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_advice_that_vllm_cpu_cannot_follow_says_so(parser, package, monkeypatch):
    from importlib import metadata

    from mla_serving.server.args import _parse, _refuse_other_launchers

    def version(name):
        if name != package:
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ValueError, match=r"use `vllm serve --headless --att") as refused:
        _refuse_other_launchers(_parse(parser, ["m", "--headless"]))
    assert ("vllm-cpu's does not start" in str(refused.value)) == (package == "vllm-cpu")


@pytest.mark.parametrize(
    "given", [["--attention-backend", "auto"], ["--attention-config.backend", "AUTO"]]
)
def test_auto_is_as_if_nothing_were_said(demo_checkpoint, monkeypatch, given):
    """To vLLM it is; the server computed with vLLM's own attention."""
    from mla_serving.server import args as server_args
    from mla_serving.server.settings import read_settings

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(server_args.toolchain, "compile_obstacle", lambda: None)
    args = server_args.parse(read_settings([str(demo_checkpoint("v3")), *given], {}))
    assert getattr(args.attention_backend, "name", args.attention_backend) == "CUSTOM"
    assert args.block_size == 64


def test_a_launcher_of_several_servers_is_refused(parser):
    from mla_serving.server.args import _parse, _refuse_other_launchers

    option = "--data-parallel-multi-port-external-lb"
    if option not in parser._option_string_actions:
        pytest.skip("this vLLM has no such option")
    with pytest.raises(ValueError, match=f"{option} is not served here; use `vllm serve {option}"):
        _refuse_other_launchers(_parse(parser, ["m", option]))


@pytest.mark.parametrize(
    ("sizes", "rank", "follower"),
    [
        ("--nnodes 2 -tp 8 -pp 2", 0, False),
        ("--nnodes 2 -tp 8 -pp 2", 1, True),
        ("--nnodes 2 -tp 8 -dp 2", 1, False),  # an engine each
        ("--nnodes 4 -tp 16 -dp 2", 2, False),
        ("--nnodes 4 -tp 16 -dp 2", 3, True),
    ],
)
def test_a_node_without_an_engine_of_its_own_is_refused(parser, sizes, rank, follower):
    from mla_serving.server.args import _parse, _refuse_follower

    args = _parse(parser, ["m", *sizes.split(), "--node-rank", str(rank)])
    if not follower:
        _refuse_follower(args)
        return
    said = f"computes for node {rank - 1}; start it with `vllm serve --headless --node-rank {rank}`"
    with pytest.raises(ValueError, match=said):
        _refuse_follower(args)
