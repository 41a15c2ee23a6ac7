# SPDX-License-Identifier: Apache-2.0
"""The command line: quick help, subcommands that reach their code, exit codes, clear errors."""

import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mla_serving import cli

import mla_backend

LITE = str(Path(__file__).parents[2] / "configs/models/deepseek-v2-lite")
COMMAND = Path(sys.executable).with_name("mla-backend")


def test_help_is_instant_and_names_every_command():
    def computed():  # of processes that have ended: other load does not count
        times = os.times()
        return times.children_user + times.children_system

    seconds = []
    for _ in range(5):
        start = computed()
        run = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True)
        seconds.append(computed() - start)
    for command in ("serve", "doctor", "demo-model", "plan", "version"):
        assert f"    {command}" in run.stdout
    assert min(seconds) < 0.3


def test_closed_output_is_nothing():
    """As some supervisors leave it; uvicorn looks at both streams when it is set up."""
    code = (
        "import subprocess, sys, uvicorn; from mla_serving import cli, server\n"
        "def main(_):\n"
        "    uvicorn.Config('app')\n"
        "    child = 'import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))'\n"
        "    status = subprocess.run([sys.executable, '-c', child]).returncode\n"
        "    return status + (open('/dev/null').fileno() < 3)\n"
        "server.main = main\n"
        "raise SystemExit(cli.main(['serve']))"
    )
    run = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(run).returncode == 0


def test_nothing_heavy_is_imported_for_help():
    code = (
        "import sys; from mla_serving.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'vllm', 'fastapi') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "argv",
    [[], ["sevre"], ["doctor", "--jsn"], ["demo-model", "--family"], ["demo-model", "--out", ""]],
)
def test_wrong_usage_is_2(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: mla-backend" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_serve_hands_its_arguments_on_untouched(monkeypatch):
    seen = []
    monkeypatch.setattr("mla_serving.server.main", lambda argv: seen.append(argv) or 7)
    assert cli.main(["serve", "some/model", "--help", "--port", "1"]) == 7
    assert seen == [["some/model", "--help", "--port", "1"]]


@pytest.mark.parametrize(
    "unbuffered, argv",
    [
        ("", ["--help"]),  # unbuffered, argparse says nothing of either
        ("", ["version"]),
        ("1", ["version"]),
        ("", ["plan", "--model", LITE, "--gpus", "1", "--json"]),
        ("1", ["plan", "--model", LITE, "--gpus", "1", "--json"]),
    ],
)
def test_output_that_nobody_takes(unbuffered, argv):
    """A reader that is gone is no news; a full disk is a sentence. Neither is a traceback."""
    command = [sys.executable, "-m", "mla_serving.cli", *argv]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ours, theirs = os.pipe()
    os.close(ours)
    for stdout, said in (
        (theirs, ""),
        (os.open("/dev/full", os.O_WRONLY), "mla-backend: [Errno 28] No space left on device\n"),
    ):
        done = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
        os.close(stdout)
        assert (done.returncode, done.stderr) == (1, said)


def test_letters_that_the_locale_cannot_write(tmp_path):
    folder = tmp_path / "modèle"
    folder.mkdir()
    shutil.copy(Path(LITE) / "config.json", folder)
    command = [sys.executable, "-m", "mla_serving.cli", "plan", "--gpus", "1", "--model", folder]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("model      mod\\xe8le: 15.7 B parameters")


def test_the_server_too_writes_what_the_locale_cannot(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr("mla_serving.server.main", lambda argv: print("loading", *argv, flush=True))
    cli.main(["serve", "/modèle"])
    assert written.getvalue() == b"loading /mod\\xe8le\n"


def test_interrupt_is_130(monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("mla_serving.server.main", interrupted)
    assert cli.main(["serve"]) == 130


@pytest.mark.parametrize("argv", [["--json"], ["--selftest"], []])
def test_doctor_flags(argv, monkeypatch):
    monkeypatch.setattr("mla_backend.doctor.main", lambda **flags: flags)
    expected = {"json_output": "--json" in argv, "selftest": "--selftest" in argv}
    assert cli.main(["doctor", *argv]) == expected


def test_demo_model_prints_its_directory(tmp_path, monkeypatch, capsys):
    out = tmp_path / "model"
    assert cli.main(["demo-model", "--family", "v2-lite", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "deepseek_v2" in (out / "config.json").read_text()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cli.main(["demo-model"]) == 0
    cached = Path(capsys.readouterr().out.strip())
    assert cached.parent == tmp_path / "cache" / "mla-backend"
    assert "deepseek_v3" in (cached / "config.json").read_text()


def test_demo_model_failure_is_1_with_the_reason(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo-model", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mla-backend demo-model: out_dir")
    assert cli.main(["demo-model", "--out", "/proc/none/here"]) == 1


@pytest.mark.parametrize("before", ["ulimit -f 50", "ulimit -f 1000", "unset HOME XDG_CACHE_HOME"])
def test_demo_model_without_room_or_home_says_so(before, tmp_path):
    """A file size limit stands for a full disk; a user that no passwd knows has no home."""
    code = (
        "import os, pwd, sys; from mla_serving.cli import main\n"
        "pwd.getpwuid = {}.__getitem__; sys.exit(main(['demo-model']))"
    )
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = ["bash", "-c", f'{before}; exec "$@"', "bash", sys.executable, "-c", code]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 1
    (said,) = run.stderr.splitlines()
    assert said.startswith("mla-backend demo-model: ")
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_version_of_a_package_that_is_not_installed(monkeypatch, capsys):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", nothing)
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"mla-backend {mla_backend.__version__}\n")


def test_version_agrees_with_the_package(capsys):
    assert cli.main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"mla-backend {mla_backend.__version__}"
    assert f"torch {importlib.metadata.version('torch')}" in lines
