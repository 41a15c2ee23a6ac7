# SPDX-License-Identifier: Apache-2.0
"""What Triton cannot say of an NVIDIA GPU: counters in shared memory, a store in any layout.

The instructions run in program order, once for each element: a tensor whose elements are counted
or stored must have at least as many as its program has threads.
"""

import triton
import triton.language as tl

from mla_kernels.topk.plan import LIST_ROOM

BINS = tl.constexpr(1024)
ROW = tl.constexpr(32)
# Two sets of 1024 counters, one for what is not counted, 32 sums of rows; in bytes, and between.
SUMS = tl.constexpr(4 * 1056)
SET = tl.constexpr(8192)
COUNTERS = tl.constexpr(
    """{
    .shared .align 16384 .b32 topk_counters[4096];
    mov.u32 $0, topk_counters;
    }"""
)
# Two sets of 2048 counters and one for what is not counted; a copy of 2048 sums, 32 sums of them.
WIDE = tl.constexpr(2048)
WIDE_ROW = tl.constexpr(64)
WIDE_SET = tl.constexpr(4 * 2080)
WIDE_COPY = tl.constexpr(4 * 4160)
WIDE_SUMS = tl.constexpr(4 * 6208)
WIDE_COUNTERS = tl.constexpr(
    """{
    .shared .align 16 .b32 topk_wide_counters[6240];
    mov.u32 $0, topk_wide_counters;
    }"""
)
WRITE = tl.constexpr("{ st.shared.b32 [$1], $2; mov.b32 $0, 0; }")
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

POPCOUNT = tl.constexpr("popc.b32 $0, $1;")
LIST = tl.constexpr(
    f"""{{
    .shared .align 16 .b32 topk_list[{LIST_ROOM}];
    mov.u32 $0, topk_list;
    }}"""
)
WRITE_WHERE = tl.constexpr(
    """{
    .reg .pred inside;
    .reg .b32 address;
    setp.ge.s32 inside, $2, 0;
    mad.lo.s32 address, $2, 4, $1;
    @inside st.shared.b32 [address], $3;
    mov.b32 $0, 0;
    }"""
)
STORE_LOWEST = """
    setp.ne.b32 more, bits, 0;
    setp.lt.and.s32 more, at, $5, more;
    brev.b32 high, bits;
    clz.b32 place, high;
    add.s32 place, place, $4;
    mad.lo.s32 address, at, 4, $1;
    @more st.shared.b32 [address], place;
    add.s32 at, at, 1;
    sub.s32 high, bits, 1;
    and.b32 bits, bits, high;
"""
STORE_BITS = tl.constexpr(
    """{
    .reg .pred more;
    .reg .b32 bits, at, high, place, address;
    mov.b32 at, $2;
    mov.b32 bits, $3;
"""
    # Most have few bits: without jumps the steps of several elements overlap.
    + 4 * STORE_LOWEST
    + """
    next_bit:
    setp.ne.b32 more, bits, 0;
    @!more bra no_more;
"""
    + STORE_LOWEST
    + """
    bra next_bit;
    no_more:
    mov.b32 $0, 0;
    }"""
)


@triton.jit
def run(code: tl.constexpr, constraints: tl.constexpr, args):
    return tl.inline_asm_elementwise(code, constraints, args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bins():
    return tl.arange(0, BINS // ROW)[:, None] * ROW + tl.arange(0, ROW)[None, :]


@triton.jit
def other_counters(counters):
    return counters ^ SET


@triton.jit
def reserve_counters():
    """Address of the counters. Each call in a kernel takes 16 KB of shared memory."""
    return run(COUNTERS, "=r", [])


@triton.jit
def clear_counters(counters):
    """Zeroes a set of counters."""
    run(WRITE, "=r,r,r", [counters + bins() * 4, 0])
    tl.debug_barrier()


@triton.jit
def count_in_shared(counters, digits):
    """Counts digits (0..1023; 1024 is not counted)."""
    run(COUNT, "=r,r", [counters + digits * 4])


@triton.jit
def sums_of_counts(counters):
    """[32] sums of the counts of 32 digits each; clears the other set. Sums of integers do not
    depend on the order of the additions.
    """
    tl.debug_barrier()
    counts = run(READ, "=r,r", [counters + bins() * 4])
    sums = tl.sum(counts, axis=1)
    run(WRITE, "=r,r,r", [counters + SUMS + tl.arange(0, ROW) * 4, sums])
    run(WRITE, "=r,r,r", [other_counters(counters) + bins() * 4, 0])
    tl.debug_barrier()
    return run(READ, "=r,r", [counters + SUMS + tl.arange(0, ROW) * 4])


@triton.jit
def counts_of_row(counters, row):
    """[32] counts of the digits 32 row .. 32 row + 31."""
    return run(READ, "=r,r", [counters + (row * ROW + tl.arange(0, ROW)) * 4])


@triton.jit
def wide_bins():
    return tl.arange(0, WIDE // WIDE_ROW)[:, None] * WIDE_ROW + tl.arange(0, WIDE_ROW)[None, :]


@triton.jit
def wide_counters(step):
    """Address of the counters, zero for a first step."""
    counters = run(WIDE_COUNTERS, "=r", [])
    run(WRITE, "=r,r,r", [counters + (step & 1) * WIDE_SET + wide_bins() * 4, 0])
    tl.debug_barrier()
    return counters


@triton.jit
def count_wide(counters, step, digits):
    """[32, 64] counts of digits (0..2047; 2048 is not counted), in one set of counters after the
    other. Clears the other set: those who read it are behind a barrier, and those who will count
    in it have the one of `share_wide` before them."""
    own = counters + (step & 1) * WIDE_SET
    run(COUNT, "=r,r", [own + digits * 4])
    tl.debug_barrier()
    other = counters + ((step & 1) ^ 1) * WIDE_SET
    run(WRITE, "=r,r,r", [other + wide_bins() * 4, 0])
    return run(READ, "=r,r", [own + wide_bins() * 4])


@triton.jit
def share_wide(counters, counts):
    """[32] sums of the rows of [32, 64] counts, in every warp; `pairs_of_row` reads the counts."""
    run(WRITE, "=r,r,r", [counters + WIDE_COPY + wide_bins() * 4, counts])
    sums_at = counters + WIDE_SUMS + tl.arange(0, WIDE // WIDE_ROW) * 4
    run(WRITE, "=r,r,r", [sums_at, tl.sum(counts, axis=1)])
    tl.debug_barrier()
    return run(READ, "=r,r", [sums_at])


@triton.jit
def pairs_of_row(counters, row):
    """The 64 shared counts of a row as two [32], the even and the odd ones."""
    at = counters + WIDE_COPY + (row * WIDE_ROW + tl.arange(0, WIDE_ROW // 2) * 2) * 4
    return run(READ, "=r,r", [at]), run(READ, "=r,r", [at + 4])


@triton.jit
def again(x):
    """x as a new value: what is computed from it is computed again, not kept in registers."""
    return run("mov.b32 $0, $1;", "=r,r", [x])


@triton.jit
def scatter(ptr, index, values):
    """ptr[index] = values where index >= 0, as the threads hold them. `tl.store` would exchange
    the values between the threads first."""
    run(STORE, "=r,l,r,r", [ptr.to(tl.int64), index, values])


@triton.jit
def popcount(x):
    """How many bits of x are set."""
    return run(POPCOUNT, "=r,r", [x])


@triton.jit
def reserve_list():
    """Address of LIST_ROOM words of shared memory. Each call in a kernel takes them anew."""
    return run(LIST, "=r", [])


@triton.jit
def read(address):
    """Words in shared memory."""
    return run(READ, "=r,r", [address])


@triton.jit
def write_where(list_at, index, values):
    """list_at[index] = values where index >= 0."""
    run(WRITE_WHERE, "=r,r,r,r", [list_at, index, values])


@triton.jit
def list_bits(list_at, at, bits, place, room):
    """list_at[at], list_at[at + 1], ... = place + the number of each bit that is set; none from
    `room` on."""
    run(STORE_BITS, "=r,r,r,r,r,r", [list_at, at, bits, place, room])
