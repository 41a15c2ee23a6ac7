# SPDX-License-Identifier: Apache-2.0
"""Steps that vLLM cut into microbatches (--enable-dbo), as it hands them to builders."""

import pytest

from mla_backend.attention import support
from mla_backend.attention.shard import Shard
from tests.backend.test_dealt_drafts import TABLE, builder, make_step  # noqa: F401


@pytest.mark.parametrize(
    "lengths, new, attended",
    [
        ([5, 65, 7], [1, 1, 0], [0, 1]),
        ([5, 65, 7], [0, 1, 1], [1, 2]),
        ([5, 65], [0, 1], [1]),
        ([5, 65], [0, 0], [0]),  # by nobody
    ],
)
def test_requests_without_a_token(builder, lengths, new, attended):  # noqa: F811
    """The second runner of vLLM 0.30 and later cuts where other ranks' tokens end."""
    made = builder(Shard(), drafts=0, threshold=1)
    decode = made.build(0, make_step(lengths, new, TABLE[: len(new)])).decode
    assert decode.rest is None and decode.plan.s_q == 1
    assert decode.lengths.tolist() == [lengths[i] for i in attended]
    assert decode.block_table[:, :10].equal(TABLE[attended])


@pytest.mark.parametrize(
    "stages, microbatches, chosen, said",
    [
        (1, 1, False, None),  # a draft's, whose choice is the model's
        (2, 1, True, None),
        (2, 1, False, r"another of 2 pipeline stages.*Mend: .*, or VLLM_PP_LAYER_PARTITION"),
        (1, 2, True, r"2 microbatches \(--enable-dbo\) with layers that read.*Mend: leave out "),
    ],
)
def test_choices_of_earlier_layers_that_would_be_others(stages, microbatches, chosen, said):
    if said is None:
        support.refuse_borrowed_choice(stages, microbatches, chosen=chosen)
        return
    with pytest.raises(ValueError, match=said):
        support.refuse_borrowed_choice(stages, microbatches, chosen=chosen)


def test_a_stage_that_begins_with_a_layer_without_an_indexer_is_refused(monkeypatch):
    from sparse_parts import fake_config, fake_indexer, make_impl

    config = fake_config(stages=2)
    with pytest.raises(ValueError, match="a layer that reads the choice of an earlier one"):
        make_impl(monkeypatch, config=config)
    indexer = fake_indexer()
    make_impl(monkeypatch, config=config, indexer=indexer)
    config.compilation_config.static_forward_context["indexer"] = indexer.k_cache
    make_impl(monkeypatch, config=config)
