# SPDX-License-Identifier: Apache-2.0
"""How the Triton kernels of this process run."""

import triton

# True when kernels run in Triton's CPU interpreter. A kernel is bound to it when its module is
# imported, so this is read once and never changes.
INTERPRET: bool = bool(triton.knobs.runtime.interpret)
