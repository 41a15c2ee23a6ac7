# SPDX-License-Identifier: Apache-2.0
"""For vLLM 0.26 to 0.28 on CPU: its MLA layer wants a prefill backend object, and has none there.

`ExpandedPrompts.forward_mha` computes prefill on CPU by itself, so this one is made and never
asked.
"""

from typing import Any, NoReturn

from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend


class CpuPrefillPlaceholder(MLAPrefillBackend):
    """Holds the place; see the module."""

    @staticmethod
    def get_name() -> str:
        return "CPU_PLACEHOLDER"

    def run_prefill_new_tokens(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("prefill on CPU belongs to ExpandedPrompts.forward_mha")

    def run_prefill_context_chunk(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("prefill on CPU belongs to ExpandedPrompts.forward_mha")
