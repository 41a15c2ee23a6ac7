# SPDX-License-Identifier: Apache-2.0
"""The Hopper decode kernel for fp8 caches, which converts codes in registers (Gluon)."""
