# SPDX-License-Identifier: Apache-2.0
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_backend import envs

ROOT = Path(__file__).parents[2]


def test_defaults_parse(monkeypatch):
    for name in envs.ENV_VARS:
        monkeypatch.delenv(name, raising=False)
        envs.get(name)


@pytest.mark.parametrize("text, value", [("1", True), ("TRUE", True), ("0", False), ("", False)])
def test_bool(monkeypatch, text, value):
    monkeypatch.setenv("MLA_BACKEND_CHECK", text)
    assert envs.get("MLA_BACKEND_CHECK") is value


@pytest.mark.parametrize(
    "name, text",
    [
        ("MLA_BACKEND_CHECK", "maybe"),
        ("MLA_BACKEND_IMPL", "cuda"),
        ("MLA_BACKEND_FP8_QUERY", "e4m3"),
        ("MLA_BACKEND_EXTEND_TOKENS", "513"),
        ("MLA_BACKEND_EXTEND_TOKENS", "-1"),
        ("MLA_BACKEND_EXTEND_TOKENS", "²"),
    ],
)
def test_a_bad_value_is_named(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"{name}='{text}': expected one of"):
        envs.get(name)


def test_an_error_names_auto_where_it_is_allowed():
    for name, var in envs.ENV_VARS.items():
        with pytest.raises(ValueError, match=rf"^{name}='\?\?': expected one of ") as refused:
            envs.get(name, {name: "??"})
        assert re.search(r"\bauto\b", str(refused.value)) or var.default != "auto"


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch):
    """`${NAME:-}` of a compose file: no switch that is on by default goes off by it."""
    for name, var in envs.ENV_VARS.items():
        monkeypatch.setenv(name, "")
        assert envs.get(name) == var.parse(var.default)


def test_all_are_checked_at_once(monkeypatch):
    envs.check_all()
    monkeypatch.setenv("MLA_BACKEND_RESCALES", "pow2")
    with pytest.raises(ValueError, match="MLA_BACKEND_RESCALES is no setting of ours"):
        envs.check_all()
    monkeypatch.setenv("MLA_BACKEND_CPU_PLATFORM", "maybe")
    with pytest.raises(ValueError, match="MLA_BACKEND_CPU_PLATFORM='maybe': expected one of"):
        envs.check_all()


def service(name):
    """What Kubernetes sets in a pod for a Service of one port."""
    tcp = f"{name}_PORT_8000_TCP"
    host, url = "10.0.171.239", "tcp://10.0.171.239:8000"
    return {
        f"{name}_SERVICE_HOST": host,
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_PORT": url,
        tcp: url,
        f"{tcp}_PROTO": "tcp",
        f"{tcp}_PORT": "8000",
        f"{tcp}_ADDR": host,
    }


@pytest.mark.parametrize("name", ["MLA_BACKEND", "MLA_BACKEND_V3"])
def test_a_kubernetes_service_is_no_setting(name):
    assert envs.problems(service(name)) == []
    for typo in ("PORT", "SERVICE", "PORT_8000"):
        assert envs.problems({f"{name}_{typo}": "1"}) == [f"{name}_{typo} is no setting of ours"]


def test_unknown_name():
    with pytest.raises(KeyError):
        envs.get("MLA_BACKEND_NOT_THERE")


def test_docs_table_is_current():
    printed = subprocess.run(
        [sys.executable, "-m", "mla_backend.envs"], capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs" / "environment.md").read_text() == printed


def test_every_variable_read_is_in_the_table():
    sources = [
        path.read_text()
        for package in ("mla_backend", "kernels", "serving")
        for path in (ROOT / package).rglob("*.py")
    ]
    named = {m for text in sources for m in re.findall(r"MLA_BACKEND_[A-Z0-9_]*[A-Z0-9]", text)}
    assert named == set(envs.ENV_VARS)
