# SPDX-License-Identifier: Apache-2.0
"""The portable kernel's form for more than 16 query rows of 16-bit caches on sm_90 (Gluon)."""
