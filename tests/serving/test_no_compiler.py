# SPDX-License-Identifier: Apache-2.0
"""A machine without a C++ compiler: the server must not reach torch.compile."""

import json
import os
import subprocess
import sys

PARSE = """
import json, os
from mla_backend import toolchain
from mla_serving.demo_model import demo_model_path
from mla_serving.server.settings import read_settings
from mla_serving.server.args import parse
shown = []
for obstacle in (None, "no C++ compiler (g++)"):
    toolchain.compile_obstacle = lambda: obstacle
    args = parse(read_settings([str(demo_model_path("v3"))], {}))
    shown.append([args.enforce_eager, os.environ.get("TORCHDYNAMO_DISABLE")])
print(json.dumps(shown))
"""


def test_torch_compile_is_off_without_a_compiler(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    env.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run([sys.executable, "-c", PARSE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[False, None], [True, "1"]]
