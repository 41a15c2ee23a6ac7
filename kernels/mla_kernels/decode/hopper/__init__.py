# SPDX-License-Identifier: Apache-2.0
"""impl="hopper": dense MLA decode for sm_90a in Gluon, kv_lora_rank 512, rope 64, page 64. Each
kernel has a folder; here is what they share, and the launcher that chooses among them."""
