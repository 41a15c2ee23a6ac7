# SPDX-License-Identifier: Apache-2.0
"""Sparse layers that read what an earlier one chose (GLM-5), where that would be another choice."""

import pytest

from mla_backend.attention import support


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
