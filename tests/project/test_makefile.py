# SPDX-License-Identifier: Apache-2.0
"""The make targets, tried with stand-ins for Python and for the installed command."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Without what an outer `make test VAR=...` hands down; with names that some shells export.
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
ENV |= {"HOST": "my-desk", "PORT": "9", "PYTHON": "none", "MODEL": "none"}


def make(*arguments):
    command = ["make", "--no-print-directory", "DEVICE=cpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def fake_venv(tmp_path):
    """A venv in which everything seems installed; its mla-backend shows its arguments."""
    script(tmp_path / "bin" / "python", "exit 1")
    script(tmp_path / "bin" / "mla-backend", 'for a in "$@"; do echo "[$a]"; done')
    (tmp_path / ".installed-cpu").touch()
    return tmp_path


def tools_only(folder, *names):
    """PATH with nothing but these commands on it."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return f"PATH={folder}"


def test_help_needs_no_tools_that_small_images_lack(tmp_path):
    path = tools_only(tmp_path / "bin", "bash", "sed")
    assert make("help", path).stdout == make("help").stdout != ""


def test_help_lists_the_targets():
    listed = re.findall(r"^  make (\S+)", make().stdout, re.MULTILINE)
    assert {
        "help",
        "setup",
        "serve",
        "test",
        "test-fast",
        "test-gpu",
        "bench",
        "lint",
        "clean",
    } <= set(listed)


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("exit 1", "Python 3.11 or newer is needed"),
        ('case "$2" in *version_info*) exit 0;; *) exit 1;; esac', "has no venv module"),
    ],
)
def test_an_unfit_python_is_one_clear_sentence(python, says, tmp_path):
    fake = script(tmp_path / "python3", python)
    done = make("setup", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    first, *rest = done.stderr.strip().splitlines()
    assert says in first and str(fake) in first
    assert all(line.startswith("make") for line in rest)
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("device", ["gpu", "CUDA", "", "xpu"])
def test_another_device_is_told_which_there_are(device):
    done = make("serve", f"DEVICE={device}")
    assert done.returncode != 0
    assert f"expected DEVICE=cpu or DEVICE=cuda, got DEVICE={device}." in done.stderr


def test_a_venv_made_for_the_other_device_is_left_alone(fake_venv):
    (fake_venv / ".installed-cpu").rename(fake_venv / ".installed-cuda")
    done = make("serve", f"VENV={fake_venv}")
    assert done.returncode != 0
    assert "was set up for cuda" in done.stderr


def test_a_venv_whose_python_is_gone_is_not_taken_for_a_finished_one(fake_venv):
    (fake_venv / "bin" / "python").unlink()
    (fake_venv / "bin" / "python").symlink_to("/no/such/python3.11")  # the system has another now
    done = make("serve", f"VENV={fake_venv}")
    assert done.returncode != 0
    assert "is gone; run: make distclean" in done.stderr


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_venv_of_another_folder_is_not_run(move, tmp_path, fake_venv):
    """Its scripts name their Python, and the installed package its folder, by absolute paths."""
    first, second = tmp_path / "first", tmp_path / "second"
    venv.create(first, with_pip=False)
    for name in ("bin/mla-backend", ".installed-cpu"):
        shutil.copy(fake_venv / name, first / name)
    linked = tmp_path / "linked"
    linked.symlink_to(first)
    for here in (first, linked):  # a link is no copy
        assert make("serve", f"VENV={here}").stdout == "[serve]\n"
    move(first, second)
    done = make("serve", f"VENV={second}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{second} was set up as {first}; here run: make distclean" in done.stderr


def test_a_venv_with_an_old_python_is_not_filled(tmp_path):
    script(tmp_path / "bin" / "python", 'case "$*" in *version_info*) exit 1;; esac')
    script(tmp_path / "bin" / "pip", "echo pip; exit 1")
    done = make("setup", f"VENV={tmp_path}")
    assert (done.returncode, "pip" in done.stdout) == (2, False)
    assert f"and that of {tmp_path} is not; run: make distclean" in done.stderr


def test_a_set_up_that_was_killed_gets_its_pip(tmp_path):
    """`python -m venv` makes bin/python first and bin/pip last."""
    script(tmp_path / "bin" / "python", 'case "$*" in *ensurepip*) echo "$@" >&2;; esac')
    done = make("setup", f"VENV={tmp_path}")
    assert "-m ensurepip --default-pip" in done.stderr


def heed_interrupts():
    """A shell starts background jobs with SIGINT ignored, and a shell script cannot undo that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def fresh(tmp_path):
    """(command, venv, log) of `make setup` on a machine with nothing; the log has what was run."""
    home, log = tmp_path / "venv", tmp_path / "log"
    pip = script(tmp_path / "pip", f'echo begin >>{log}; sleep 0.3; echo "end $*" >>{log}')
    script(home / "bin" / "mla-backend", "echo checked")
    python = script(
        tmp_path / "python3",
        f'echo "python $*" >>{log}; case "$*" in "-m venv "*) sleep 0.3; '
        f"cp {tmp_path}/python3 {home}/bin/python; sleep 0.3; cp {pip} {home}/bin/pip;; esac",
    )
    command = ["make", "--no-print-directory", "DEVICE=cpu", "setup"]
    return [*command, f"PYTHON={python}", f"VENV={home}"], home, log


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def test_of_two_makes_at_once_one_sets_up(fresh):
    """`make serve` and `make test` in two terminals, on a machine with nothing."""
    command, home, log = fresh
    both = [subprocess.Popen(command, cwd=ROOT, env=ENV, **PIPES) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert all(out.endswith("checked\n") for out, _ in said)
    assert f"another make sets up {home}; waiting" in "".join(err for _, err in said)
    did = log.read_text().splitlines()
    assert sum(line.startswith("python -m venv") for line in did) == 1
    assert "python -m ensurepip --default-pip" not in did
    steps = [line.split()[0] for line in did if not line.startswith("python")]
    assert steps == ["begin", "end"] * 4


def test_a_make_that_waits_can_be_interrupted(fresh):
    """What the other has made of the venv meanwhile stays."""
    command, home, log = fresh
    with (ROOT / "Makefile").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waits = subprocess.Popen(
            command, cwd=ROOT, env=ENV, **PIPES, start_new_session=True, preexec_fn=heed_interrupts
        )
        assert waits.stderr.readline() == f"another make sets up {home}; waiting for it\n"
        script(home / "bin" / "python", "exit 0")
        os.killpg(waits.pid, signal.SIGINT)
        waits.communicate(timeout=20)
    assert waits.returncode != 0 and not log.exists()
    assert (home / "bin" / "python").exists()


@pytest.mark.parametrize("flock", ["exit 65", "exit 127"], ids=["as on NFS", "none"])
def test_where_there_are_no_locks_nobody_waits(fresh, flock, tmp_path):
    path = script(tmp_path / "path" / "flock", f"echo flock: 9: Bad file descriptor >&2; {flock}")
    env = ENV | {"PATH": f"{path.parent}:{ENV['PATH']}"}
    done = subprocess.run(fresh[0], cwd=ROOT, env=env, **PIPES, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("checked\n")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ([], ["serve"]),
        (["FAMILY=v2-lite"], ["serve", "--mla-demo", "v2-lite"]),
        (["MODEL=/my models/a", "FAMILY=v3"], ["serve", "/my models/a"]),
        (
            ["HOST=0.0.0.0", "PORT=81", "DTYPE=float32", "ARGS=--api-key 'a b'"],
            [
                "serve",
                "--host",
                "0.0.0.0",
                "--port",
                "81",
                "--dtype",
                "float32",
                "--api-key",
                "a b",
            ],
        ),
    ],
)
def test_serve_starts_at_once_with_these_arguments(variables, expected, fake_venv):
    done = make("serve", f"VENV={fake_venv}", *variables)
    assert done.stdout.splitlines() == [f"[{argument}]" for argument in expected]


def test_interrupt_reaches_the_server_and_make_waits_for_it(fake_venv):
    script(
        fake_venv / "bin" / "mla-backend",
        'trap "sleep 0.3; echo drained; exit 0" INT; echo ready; while :; do sleep 0.05; done',
    )
    command = ["make", "serve", "DEVICE=cpu", f"VENV={fake_venv}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: to make and all below it
    output, _ = process.communicate(timeout=20)
    assert output == "drained\n"


def test_torch_pin_is_the_one_of_the_project(tmp_path):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (pin,) = [line for line in extras["cpu"] if line.startswith("torch==")]
    shown = make("-n", "setup", f"VENV={tmp_path}").stdout
    assert f'pip install "{pin}+cpu"' in shown
