# SPDX-License-Identifier: Apache-2.0
"""MLA_BACKEND_CHECK in whole engines: a fault is blamed on a request by the id that vLLM knows."""

import random

import pytest
from mla_serving.demo_model import make_demo_model

pytestmark = pytest.mark.engine

DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


@pytest.mark.parametrize("family, options", [("v3", {}), ("v3.2", DRAFTS)])
def test_the_request_at_fault_is_named(family, options, run_engine, tmp_path):
    """The last of four: when it comes the first is gone, so its number is no place in the step."""
    rng = random.Random(0)
    requests = [
        {"prompt": [0, *rng.choices(range(3, 2048), k=n - 1)], "max_tokens": count, "arrive": step}
        for n, count, step in ((5, 4, 0), (60, 60, 0), (300, 60, 0), (80, 60, 12))
    ]
    overrides = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    with pytest.raises(AssertionError) as failed:
        run_engine(
            {"spoilt": requests},
            model=make_demo_model(family, tmp_path / "model", overrides=overrides),
            env={"MLA_BACKEND_CHECK": "1"},
            spoil=80,
            **options,
        )
    failed.match(r"MLA_BACKEND_CHECK: request [0-2] \(id spoilt-3-\w+\) of the 3 in this step")
