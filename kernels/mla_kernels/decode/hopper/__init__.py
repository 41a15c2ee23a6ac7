# SPDX-License-Identifier: Apache-2.0
"""Dense MLA decode for Hopper (sm_90a) in Gluon: bf16 q, kv_lora_rank 512, rope 64, page 64."""
