# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention: every query token attends to the cache rows that its slots name."""
