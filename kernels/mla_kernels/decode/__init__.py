# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over a paged cache. Which kernel computes it:

| impl | where | what it takes |
|---|---|---|
| hopper | hopper/bf16/ | sm_90: q and cache in bf16 |
| | hopper/fp8/ | q in bf16, cache in fp8 or fp8_ds_mla |
| | hopper/fp8_query/ | q and cache in fp8 |
| triton | triton/many_rows/ | sm_90: bf16 and fp16 from 17 query rows on |
| | triton/few_rows_fp8/ | sm_90: fp8 up to 32 rows, if TMA can read the cache |
| | triton/few_rows/ | sm_89 and later, on sm_90 up to 32 rows: other fp8 and fp8_ds_mla caches; |
| | | on sm_90 bf16 of 17 to 32 rows that TMA cannot read |
| | triton/ | everything else |
| torch | torch_sdpa.py | rescale "flash" on a CPU |
| | torch_impl.py | the rest |

Query rows are heads times new tokens, of one request. The first three are tried before the others
(`choice.py`, `hopper/support.py`); those of "triton" in this order (`triton/launcher.py`), all but
the last with pow2, blocks of 64 tokens and rows of 512 + 64 alone, and the few-rows ones with q in
bf16 alone.

A folder is named as its `impl`, one in it as its kernel. What lies beside these is shared: of
hopper/ also by many_rows and few_rows_fp8, as by sparse/hopper.

All kernels of "hopper" and "triton" read one kind of plan, which says what part of the cache each
program reads: plan/api.py is for callers, plan/launcher.py has its buffers and constants,
plan/kernel.py fills them and merge/ joins what was cut. Into how many parts, and what may be
spared, is said by hopper/parts.py and triton/parts.py.
"""
