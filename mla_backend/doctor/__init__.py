# SPDX-License-Identifier: Apache-2.0
"""`mla-backend doctor`: what would keep the backend from working here, and the mend for it.

`facts` looks at the machine once; the checks are pure functions of what it saw; `report` prints.
"""

from mla_backend.doctor import facts, implementations, report
from mla_backend.doctor.checks import CHECKS
from mla_backend.doctor.selftest import run as run_selftest


def main(*, json_output: bool = False, selftest: bool = False) -> int:
    """Print every check; 1 if one of them failed, else 0 (warnings do not count)."""
    seen = facts.collect()
    results = [check(seen) for check in CHECKS] + implementations.results(seen)
    if selftest:
        results += run_selftest()
    print(report.as_json(results) if json_output else report.as_text(results))
    return int(any(result.status == "fail" for result in results))
