# SPDX-License-Identifier: Apache-2.0
"""Drafts with `disable_padded_drafter_batch`.

On a CPU the lengths of a step and the host's bound of them are then one tensor. vLLM adds the
drafted token to both, so that from the second draft on more tokens are read than there are.
"""

import functools
from typing import Any


def unshare_lengths(drafter: Any) -> None:
    """Give the steps of vLLM's `drafter` lengths of their own, if it cuts rejected drafts off."""
    if not hasattr(drafter, "prepare_inputs"):  # no drafts, or no model that makes them
        return
    prepare = drafter.prepare_inputs

    @functools.wraps(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        common, token_indices = prepare(*args, **kwargs)
        return common.replace(seq_lens=common.seq_lens.clone()), token_indices

    drafter.prepare_inputs = prepare_inputs
