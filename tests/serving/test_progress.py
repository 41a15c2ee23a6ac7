# SPDX-License-Identifier: Apache-2.0
"""The lines that a server prints end no server."""

import os
import subprocess
import sys


def test_nobody_who_reads_the_lines_is_no_failure():
    """`mla-backend serve | tee log`: Ctrl-C ends tee first."""
    code = """
import sys
from mla_serving.server.progress import Progress
sys.stdin.read()
for _ in range(2):
    Progress().line("stopping")
"""
    run = [sys.executable, "-c", code]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(run, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_line_that_cannot_be_written_is_the_only_one_lost(tmp_path):
    """As on a disk that is full for a while; at the end it is full again."""
    code = """
import resource
from mla_serving.server.progress import say
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for text, size in (("first", 6), ("second", 6), ("third", 12), ("fourth", 12)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    say(text)
"""
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    run = [sys.executable, "-c", code]
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(run, stdout=log, stderr=subprocess.PIPE, text=True, env=buffered)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log").read_text() == "first\nthird\n"
