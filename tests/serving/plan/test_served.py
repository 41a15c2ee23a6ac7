# SPDX-License-Identifier: Apache-2.0
"""What the backend refuses on a GPU is not planned."""

import re

import pytest
from mla_kernels.topk.plan import MAX_WIDTH
from mla_serving.plan import cost
from mla_serving.plan.config import from_config
from mla_serving.plan.layout import GIB, Layout

from mla_backend.attention import support
from tests.serving.plan.plan_models import V3, V32, config, question


@pytest.mark.parametrize(
    "folder, changes, layout, said",
    [
        (V32, {}, {"tp": 16, "dcp": 16}, "Expected --dcp up to 8 for the sparse attention of m, "
         "whose ranks bring 2048 candidates each, got 16"),
        (V32, {"num_attention_heads": 256}, {"tp": 8, "dcp": 8}, "256 attention heads / --tp 8 x "
         "--dcp 8 are 256 on a GPU; our kernels take 128. Mend: --tp of 16 or more, or a lower"),
        (V3, {"num_attention_heads": 256}, {"tp": 1}, "256 attention heads / --tp 1 are 256 on a "
         "GPU; our kernels take 128. Mend: --tp of 2 or more"),
        (V32, {"num_attention_heads": 256}, {"tp": 1}, "our kernels take 128. Mend: --tp of 2 or"),
        (V3, {"num_attention_heads": 256}, {"tp": 8, "dcp": 8}, "256 attention heads / --tp 8 x "
         "--dcp 8 are 256 on a GPU; our kernels take 128. Mend: --tp of 16 or more, or a lower"),
        (V3, {"kv_lora_rank": 384}, {"tp": 1}, "m has cache rows of 384 + 64 elements "
         "(kv_lora_rank + qk_rope_head_dim); the vLLM backend serves dense attention of 512 + 64 "
         "or 256 + 64 only"),
        (V3, {"kv_lora_rank": 448, "qk_rope_head_dim": 128}, {"tp": 1}, "rows of 448 + 128 elem"),
        (V3, {"qk_rope_head_dim": 0}, {"tp": 1}, "m has cache rows of 512 + 0 elements"),
        (V32, {"kv_lora_rank": 256}, {"tp": 1}, "the vLLM backend serves sparse attention of 512 "
         "+ 64 only"),
        (V32, {"index_n_heads": 65}, {"tp": 1}, "index_n_heads 65; our indexer's kernels take 1 "),
        (V32, {"index_head_dim": 64}, {"tp": 1}, "m has index_head_dim 64; our indexer's kernels "
         "take 128"),
        (V32, {"index_topk": 4096}, {"tp": 1}, "m has index_topk 4096; our indexer's kernels take"),
    ],
)  # fmt: skip
def test_what_the_backend_refuses_is_refused(folder, changes, layout, said):
    model = from_config(config(folder, **changes), "m")
    with pytest.raises(ValueError, match=re.escape(said)):
        cost.make(question(model, Layout(**layout)))


def test_more_tokens_than_the_indexer_chooses_among_are_refused(v32, v3):
    long = {"context": MAX_WIDTH + 1, "batch": 1, "memory": 1000 * GIB, "rates": None}
    with pytest.raises(
        ValueError, match=f"Expected --context up to {MAX_WIDTH} for the sparse att"
    ):
        cost.make(question(v32, Layout(tp=8), **long))
    cost.make(question(v32, Layout(tp=8), **long | {"context": MAX_WIDTH}))
    cost.make(question(v32, Layout(tp=8, dcp=2), **long | {"context": 2 * MAX_WIDTH}))
    cost.make(question(v3, Layout(tp=8), **long))


def test_what_the_backend_takes_is_planned(v3):
    most = {"num_attention_heads": 2 * support.MAX_HEADS}
    cost.make(question(from_config(config(V3, **most), "m"), Layout(tp=2)))
    cost.make(question(v3, Layout(tp=8, dcp=8)))
    for widths in support.HEAD_SIZES.values():
        rank, rope = map(int, widths.split(" + "))
        model = from_config(config(V3, kv_lora_rank=rank, qk_rope_head_dim=rope), "m")
        assert cost.make(question(model, Layout(tp=8))).row_bytes == 2 * (rank + rope)


def test_a_cache_of_another_16_bit_dtype_than_the_model_is_refused(v3):
    with pytest.raises(ValueError, match=r"--kv-cache-dtype auto, bfloat16 .*, got float16"):
        cost.make(question(v3, Layout(tp=8), kv_cache_dtype="float16"))
    cost.make(question(v3, Layout(tp=8), kv_cache_dtype="bfloat16"))
