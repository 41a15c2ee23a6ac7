# SPDX-License-Identifier: Apache-2.0
"""The Hopper decode kernel for fp8 queries and fp8 caches, which multiplies in fp8 (Gluon)."""
