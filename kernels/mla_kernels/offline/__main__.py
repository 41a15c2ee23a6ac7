# SPDX-License-Identifier: Apache-2.0
import sys

from mla_kernels.offline.cli import main

# Worker processes import this module again under another name.
if __name__ == "__main__":
    sys.exit(main())
