# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the Lightning Indexer."""
