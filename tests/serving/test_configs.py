# SPDX-License-Identifier: Apache-2.0
"""configs/serve: vLLM's own `serve --config` reads every file and means the same by it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
V3 = CONFIGS.parent / "models" / "deepseek-v3-5-layers"
FILES = sorted(CONFIGS.glob("*.yaml"))

PARSE = """
import json, sys
from mla_serving.server import environment
environment.set_before_import(True)
from mla_serving.server import args, vllm_api
from mla_serving.server.settings import read_settings

def shown(namespace):
    return {k: repr(v) for k, v in vars(namespace).items() if not k.startswith(("mla_", "config"))}

result = {}
for path in sys.argv[1:]:
    theirs = vllm_api.FlexibleArgumentParser()
    serve = theirs.add_subparsers(dest="subparser").add_parser("serve")
    vllm_api.make_arg_parser(serve)
    theirs = shown(theirs.parse_args(["serve", "some/model", "--config", path]))
    ours = args.make_parser()
    settings = read_settings(["some/model", "--config", path], {})
    given = settings.arguments(ours._option_string_actions)
    ours = shown(ours.parse_args(given))
    theirs.pop("subparser")
    result[path] = {"ours": ours, "theirs": {**theirs, "model": ours["model"]}}
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def parsed():
    command = [sys.executable, "-c", PARSE, *map(str, FILES)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_both_servers_mean_the_same(parsed, path):
    both = parsed[str(path)]
    assert both["ours"] == both["theirs"]
    for key, value in yaml.safe_load(path.read_text()).items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert both["ours"][key.replace("-", "_")] == str(value)


def test_every_file_selects_the_backend_and_is_in_the_readme():
    readme = (CONFIGS / "README.md").read_text()
    assert FILES
    for path in FILES:
        settings = yaml.safe_load(path.read_text())
        assert settings["attention-backend"] == "CUSTOM"
        assert settings["block-size"] == 64
        assert f"\n## {path.name}\n" in readme


def test_the_readme_has_our_options_and_their_defaults():
    from mla_serving.server.args import make_parser

    ours = next(g for g in make_parser()._action_groups if g.title == "mla-backend")
    given = {a.option_strings[0]: a.default for a in ours._group_actions}
    rows = re.findall(r"^\| `(--mla-\S+)` \| (.*?) ?\|", (CONFIGS / "README.md").read_text(), re.M)
    said = {option: default.strip("`") for option, default in rows}
    shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in given.items()}
    assert said == {k: "" if given[k] is False else v for k, v in shown.items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_option_is_explained(path):
    """A comment above each option, or above the pair of options it belongs to."""
    lines = path.read_text().splitlines()
    bare = 0
    for line in lines:
        bare = 0 if line.startswith("#") else bare + bool(line)
        assert bare <= 2, f"{path.name}: no comment says what {line!r} is for"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cluster_profiles_can_be_planned(path):
    """The sizes of each profile are ones that DeepSeek-V3 can be spread over."""
    from mla_serving.plan.config import from_config
    from mla_serving.plan.layout import Layout

    settings = yaml.safe_load(path.read_text())
    config = json.loads((V3 / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = from_config({**config, "num_hidden_layers": 61, "quantization_config": fp8}, "v3")
    layout = Layout(
        tp=settings.get("tensor-parallel-size", 1),
        dp=settings.get("data-parallel-size", 1),
        pp=settings.get("pipeline-parallel-size", 1),
        ep=settings.get("enable-expert-parallel", False),
    )
    layout.check(model)
    if layout.gpus > 1:
        limit = 0.9 * 143771 * 2**20 - 6 * 2**30
        for layers in layout.stages(model.layers):
            assert sum(layout.weights(model, layers).values()) < limit
