# SPDX-License-Identifier: Apache-2.0
"""An environment with torch only, as the README promises: the kernels, and commands that say what
is missing. What vLLM and torch's CUDA build bring is hidden here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDE = """
import sys
missing = ("triton", "vllm", "transformers", "tokenizers", "safetensors", "huggingface_hub")
sys.modules.update(dict.fromkeys(missing))
"""


def run(code, *args):
    command = [sys.executable, "-c", HIDE + code, *args]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_kernel_examples_of_the_readme():
    section = (ROOT / "README.md").read_text().partition("## As a kernel library")[2]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 2 and "mla_sparse_attention" in examples[1]
    done = run("\n".join(examples) + "print(tuple(out.shape))")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(4, 16, 512)\n"


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["version"], 0, "mla-backend "),
        (["doctor", "--help"], 0, "usage: mla-backend doctor"),
        (
            ["plan", "--model", str(ROOT / "configs/models/deepseek-v2-lite"), "--gpus", "1"],
            0,
            "GiB",
        ),
        (["demo-model", "--out", "OUT"], 1, "mla-backend demo-model: "),
        (["serve"], 1, "`mla-backend doctor` says how to mend it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands(tmp_path, args, status, said):
    args = [str(tmp_path / "model") if arg == "OUT" else arg for arg in args]
    done = run("from mla_serving.cli import main\nsys.exit(main())", *args)
    assert "Traceback" not in done.stderr
    assert done.returncode == status
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["doctor"], "fail  mla_kernels "),
        (["doctor", "--selftest"], "fail  selftest "),
        (["plan", "--model", "m", "--gpus", "1"], "mla-backend plan: "),
        (["serve"], "`mla-backend doctor` says how to mend it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_without_torch(args, said):
    """`pip install .` into an empty environment: the doctor is who says what to install."""
    done = run(
        "sys.modules['torch'] = None\nfrom mla_serving.cli import main\nsys.exit(main())", *args
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "args", "status", "said"),
    [
        ("mla_kernels.offline", [], 2, "triton is not installed. It compiles the kernels: pip ins"),
        ("mla_kernels.offline", ["--help"], 0, "--match"),
        ("mla_kernels.offline", ["--arch", "75"], 2, "expected one of [80, "),
        ("mla_backend.support_matrix", [], 1, "`make setup` installs both"),
        ("mla_backend.envs", [], 0, "MLA_BACKEND_IMPL"),
        ("mla_kernels.pipeline", ["1", "2", "3"], 0, "preload"),
    ],
)
def test_modules_that_are_commands(module, args, status, said):
    code = f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = run(code, *args)
    assert "Traceback" not in done.stderr
    assert done.returncode == status
    assert said in done.stdout + done.stderr
