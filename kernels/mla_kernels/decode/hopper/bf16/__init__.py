# SPDX-License-Identifier: Apache-2.0
"""The Hopper decode kernel for bf16 queries and bf16 caches (Gluon)."""
