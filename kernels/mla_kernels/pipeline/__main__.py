# SPDX-License-Identifier: Apache-2.0
import sys

from mla_kernels.pipeline.cli import main

sys.exit(main())
