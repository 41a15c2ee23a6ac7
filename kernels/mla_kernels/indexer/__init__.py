# SPDX-License-Identifier: Apache-2.0
"""Lightning Indexer of DeepSeek-V3.2: scores, fused top-k, cache writes, positions to slots."""
