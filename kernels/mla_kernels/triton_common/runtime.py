# SPDX-License-Identifier: Apache-2.0
"""How the Triton kernels of this process run."""

from importlib.util import find_spec


def _interpret() -> bool:
    if find_spec("triton") is None:  # needed on a GPU only
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


# True when kernels run in Triton's CPU interpreter. A kernel is bound to it when its module is
# imported, so this is read once and never changes.
INTERPRET: bool = _interpret()
