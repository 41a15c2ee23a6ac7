# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: turns vLLM's attention metadata into calls of `mla_kernels`. Holds no kernel."""

__version__ = "0.1.0"
