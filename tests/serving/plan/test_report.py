# SPDX-License-Identifier: Apache-2.0
"""The plan as text and as JSON says what the plan has."""

import json

from mla_serving.plan import cost, report
from mla_serving.plan.config import from_config
from mla_serving.plan.layout import Layout

from tests.serving.plan.plan_models import V3, config, question


def test_the_report_says_what_the_plan_has(v3):
    plan = cost.make(question(v3, Layout(tp=1, dp=8, ep=True)))
    answer, times = json.loads(report.as_json(plan)), plan.attention
    kernel = times.kernels["attention"]
    assert answer["weights"]["bytes_per_gpu"] == plan.weight_bytes
    cache = answer["kv_cache"]
    assert (cache["tokens_per_gpu"], cache["tokens"]) == (plan.gpu_tokens, plan.cluster_tokens)
    assert answer["load"]["requests_that_fit"] == plan.requests_that_fit
    said = answer["attention"]
    assert (said["floor_us"], said["measured_us"]) == (times.floor_us, times.measured_us)
    assert said["kernels"] == {
        "attention": {
            "measured_us": kernel.us,
            "case": kernel.case,
            "at_most": kernel.at_most,
            "unmeasured": None,
        }
    }
    text = report.as_text(plan)
    assert f"{plan.weight_bytes / 2**30:.1f} GiB a GPU" in text
    assert f"{plan.gpu_tokens:,} a GPU, {plan.cluster_tokens:,} in the cluster" in text
    assert f" {plan.requests_that_fit:,} of 4,096 tokens" in text
    floor, ours = f"{times.floor_us / 1000:.2f} ms", f"{times.measured_us / 1000:.2f} ms"
    assert f"floor {floor} ({times.bound}), our kernel {ours}, as" in text
    assert "; MTP layers and encoders of images, if any, not counted\n" in text


def test_the_report_says_of_which_stage_its_weights_are():
    """Of five layers the last two have all the experts, the first three more cache."""
    model = from_config(config(V3), "m")
    plan = cost.make(question(model, Layout(tp=8, pp=2)))
    assert "routed experts" not in plan.weights
    assert "GiB a GPU of the stage that holds fewest tokens: attention" in report.as_text(plan)
    assert "stage" not in report.as_text(cost.make(question(model, Layout(tp=8))))
