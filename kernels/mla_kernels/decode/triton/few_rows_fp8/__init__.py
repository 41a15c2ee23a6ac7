# SPDX-License-Identifier: Apache-2.0
"""The few-rows kernel for per-tensor fp8 caches on sm_90, with a warp that loads."""
