# SPDX-License-Identifier: Apache-2.0
"""impl="triton": the portable kernel, and in folders those that launcher.py takes where they are
faster; many_rows/ and few_rows_fp8/ are for sm_90 alone."""
