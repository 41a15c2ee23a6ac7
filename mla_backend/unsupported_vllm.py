# SPDX-License-Identifier: Apache-2.0
"""Stands in for the backend with a vLLM outside the supported range: importing it says why."""

from mla_backend.compat import require_supported_vllm

require_supported_vllm()
