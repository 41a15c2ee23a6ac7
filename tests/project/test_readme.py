# SPDX-License-Identifier: Apache-2.0
"""The README's first steps: in the promised order, with names that exist."""

import re
from pathlib import Path

from mla_serving.demo_model import SERVED_NAME

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_first_steps_are_in_order():
    steps = ["make serve", "make test", "curl http://127.0.0.1:8000/v1/", "from openai import"]
    places = [README.index(step) for step in steps]
    assert places == sorted(places)


def test_examples_name_the_demo_model():
    assert re.findall(r'(?:"model": |model=)"([^"]+)"', README)[:2] == [SERVED_NAME] * 2


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"serve", "test"} <= named <= targets


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
