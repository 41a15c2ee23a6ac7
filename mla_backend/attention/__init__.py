# SPDX-License-Identifier: Apache-2.0
"""The dense MLA attention backend: what vLLM's selector, builder and layers see."""
