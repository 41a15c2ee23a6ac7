# SPDX-License-Identifier: Apache-2.0
"""How benchmarks begin: arguments, the machine, the folder of the results."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "decode_cpu",
        "sparse_cpu",
        "serve_cpu",
        "extends",
        "serve",
        "dense_decode",
        "sparse",
        "sparse_indexer",
    ],
)
def test_a_folder_that_cannot_be_written_is_said_at_once(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="results cannot be written to"):
        importlib.import_module(name).main(["--results", str(tmp_path / "file" / "results")])


@pytest.mark.parametrize("words", [None, ["--results", "a b", "--cases", "b1 x", "--results=c"]])
def test_a_command_says_all_but_where_its_results_went(words, monkeypatch):
    from outputs import command

    monkeypatch.setattr(sys, "argv", ["/there/name.py", "--heads", "16", "--results", "/tmp/out"])
    expected = "--heads 16" if words is None else "--cases 'b1 x'"
    assert command("name", words) == f"python benchmarks/name.py {expected}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they measure")
@pytest.mark.parametrize(
    "name", ["dense_decode", "hopper_stages", "mla_layer", "sparse", "sparse_indexer", "serve"]
)
def test_a_machine_without_a_gpu_is_told_so(name, tmp_path, monkeypatch, signals):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        importlib.import_module(name).main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "status", "rows"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 NVL, 95830", 0, 2),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, 0),
        ("No devices were found", 6, 0),
    ],
)
def test_a_gpu_is_what_nvidia_smi_finds(said, status, rows, tmp_path, monkeypatch):
    """Without a driver it says so on standard output: that is no GPU's name."""
    from machine import nvidia_smi

    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{said}"\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = nvidia_smi("name", "memory.total")
    assert found == [line.split(", ") for line in said.splitlines()[:rows]]


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
        ("decode_cpu", "--heads 129", "expected 1 to 128 heads, got 129"),
        ("sparse_cpu", "--threads 0", "expected 1 or more, got 0"),
        ("serve_cpu", "--repetitions 0", "expected 1 or more, got 0"),
        ("serve_cpu", "--dtype float32 bf16", "invalid choice: 'bf16'"),
        ("serve", "--concurrency 8 0", "expected 1 or more, got 0"),
        ("serve", "--rates 0", "expected a number above 0, got 0"),
        ("serve", "--rates inf", "expected a number above 0, got inf"),
        (
            "serve",
            "--slo ttft=2000",
            "milliseconds of ttft, tpot, e2el, as in ttft:2000, got ttft=2000",
        ),
        ("serve", "--slo itl:50", "as in ttft:2000, got itl:50"),
        ("serve", "--slo ttft:fast", "as in ttft:2000, got ttft:fast"),
        ("serve", "--shapes 1024", "expected PROMPT/ANSWER in tokens, got 1024"),
        ("serve", "--model /nowhere", "there is no /nowhere/config.json"),
        ("serve", "--time-limit nan", "expected a number above 0, got nan"),
        ("serve", "--time-limit 5m", "expected a number above 0, got 5m"),
        ("serve", "--cache-gib -1", "expected a number above 0, got -1"),
        ("serve", "--mode steps --case-seconds 0", "expected a number above 0, got 0"),
        ("serve", "--batches 8", "--batches has no effect with --mode serve"),
        ("serve", "--mode steps --rates 2", "--rates has no effect with --mode steps"),
        ("serve", "--as-is --layers 4", "--layers has no effect with --as-is"),
        ("serve", "--mode steps --as-is --heads 16", "--heads has no effect with --as-is"),
        ("serve", "--reduced --concurrency 8", "--concurrency has no effect with --reduced"),
        ("extends", "--time-limit -5", "expected a number above 0, got -5"),
        ("extends", "--new few", "expected a whole number, 1 or more, got few"),
        ("extends", "--contexts 1.5", "expected a whole number, 0 or more, got 1.5"),
        ("soak", "--blocks 0", "expected 1 or more, got 0"),
        ("soak", "--max-model-len 731", "expected --max-model-len of 732 or more"),
        ("extends", "--contexts -1", "expected 0 or more, got -1"),
        ("extends", "--sparse --contexts 1500", "prompts of up to 2048 tokens, got 2500"),
        ("dense_decode", "--cases (", "'(' is no regular expression"),
        ("sparse", "--impls (", "'(' is no regular expression"),
        ("sparse_indexer", "--cases (", "'(' is no regular expression"),
    ],
)
def test_bad_arguments_are_refused(name, words, says, tmp_path, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(name).main([*words.split(), "--results", str(tmp_path)])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "config.json: Expecting property name"),
        ("[]", "config.json, got []"),
        ('{"vocab_size": 9, "num_hidden_layers": 2}', "has no kv_lora_rank, num_attention_heads, "),
    ],
)
@pytest.mark.parametrize("name", ["serve", "soak"])
def test_what_is_no_model_is_refused(name, config, says, tmp_path, capsys):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(
            ["--model", str(tmp_path), "--results", str(tmp_path / "results")]
        )
    error = capsys.readouterr().err
    assert f"{tmp_path}/config.json" in error
    assert says in error
