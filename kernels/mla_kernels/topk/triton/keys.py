# SPDX-License-Identifier: Apache-2.0
"""Order-preserving integer keys of fp32 scores, shared by the kernels of the top-k.

key(x) is uint32 with key(a) < key(b) exactly where a < b; -0 and 0 share a key. -inf and NaN get
UNSELECTABLE, which is below every other key. In memory keys are int32 tensors of the same bits.
"""

import triton
import triton.language as tl

from mla_kernels.topk import plan

GROUP = tl.constexpr(plan.GROUP)
UNSELECTABLE = tl.constexpr(0)
LOWEST = tl.constexpr(0x00800000)  # of the finite scores


@triton.jit
def ordered_key(x, counted=True):
    """fp32 -> uint32 key; UNSELECTABLE where not `counted`."""
    bits = x.to(tl.uint32, bitcast=True)
    # -0 is not below 0.0: its bits are already the key of 0.
    key = tl.where(x < 0.0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where((x > float("-inf")) & counted, key, UNSELECTABLE)


@triton.jit
def score_of_key(key):
    """uint32 key of at least LOWEST -> the fp32 score."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def group_max(keys, N: tl.constexpr):
    """[N] keys -> [N // GROUP], the largest of each group of neighbours."""
    return tl.max(tl.reshape(keys, (N // GROUP, GROUP)), axis=1)


@triton.jit
def load_stored_keys(ptr, mask):
    """Keys from an int32 tensor."""
    return tl.load(ptr, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def store_keys(ptr, keys, mask):
    """Keys into an int32 tensor."""
    tl.store(ptr, keys.to(tl.int32, bitcast=True), mask=mask)
