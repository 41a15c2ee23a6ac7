# SPDX-License-Identifier: Apache-2.0
"""What the real server says last when a worker of its engine fails to start."""

import shutil

import pytest

from tests.serving.server_process import START_SECONDS, ServerProcess


@pytest.mark.engine
def test_the_cause_is_the_last_line(demo_checkpoint, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(demo_checkpoint("v3"), model)
    (model / "model.safetensors").unlink()
    given = (str(model), "--enforce-eager", "--max-model-len", "256", "--tokenizer-mode", "hf")
    server = ServerProcess(*given, key="key", log=tmp_path / "log")
    try:
        assert server.process.wait(START_SECONDS) == 1
    finally:
        server.stop()
    last = server.log.read_text().splitlines()[-1]
    assert last.startswith("mla-backend serve: ")
    assert f"Cannot find any model weights with `{model}`" in last
