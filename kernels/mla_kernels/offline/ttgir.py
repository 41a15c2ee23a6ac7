# SPDX-License-Identifier: Apache-2.0
"""Reading Triton's GPU dialect, in which the compiler gives shared memory its places."""

import re

_BARRIERS = re.compile(r"(%[\w#]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*xi64")
_VIEW = re.compile(r"\s*(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)")
_NAME = re.compile(r"%[\w#]+")
# A worker's region of a warp_specialize, which numbers its values anew; what it gets from outside
# is named with the operation.
_REGION = re.compile(r"^\s*partition\d+\(.*?^\s*ttg\.warp_return", re.DOTALL | re.MULTILINE)


def unused_barriers(ttgir: str) -> tuple[str, ...]:
    """Names of mbarriers that are made, and neither waited for nor arrived at.

    They are dead to the compiler at once, and their places become a tile's or a reduction's. PTX
    allows that only behind an mbarrier.inval.
    """
    ttgir = _REGION.sub("", ttgir)
    made = _BARRIERS.findall(ttgir)
    whole = {name: name for name in made}
    used = set()
    for line in ttgir.splitlines():
        if view := _VIEW.match(line):
            if view[2] in whole:
                whole[view[1]] = whole[view[2]]
        elif "ttng.init_barrier" not in line and not _BARRIERS.search(line):
            used |= {whole[name] for name in _NAME.findall(line) if name in whole}
    return tuple(name for name in made if name not in used)
