# SPDX-License-Identifier: Apache-2.0
"""DeepSeek Sparse Attention (DeepSeek-V3.2): an indexer picks the tokens that are read."""
