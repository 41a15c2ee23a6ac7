# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention for Hopper (sm_90a) in Gluon: bf16 q, kv_lora_rank 512, rope 64."""
