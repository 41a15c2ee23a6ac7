# SPDX-License-Identifier: Apache-2.0
"""How benchmarks begin and end: arguments, the folder of the results, processes."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("name", ["accuracy", "decode_cpu", "sparse_cpu", "dense_decode", "sparse"])
def test_a_folder_that_cannot_be_written_is_said_at_once(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="results cannot be written to"):
        importlib.import_module(name).main(["--results", str(tmp_path / "file" / "results")])


def test_a_folder_is_made_and_left_empty(tmp_path):
    from outputs import claim

    claim(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results").iterdir()) == []


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    from outputs import write, write_json

    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}

    def stopped(self, text):
        self.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(path, "half")
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("accuracy", "--seeds 0", "expected 1 or more, got 0"),
        ("accuracy", "--kv-block 0", "expected 1 or more, got 0"),
        ("decode_cpu", "--repetitions 0", "expected 1 or more, got 0"),
        ("sparse_cpu", "--threads 0", "expected 1 or more, got 0"),
        ("dense_decode", "--cases (", "'(' is no regular expression"),
        ("sparse", "--impls (", "'(' is no regular expression"),
    ],
)
def test_bad_arguments_are_refused(name, words, says, tmp_path, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(name).main([*words.split(), "--results", str(tmp_path)])
    assert says in capsys.readouterr().err
