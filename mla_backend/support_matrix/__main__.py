# SPDX-License-Identifier: Apache-2.0
"""Print docs/support.md."""

from mla_backend.support_matrix import markdown

if __name__ == "__main__":
    print(markdown(), end="")
