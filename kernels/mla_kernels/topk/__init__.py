# SPDX-License-Identifier: Apache-2.0
"""Exact, deterministic top-k of score rows."""
