# SPDX-License-Identifier: Apache-2.0
"""Joining what a plan has cut: run after every kernel of "hopper" and "triton"."""
