# SPDX-License-Identifier: Apache-2.0
"""What the calls of one step share."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_kernels.decode.plan.api import MlaDecodePlan
from mla_kernels.torch_modes import untraced


@dataclass
class FlashMLASchedMeta:
    """What calls with the same shapes and lengths share, so the layers of one step; take a new one
    for other lengths. Filled by the first call."""

    shape: tuple[object, ...] | None = None
    plans: Sequence[MlaDecodePlan] = ()  # dense: one for every MAX_S_Q new tokens
    checked: tuple[object, ...] | None = None  # the kinds of arguments of the last call


@untraced
def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty `FlashMLASchedMeta` for `flash_mla_with_kvcache`, and None for `num_splits`.

    Takes the arguments of older versions and, like the current one, needs none of them.
    """
    return FlashMLASchedMeta(), None
