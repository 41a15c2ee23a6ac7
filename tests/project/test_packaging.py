# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, and that vLLM's processes find the plugins of an installed one."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import mla_backend

ROOT = Path(__file__).parents[2]
PACKAGES = {"mla_backend": "mla_backend", "mla_kernels": "kernels", "mla_serving": "serving"}
# A tree that PYTHONPATH names would be imported in place of what is installed.
_ENV = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
OUTSIDE = {"cwd": "/", "env": _ENV, "capture_output": True, "text": True}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_dir(package):
    outer = ROOT if PACKAGES[package] == package else ROOT / PACKAGES[package]
    return outer / package


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: an old `build/` in the tree would leak deleted files into the wheel."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in PACKAGES.values():
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tree / "out"]
    done = subprocess.run([*command, tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (tree / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """(python, site-packages) of a venv with the wheel alone; torch and vLLM by a .pth file."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    assert list(site.iterdir()) == []
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--no-input"]
    install = ["install", "--no-deps", "--no-index", "--no-compile", "-q", str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True)
    names = {path.name for path in site.iterdir()}
    (site / "outer.pth").write_text(sysconfig.get_path("purelib"))
    return python, site, names


def test_wheel_holds_every_module_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    expected = set()
    for package in PACKAGES:
        folder = source_dir(package)
        files = [*folder.rglob("*.py"), *folder.rglob("*.json")]
        modules = {path.relative_to(folder.parent).as_posix() for path in files}
        expected |= modules | {f"{package}/py.typed"}
    assert inside == expected
    assert any(name.endswith("LICENSE") for name in names)


def test_no_package_named_after_a_folder():
    """An installed top-level `kernels` breaks transformers at import."""
    assert [f for f in ("kernels", "serving") if (ROOT / f / "__init__.py").exists()] == []


def test_installs_three_names_into_an_empty_venv(installed):
    dist_info = f"mla_backend-{mla_backend.__version__}.dist-info"
    assert installed[2] == {*PACKAGES, dist_info}


def test_a_spawned_process_started_in_the_root_finds_the_plugins(installed, tmp_path):
    python, site, _ = installed
    script = tmp_path / "spawn.py"
    script.write_text("""
import json, multiprocessing

def look():
    import mla_backend
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    return [mla_backend.__file__, type(current_platform).__name__,
            AttentionBackendEnum.CUSTOM.get_path()]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps(pool.apply(look)))
""")
    done = subprocess.run([python, script], **OUTSIDE, timeout=180)
    assert done.returncode == 0, done.stderr
    origin, platform, custom = json.loads(done.stdout.splitlines()[-1])
    assert origin == str(site / "mla_backend" / "__init__.py")
    assert custom == "mla_backend.attention.backend.MlaBackend"
    assert platform in ("MlaCpuPlatform", "NvmlCudaPlatform", "NonNvmlCudaPlatform", "RocmPlatform")


def test_the_command_is_installed(installed):
    command = installed[0].with_name("mla-backend")
    done = subprocess.run([command, "version"], **OUTSIDE, check=True)
    assert done.stdout.startswith(f"mla-backend {mla_backend.__version__}\n")


def test_extras_pin_one_cpu_pair_and_leave_cuda_open():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {"cpu", "cuda", "bench", "dev"} <= set(extras)
    assert all("==" in requirement for requirement in extras["cpu"])
    # A plain install must not replace the torch that the vLLM beside it was built for.
    plain = " ".join(PYPROJECT["project"]["dependencies"])
    assert not any(name in plain for name in ("torch", "vllm", "triton", "transformers"))
