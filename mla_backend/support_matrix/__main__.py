# SPDX-License-Identifier: Apache-2.0
"""Print docs/support.md."""

import sys

from mla_backend.support_matrix import markdown


def main() -> int:
    try:
        page = markdown()
    except ImportError as error:
        mend = "The page asks vLLM and the Triton kernels: `make setup` installs both"
        print(f"python -m mla_backend.support_matrix: {error}. {mend}", file=sys.stderr)
        return 1
    print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
