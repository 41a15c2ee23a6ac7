# SPDX-License-Identifier: Apache-2.0
"""What is known of each version of Triton; tests/project/test_docs.py holds the times to the
results."""

from mla_kernels.versions import NEWEST_TRITON, OLDEST_TRITON

TABLE = """\
| Triton | of vLLM | kernels' tests | engines | Hopper | portable | fp8 queries | spills |
|---|---|---|---|---|---|---|---|
| 3.6 | 0.26 | H200 | H200, two H100s | 1 | 1 | 1 | none |
| 3.7.1 | 0.27 to 0.32 | H200 | 0.32: H200, two H100s | [0.998][3.7] | 1.005 | 1.007 | single ones |
| 3.8 | 0.33 | H100 | 0.33: two H100s | [1.001][3.8] | 1.004 | 0.973 | single ones |
| 3.9 | none yet | H200 | - | [0.992][3.9] | 1.014 | 1.078 | most for Hopper |

[3.7]: ../benchmarks/results/h200/triton_3.7.1/dense_decode.md
[3.8]: ../benchmarks/results/h100/triton_3.8/dense_decode.md
[3.9]: ../benchmarks/results/h200/triton_3.9/dense_decode.md
"""


def describe_tritons() -> str:
    oldest, newest = ("{}.{}".format(*v) for v in (OLDEST_TRITON, NEWEST_TRITON))
    return (
        f"Triton {oldest} to {newest}; an older one is refused, of a newer one the doctor warns. "
        "Measurements are with 3.6. Behind the engines: the time of dense decode with the Hopper "
        "kernels, the portable ones and fp8 queries, as a part of 3.6's, the mean of 41, 41 and 9 "
        "cases (3.7.1: 36, 36 and 8). `spills`: kernels in which the compiler moves registers to "
        "memory within a loop.\n\n"
        f"{TABLE}\n"
        "The times with 3.8 are beside those of an older run on another H100. Of the kernels' "
        "tests with it two fail, which refuse spills in a loop; a third failed once, among the "
        "last of a run that was cut off before it named them.\n"
    )
