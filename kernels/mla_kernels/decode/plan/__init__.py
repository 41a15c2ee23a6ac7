# SPDX-License-Identifier: Apache-2.0
"""The plan of a decode step, which all kernels of "hopper" and "triton" read. Callers: api.py."""
