# SPDX-License-Identifier: Apache-2.0
"""Every page in benchmarks/results is what the code makes of its JSON: no loss is left out by hand,
and what is added by hand is in the JSON's note."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
PLAIN = {"hopper_stages.json", "with_3.6.json"}  # without a page
OTHERS = {"parity.json", "parity_ranks.json"}  # pages of tests/gpu
# The module whose `markdown` makes a page, by the page's folder and name.
MAKERS = {
    "accuracy": "accuracy",
    "decode": "decode_cpu",
    "extends": "extends",
    "sparse_extends": "extends",
    "mla_layer": "mla_layer",
    "soak": "soak_report",
    "cpu/serving": "serve_cpu",
    "cpu/sparse": "sparse_cpu",
}
FILES = [path for path in sorted(RESULTS.rglob("*.json")) if path.name not in OTHERS]


def page_of(path):
    result = json.loads(path.read_text())
    device = path.relative_to(RESULTS).parts[0]
    if path.stem.startswith("dense_"):
        from dense_report import markdown
    elif maker := MAKERS.get(path.stem) or MAKERS.get(f"{device}/{path.stem}"):
        markdown = importlib.import_module(maker).markdown
    elif path.stem in ("sparse", "sparse_indexer"):  # of one alone where the other has not run
        from sparse_report import markdown

        both = [path.with_name(f"{stem}.json") for stem in ("sparse", "sparse_indexer")]
        return markdown(*(json.loads(p.read_text()) if p.exists() else None for p in both))
    else:
        from serve_report import Report
        from serve_results import markdown

        return markdown(Report(**result))
    return markdown(result)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_page_is_that_of_its_results(path):
    page = path.with_name("sparse.md" if path.stem == "sparse_indexer" else f"{path.stem}.md")
    assert page.exists() == (path.name not in PLAIN)
    if page.exists():
        assert page.read_text() == page_of(path)


def test_every_answer_of_a_load_was_whole():
    """Tokens a second are requests a second, each of as many tokens as were asked for."""
    checked = 0
    for path in FILES:
        if "serving" not in path.name:
            continue
        results = json.loads(path.read_text())
        for row in results["rows"]:
            if "output_tok_s" in row:
                shape = row.get("shape") or f"/{results['settings']['output_len']}"
                tokens = row["output_tok_s"] / row["request_s"]
                assert tokens == pytest.approx(int(shape.rpartition("/")[2]), rel=1e-6)
                checked += 1
    assert checked > 600
