# SPDX-License-Identifier: Apache-2.0
"""A whole MLA layer's decode step: see `mla_layer`."""

from mla_kernels.layer.api import mla_layer
from mla_kernels.layer.buffers import MlaLayerBuffers
from mla_kernels.layer.config import MlaLayerConfig
from mla_kernels.layer.rope import rope_table
from mla_kernels.layer.weights import MlaLayerWeights

__all__ = ["MlaLayerBuffers", "MlaLayerConfig", "MlaLayerWeights", "mla_layer", "rope_table"]
