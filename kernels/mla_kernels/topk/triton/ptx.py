# SPDX-License-Identifier: Apache-2.0
"""What Triton cannot say of an NVIDIA GPU: counters in shared memory, a store in any layout.

The instructions run in program order, once for each element: a tensor must have at least as many
elements as its program has threads.
"""

import triton
import triton.language as tl

# The last counter takes what is not counted.
COUNTERS = tl.constexpr(
    """{
    .shared .align 16 .b32 topk_counters[1025];
    mov.u32 $0, topk_counters;
    }"""
)
CLEAR = tl.constexpr("{ st.shared.b32 [$1], 0; mov.b32 $0, 0; }")
COUNT = tl.constexpr("{ red.shared.add.u32 [$1], 1; mov.b32 $0, 0; }")
READ = tl.constexpr("ld.shared.b32 $0, [$1];")
STORE = tl.constexpr(
    """{
    .reg .pred inside;
    .reg .b64 address;
    setp.ge.s32 inside, $2, 0;
    mad.wide.s32 address, $2, 4, $1;
    @inside st.global.b32 [address], $3;
    mov.b32 $0, 0;
    }"""
)


@triton.jit
def run(code: tl.constexpr, constraints: tl.constexpr, args):
    return tl.inline_asm_elementwise(code, constraints, args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_in_shared(digits, bins):
    """int32, in the shape of `bins`: how many of the digits (0..1024) equal each bin (0..1023).

    Sums of integers do not depend on the order of the additions.
    """
    counters = run(COUNTERS, "=r", [])
    run(CLEAR, "=r,r", [counters + bins * 4])
    tl.debug_barrier()
    run(COUNT, "=r,r", [counters + digits * 4])
    tl.debug_barrier()
    return run(READ, "=r,r", [counters + bins * 4])


@triton.jit
def again(x):
    """x as a new value: what is computed from it is computed again, not kept in registers."""
    return run("mov.b32 $0, $1;", "=r,r", [x])


@triton.jit
def scatter(ptr, index, values):
    """ptr[index] = values where index >= 0, as the threads hold them. `tl.store` would exchange
    the values between the threads first."""
    run(STORE, "=r,l,r,r", [ptr.to(tl.int64), index, values])
