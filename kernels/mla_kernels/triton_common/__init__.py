# SPDX-License-Identifier: Apache-2.0
"""Device functions and host helpers that several Triton kernels share."""
