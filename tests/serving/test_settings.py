# SPDX-License-Identifier: Apache-2.0
"""Settings: which source wins, what is set when nobody says anything. One test imports vLLM."""

import argparse
import json
import subprocess
import sys

import pytest
from mla_serving.server import environment
from mla_serving.server.settings import read_settings

GIB = environment.GIB


def options():
    """Option strings and their actions, as vLLM's parser has them."""
    parser = argparse.ArgumentParser()
    for name in ("--port", "--model", "--max-model-len", "--compilation-config"):
        parser.add_argument(name)
    parser.add_argument("--api-key", nargs="*")
    parser.add_argument("--lora-modules", nargs="+")
    parser.add_argument("--allowed-origins", type=json.loads)
    parser.add_argument("--middleware", action="append")
    parser.add_argument("--enforce-eager", "--enable-log-requests", action="store_true")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    return parser._option_string_actions


OPTIONS = options()


def write(tmp_path, text):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_over_environment_over_file(tmp_path):
    path = write(tmp_path, "port: 1\nmax-model-len: 1\nenforce-eager: true\n")
    environ = {"MLA_SERVE_PORT": "2", "MLA_SERVE_MAX_MODEL_LEN": "2", "OTHER": "x"}
    settings = read_settings(["--port", "3", "--config", path], environ)
    assert settings.arguments(OPTIONS) == [
        "--port", "1", "--max-model-len", "1", "--enforce-eager",
        "--port", "2", "--max-model-len", "2",
        "--port", "3",
    ]  # argparse takes the last  # fmt: skip


def test_the_kinds_of_values(tmp_path):
    path = write(
        tmp_path,
        "api-key: [a, b]\nenable-prefix-caching: false\nenable-log-requests: false\n"
        "compilation-config: {mode: 0}\n",
    )
    assert read_settings(["--config=" + path], {}).arguments(OPTIONS) == [
        "--api-key", "a", "b", "--no-enable-prefix-caching", "--compilation-config", '{"mode": 0}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("allowed-origins", '["https://a"]', ["--allowed-origins", '["https://a"]']),
        ("allowed-origins", "[]", ["--allowed-origins", "[]"]),
        ("middleware", "[a.A, b.B]", ["--middleware", "a.A", "--middleware", "b.B"]),
        ("lora-modules", "[{name: a}, b=c]", ["--lora-modules", '{"name": "a"}', "b=c"]),
        ("port", "[1, 2]", ["--port", "[1, 2]"]),  # refused, and 2 is not taken for the model
    ],
)
def test_lists_by_what_their_option_takes(tmp_path, key, value, expected):
    path = write(tmp_path, f"{key}: {value}\n")
    assert read_settings(["--config", path], {}).arguments(OPTIONS) == expected
    name = "MLA_SERVE_" + key.upper().replace("-", "_")
    assert read_settings([], {name: value}).arguments(OPTIONS) == expected


def test_the_positional_model_stays_first(tmp_path):
    path = write(tmp_path, "api-key: [a, b]\n")
    settings = read_settings(["some/model", "--config", path], {})
    assert settings.arguments(OPTIONS)[0] == "some/model"


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, "from-file"),
        ([], {"MLA_SERVE_MODEL": "from-env"}, "from-env"),
        (["--model", "m"], {"MLA_SERVE_MODEL": "from-env"}, "m"),
        (["--port", "1", "--model=m"], {}, "m"),
        (["m", "--port", "1"], {}, "m"),
    ],
)
def test_which_model(tmp_path, argv, environ, expected):
    path = write(tmp_path, "model: from-file\n")
    assert read_settings([*argv, "--config", path], environ).model() == expected


def test_a_kubernetes_service_is_no_option():
    """A Service called mla-serve; its _PORT is an option's name, with another value."""
    url = "tcp://10.0.171.239:8000"
    environ = {
        "MLA_SERVE_SERVICE_HOST": "10.0.171.239",
        "MLA_SERVE_SERVICE_PORT_HTTP": "8000",
        "MLA_SERVE_PORT": url,
        "MLA_SERVE_PORT_8000_TCP": url,
        "MLA_SERVE_PORT_8000_TCP_ADDR": "10.0.171.239",
    }
    assert read_settings([], environ).arguments(OPTIONS) == []
    environ["MLA_SERVE_PORT"] = "8001"
    assert read_settings([], environ).arguments(OPTIONS) == ["--port", "8001"]


def test_config_named_by_the_environment(tmp_path):
    environ = {"MLA_SERVE_CONFIG": write(tmp_path, "port: 7\n")}
    assert read_settings([], environ).arguments(OPTIONS) == ["--port", "7"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ENFORCE_EAGER", "1", ["--enforce-eager"]),
        ("ENFORCE_EAGER", "True", ["--enforce-eager"]),
        ("ENFORCE_EAGER", "0", []),
        ("ENABLE_PREFIX_CACHING", "off", ["--no-enable-prefix-caching"]),
        ("API_KEY", "[a, b]", ["--api-key", "a", "b"]),
        ("COMPILATION_CONFIG", "{mode: 0}", ["--compilation-config", '{"mode": 0}']),
        ("COMPILATION_CONFIG", '{"a": 1e-6}', ["--compilation-config", '{"a": 1e-06}']),
        ("COMPILATION_CONFIG", '{\n\t"a": 1}', ["--compilation-config", '{"a": 1}']),
        ("COMPILATION_CONFIG", "{a: 2026-11-27}", ["--compilation-config", '{"a": "2026-11-27"}']),
        *(("API_KEY", key, ["--api-key", key]) for key in ("010", "1_0", "no", "*x", "a #b", "")),
    ],
)
def test_the_kinds_of_variables(name, text, expected):
    settings = read_settings([], {f"MLA_SERVE_{name}": text})
    assert settings.arguments(OPTIONS) == expected


@pytest.mark.parametrize("key", ["-x_y=z", "--port", "[-x]"])
def test_a_key_may_begin_with_a_dash(key, tmp_path):
    """As those of secrets.token_urlsafe do at times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key", nargs="*")
    path = write(tmp_path, f"api-key: {json.dumps(key)}\n")
    for settings, expected in (
        (read_settings([], {"MLA_SERVE_API_KEY": key}), key.strip("[]")),
        (read_settings(["--config", path], {}), key),
    ):
        args = parser.parse_args(settings.arguments(parser._option_string_actions))
        assert args.api_key == [expected]


@pytest.mark.parametrize("keys", ["[-s3cret, a]", "[a, -s3cret]", '["--s3cret", "a"]'])
def test_keys_of_several_may_not_begin_with_a_dash(keys, tmp_path):
    """argparse would take them for options, and repeat them."""
    path = write(tmp_path, f"api-key: {keys}\n")
    for name, settings in (
        ("MLA_SERVE_API_KEY", read_settings([], {"MLA_SERVE_API_KEY": keys})),
        ("api-key", read_settings(["--config", path], {})),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected several values") as refused:
            settings.arguments(OPTIONS)
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("date", ["2026-11-27", "2026-02-30", "2026-11-27T10:00:00Z"])
def test_a_date_is_text(date, tmp_path):
    mapping = f"{{of: {date}, {date}: 1}}"
    settings = read_settings(
        ["--config", write(tmp_path, f"model: {date}\ncompilation-config: {mapping}\n")], {}
    )
    assert settings.is_local() is False  # no directory of that name
    assert settings.arguments(OPTIONS) == [
        "--model", date, "--compilation-config", json.dumps({"of": date, date: 1}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        *("0123", "0x1F", "0b11", "12:30:00", "1_000", "+49", "00"),
        *("1_0.5", "12:30:00.5", "+1.50", "007.5"),
    ],
)
def test_what_only_yaml_takes_for_a_number_is_text(text, tmp_path):
    """It may be a key."""
    path = write(tmp_path, f"api-key: {text}\ncompilation-config: {{a: {text}}}\n")
    assert read_settings(["--config", path], {}).arguments(OPTIONS) == [
        "--api-key", text, "--compilation-config", json.dumps({"a": text}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("10", 10),
        ("-7", -7),
        ("0.5", 0.5),
        ("-1.25", -1.25),
        (".5", 0.5),
        ("1.e-6", 1e-6),
    ],
)
def test_a_number_is_one(text, value, tmp_path):
    path = write(tmp_path, f"compilation-config: {{a: {text}}}\n")
    expected = ["--compilation-config", json.dumps({"a": value})]
    assert read_settings(["--config", path], {}).arguments(OPTIONS) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("api-key", "model") for value in ("", "null", "~")),
        *(("api-key", value) for value in ("[]", "[null]", "[a, null]")),
        ("middleware", "[null]"),
    ],
)
def test_nothing_is_no_key_and_no_name(key, value, tmp_path):
    """Else an open server, or the name None."""
    path = write(tmp_path, f"{key}: {value}\n")
    with pytest.raises(ValueError, match=f"^{key}: it is empty; leave it out$"):
        read_settings(["--config", path], {}).arguments(OPTIONS)
    if value.startswith("["):
        name = "MLA_SERVE_" + key.upper().replace("-", "_")
        with pytest.raises(ValueError, match=f"^{name}: it is empty; leave it out$"):
            read_settings([], {name: value}).arguments(OPTIONS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("port", "compilation-config") for value in ("", "null", "~")),
        *((key, value) for key in ("lora-modules", "middleware") for value in ("", "null", "[]")),
    ],
)
def test_an_empty_value_of_others_is_none(key, value, tmp_path):
    path = write(tmp_path, f"{key}: {value}\nmodel: m\n")
    assert read_settings(["--config", path], {}).arguments(OPTIONS) == ["--model", "m"]
    if value == "[]":  # of a variable it would say no, and the file's stand
        with pytest.raises(ValueError, match=r"^MLA_SERVE_\w+: it is empty; leave it out$"):
            name = "MLA_SERVE_" + key.upper().replace("-", "_")
            read_settings([], {name: "[]"}).arguments(OPTIONS)


@pytest.mark.parametrize("text", ["1.50", ".5", "1.10", ".inf"])
def test_a_number_that_may_be_a_key_is_as_it_was_written(text, tmp_path):
    path = write(tmp_path, f"api-key: [{text}, a]\nmodel: {text}\n")
    expected = ["--api-key", text, "a", "--model", text]
    assert read_settings(["--config", path], {}).arguments(OPTIONS) == expected
    for keys in (f"[{text}]", f'["a", {text}]'):
        _, *found = read_settings([], {"MLA_SERVE_API_KEY": keys}).arguments(OPTIONS)
        assert found[-1] == text


@pytest.mark.parametrize("value", ["!!float s3cret", "!!bool s3cret"])
def test_a_value_that_is_not_what_its_tag_says_names_its_source(value, tmp_path):
    path = write(tmp_path, f"api-key: {value}\n")
    with pytest.raises(ValueError, match=f"^{path}: "):
        read_settings(["--config", path], {}).arguments(OPTIONS)
    with pytest.raises(ValueError, match=r"^MLA_SERVE_API_KEY: no YAML") as error:
        read_settings([], {"MLA_SERVE_API_KEY": f"[{value}]"}).arguments(OPTIONS)
    assert "s3cret" not in str(error.value)


def test_a_word_of_a_list_that_yaml_takes_for_true_or_false(tmp_path):
    path = write(tmp_path, "api-key: [on, a]\n")
    with pytest.raises(ValueError, match=r"^api-key: YAML takes a value for true or false"):
        read_settings(["--config", path], {}).arguments(OPTIONS)


def test_a_value_of_the_wrong_kind_is_named(tmp_path):
    for text in ("maybe", "2", ""):  # would be taken for the positional model
        with pytest.raises(
            ValueError, match="MLA_SERVE_ENFORCE_EAGER: expected true or false, got"
        ):
            read_settings([], {"MLA_SERVE_ENFORCE_EAGER": text}).arguments(OPTIONS)
    path = write(tmp_path, "enforce-eager: 1\n")
    with pytest.raises(ValueError, match="enforce-eager: expected true or false, got 1"):
        read_settings(["--config", path], {}).arguments(OPTIONS)
    path = write(tmp_path, "api-key: no\n")
    with pytest.raises(ValueError, match="api-key: expected a value, got False"):
        read_settings(["--config", path], {}).arguments(OPTIONS)


def test_a_model_that_yaml_takes_for_a_number(tmp_path):
    assert read_settings([], {"MLA_SERVE_MODEL": "007"}).model() == "007"
    assert read_settings(["--config", write(tmp_path, "model: 7\n")], {}).model() == "7"


def test_bad_yaml_names_its_source(tmp_path):
    path = write(tmp_path, "port: [1\n")
    with pytest.raises(ValueError, match=f"{path}: while parsing"):
        read_settings(["--config", path], {})
    for key in ("[s3cret", "{s3cret-Key,42", "[s3cret\t: 1"):  # a key is not repeated
        with pytest.raises(ValueError, match=r"^MLA_SERVE_API_KEY: (expected|found)") as error:
            read_settings([], {"MLA_SERVE_API_KEY": key}).arguments(OPTIONS)
        assert "s3cret" not in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"port: 1 # \xff\n")
    with pytest.raises(ValueError, match=f"^{path}: not UTF-8"):
        read_settings(["--config", str(path)], {})


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--config", ""], {}),
        (["--config="], {"MLA_SERVE_CONFIG": "x.yaml"}),
        ([], {"MLA_SERVE_CONFIG": ""}),
    ],
)
def test_an_empty_name_is_not_no_file(argv, environ):
    """The file may be where the API key is."""
    with pytest.raises(ValueError, match=r"\(MLA_SERVE_CONFIG\) is empty"):
        read_settings(argv, environ)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("compilation_config.mode_x: yarn", "--compilation-config.mode_x=yarn"),
        ("compilation-config.a.b_c: true", "--compilation-config.a.b_c=true"),
        ("compilation-config.a: [1, x]", '--compilation-config.a=[1, "x"]'),
        ("compilation-config.a: -1", "--compilation-config.a=-1"),
    ],
)
def test_a_dotted_key_is_one_of_an_options_json(line, word, tmp_path):
    settings = read_settings(["--config", write(tmp_path, line)], {})
    assert settings.arguments(OPTIONS) == [word]


@pytest.mark.parametrize(
    ("line", "message"),
    [("nothing.a: 1", "there is no option --nothing.a"), ("compilation-config.a:", "it is empty")],
)
def test_a_dotted_key_that_says_nothing_is_named(line, message, tmp_path):
    settings = read_settings(["--config", write(tmp_path, line)], {})
    with pytest.raises(ValueError, match=f"^{line.partition(':')[0]}: {message}"):
        settings.arguments(OPTIONS)


@pytest.mark.parametrize(
    ("argv", "environ", "left"),
    [
        (["--compilation-config", "{}"], {}, False),
        (["--compilation_config={}"], {}, False),
        ([], {"MLA_SERVE_COMPILATION_CONFIG": "{}"}, False),
        (["--compilation-config.mode=3"], {}, True),
        (["--port", "compilation-config"], {"MLA_SERVE_PORT": "1"}, True),
    ],
)
def test_a_dotted_key_does_not_override_stronger_sources(argv, environ, left, tmp_path):
    """vLLM's parser puts it behind them: theirs would be lost."""
    path = write(tmp_path, "compilation-config.mode: 0\n")
    words = read_settings(["--config", path, *argv], environ).arguments(OPTIONS)
    assert ("--compilation-config.mode=0" in words) == left
    if argv and left:
        assert words.index("--compilation-config.mode=0") < words.index(argv[0])


@pytest.mark.parametrize("word", ["0", "false"])
def test_a_variable_takes_back_a_flag_of_the_file(word, tmp_path):
    """Although the option has no word for that."""
    path = write(tmp_path, "enable-log-requests: true\nport: 1\n")
    settings = read_settings(["--config", path], {"MLA_SERVE_ENFORCE_EAGER": word})
    assert settings.arguments(OPTIONS) == ["--port", "1"]


def test_one_file_is_all_there_is(tmp_path):
    """As for vLLM: what the first says would be lost without a word."""
    path = write(tmp_path, "port: 1\n")
    with pytest.raises(ValueError, match=f"^expected one --config, got {path}, b.yaml$"):
        read_settings(["--config", path, "--config=b.yaml"], {})


def test_unknown_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match="MLA_SERVE_PROT: there is no option --prot"):
        read_settings([], {"MLA_SERVE_PROT": "1"}).arguments(OPTIONS)
    path = write(tmp_path, "prot: 1\n")
    with pytest.raises(ValueError, match="prot: there is no option --prot"):
        read_settings(["--config", path], {}).arguments(OPTIONS)
    with pytest.raises(ValueError, match="5: there is no option --5"):
        read_settings(["--config", write(tmp_path, "5: 1\n")], {}).arguments(OPTIONS)
    with pytest.raises(ValueError, match="expected a mapping"):
        read_settings(["--config", write(tmp_path, "- a\n")], {})


@pytest.mark.parametrize(
    ("said", "local"),
    [
        ("", True),
        ("--port 8000", True),
        ("{here}", True),
        ("--model {here} --config x/y.yaml", True),
        ("--model {here} --chat-template x/y.yaml", True),
        ("org/name", False),
        ("--port 8000 org/name", False),
        ("--enforce-eager org/name", False),
        ("--model=org/name", False),
        ("--model {here} --tokenizer org/name", False),
        ("--model {here} --tokenizer gpt2", True),  # docs/troubleshooting.md
        ('--model {here} --speculative-config {{"model":"org/name"}}', False),
    ],
)
def test_what_is_on_this_machine_is_not_looked_up(said, local, tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y.yaml").write_text("port: 1\n")
    monkeypatch.chdir(tmp_path)
    settings = read_settings(said.format(here=tmp_path).split(), {})
    assert settings.is_local() is local
    environ = {}
    environment.set_before_import(settings.is_local(), environ)
    assert (environ.get("HF_HUB_OFFLINE") == "1") is local
    assert environ["VLLM_NO_USAGE_STATS"] == environ["DO_NOT_TRACK"] == "1"


def test_files_and_variables_name_things_of_the_hub_too(tmp_path):
    path = write(tmp_path, f"model: {tmp_path}\nspeculative-config: {{model: org/name}}\n")
    assert not read_settings(["--config", path], {}).is_local()
    assert not read_settings([], {"MLA_SERVE_TOKENIZER": "org/name"}).is_local()


def test_what_the_user_set_stays(tmp_path):
    asked = {
        "HF_HUB_OFFLINE": "0",
        "VLLM_NO_USAGE_STATS": "0",
        "DO_NOT_TRACK": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_CPU_KVCACHE_SPACE": "7",
    }
    environ = dict(asked)
    environment.set_before_import(True, environ)
    environment.set_cpu_kv_cache(str(tmp_path), environ=environ)
    assert environ == asked


@pytest.mark.parametrize(
    ("available", "weights", "expected"),
    [(2, 0, 1), (16, 0, 2), (64, 0, 8), (64, 58, 2), (64, 80, 1), (1024, 700, 128)],
)
def test_cpu_kv_cache(available, weights, expected):
    assert environment.kv_cache_gib(available * GIB, weights * GIB) == expected
    if expected > 8:
        assert environment.kv_cache_gib(available * GIB, weights * GIB, 8) == expected // 8


@pytest.mark.parametrize("given", ["0.5", "4GiB", "-3", "0", " "])
def test_cpu_kv_cache_of_no_whole_gib(given):
    """vLLM says "invalid literal for int()", and not of what; of 0, to use more of a GPU."""
    with pytest.raises(ValueError, match=f"^VLLM_CPU_KVCACHE_SPACE='{given}': expected whole GiB"):
        environment.check_cpu_kv_cache({"VLLM_CPU_KVCACHE_SPACE": given})


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_cpu_kv_cache_leaves_it_to_vllm_to_refuse_no_ranks(ranks, tmp_path):
    environ = {}
    environment.set_cpu_kv_cache(str(tmp_path), *ranks, environ=environ)
    assert int(environ["VLLM_CPU_KVCACHE_SPACE"]) >= 1


def test_engines_are_started_as_vllms_command_starts_them(monkeypatch):
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    code = (
        "from mla_serving.server import environment; environment.set_before_import(True); "
        "from vllm.utils.system_utils import get_mp_context; "
        "print(get_mp_context().get_start_method())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "spawn"


def test_vllm_is_not_imported_before_the_environment_is_set():
    code = "import sys, mla_serving.server.run; print('vllm' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("key", ["enable-prefix-caching", "enable_prefix_caching"])
def test_underscores_of_a_file_are_dashes(key, tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    settings = read_settings(["--config", write(tmp_path, f"{key}: false\n")], {})
    given = settings.arguments(parser._option_string_actions)
    assert parser.parse_args(given).enable_prefix_caching is False
