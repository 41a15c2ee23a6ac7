# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every source file: licence header, direction of imports."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = "# SPDX-License-Identifier: Apache-2.0\n"

# serving -> plugin -> kernels, never back; kernels know of no engine.
FORBIDDEN = {
    "kernels/mla_kernels": {"vllm", "mla_backend", "mla_serving", "transformers", "fastapi"},
    "mla_backend": {"mla_serving", "fastapi", "uvicorn"},
}


def sources(folder="."):
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/*.py"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split() if (ROOT / name).exists()]


def imported(source):
    """Top-level names that `source` imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_every_file_starts_with_the_licence():
    files = sources()
    assert len(files) > 30
    assert [str(f.relative_to(ROOT)) for f in files if not f.read_text().startswith(HEADER)] == []


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_point_one_way(folder):
    files = sources(folder)
    assert files
    wrong = {
        str(f.relative_to(ROOT)): names
        for f in files
        if (names := FORBIDDEN[folder] & set(imported(f.read_text())))
    }
    assert wrong == {}


def test_the_import_scan_sees_what_it_should():
    text = "import a.b, c\nfrom d.e import f\ndef g():\n    from h import i\nfrom . import j\n"
    assert set(imported(text)) == {"a", "c", "d", "h"}


def test_modules_that_tests_import_by_name_have_one_each():
    """Tests put their folders and benchmarks/ on the path: of two modules of one name all tests of
    a run get the one that came first."""
    files = [f for folder in ("tests", "benchmarks") for f in sources(folder)]
    names = [f.stem for f in files if f.name != "conftest.py" and not f.name.startswith("test_")]
    assert len(names) > 60 and "sparse_cases" in names
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []


def test_no_test_imports_conftest_by_its_bare_name():
    """Every folder has one: which is imported depends on the tests that were asked for."""
    files = sources("tests")
    wrong = [str(f.relative_to(ROOT)) for f in files if "conftest" in imported(f.read_text())]
    assert wrong == []
