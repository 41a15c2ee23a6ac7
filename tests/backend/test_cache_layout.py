# SPDX-License-Identifier: Apache-2.0
"""The pages of a layer lie side by side, as the Hopper kernels need them."""

import pytest


def backends():
    from mla_backend.attention.backend import MlaBackend
    from mla_backend.attention.sparse.backend import SparseMlaBackend

    return [MlaBackend, SparseMlaBackend]


def test_no_layout_puts_other_layers_between_the_pages():
    pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM 0.26 asks for a stride order")
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    layouts = get_supported_kv_cache_layouts(backends())
    assert layouts[0].name == "LBNHC"  # vLLM's own default
    assert all(layout.is_layer_compact for layout in layouts)


def test_vllm_026_makes_no_cache_for_all_layers():
    for backend in backends():
        assert backend.get_kv_cache_stride_order() == (0, 1, 2)
        with pytest.raises(NotImplementedError):  # as vLLM expects of a backend that cannot
            backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
