# SPDX-License-Identifier: Apache-2.0
"""The join of query parts against torch.cat, bit for bit."""

import pytest
import torch
from mla_kernels.query import api as query_api
from mla_kernels.query.api import join_query


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("T", "H", "R", "P"), [(1, 1, 512, 64), (3, 16, 512, 64), (5, 6, 256, 32), (2, 128, 512, 64)]
)
def test_equals_cat_for_the_views_of_a_layer(T, H, R, P, dtype):
    latent = torch.randn(H, T, R).to(dtype).transpose(0, 1)  # out of a product over heads
    rope = torch.randn(T, H, 128 + P).to(dtype)[..., 128:]  # the end of each head's query
    assert torch.equal(join_query(latent, rope), torch.cat((latent, rope), dim=-1))


def test_no_tokens():
    assert join_query(torch.empty(0, 16, 512), torch.empty(0, 16, 64)).shape == (0, 16, 576)


@pytest.mark.parametrize(
    ("latent", "rope", "message"),
    [
        (torch.zeros(2, 4, 512), torch.zeros(2, 3, 64), "q_rope"),
        (torch.zeros(2, 4, 512), torch.zeros(2, 4, 64, dtype=torch.bfloat16), "q_rope"),
        (torch.zeros(2, 512), torch.zeros(2, 4, 64), "q_latent"),
        (torch.zeros(2, 512, 4).mT, torch.zeros(2, 4, 64), "q_latent"),
    ],
)
@pytest.mark.parametrize("interpreted", [False, True])
def test_parts_that_do_not_fit_are_refused(monkeypatch, latent, rope, message, interpreted):
    monkeypatch.setattr(query_api, "triton_refusal", lambda _: None if interpreted else "in torch")
    with pytest.raises(ValueError, match=message):
        join_query(latent, rope)
