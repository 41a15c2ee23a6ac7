# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters beside MLA layers.

Decode tokens attend in absorbed form, with W_UK and W_UV that vLLM splits off `kv_b_proj` after
loading, and prompts with that layer as it was before vLLM wrapped it. So neither would see an
adapter's part of it, and tokens would be those of no model.
"""

from typing import Any
from weakref import WeakSet

from mla_backend import compat
from mla_backend.refusals import cannot_serve

_ABSORBED = "kv_b_proj"
# Other engines of the process may have another backend, to which such adapters are none.
_impls: WeakSet[Any] = WeakSet()


def refuse_absorbed_adapters(impl: Any, vllm_config: Any) -> None:
    """Have adapters on `kv_b_proj` refused as they are loaded for a model that has a layer with
    this implementation, if the engine takes any."""
    if getattr(vllm_config, "lora_config", None) is not None:
        _impls.add(impl)
        compat.check_adapters(_refuse)


def _refuse(name: str, modules: list[str], model: Any) -> None:
    """ValueError for an adapter that changes what attention does not read."""
    found = [module for module in modules if module.rpartition(".")[2] == _ABSORBED]
    if found and any(getattr(layer, "impl", None) in _impls for layer in model.modules()):
        raise cannot_serve(
            f"the LoRA adapter {name}, as it changes {found[0]} (one of {len(found)}), which "
            "attention reads without adapters. Mend: merge the adapter into the weights, train it "
            f"without {_ABSORBED}, or name other modules in --lora-target-modules, which leaves "
            "this part of it out"
        )
