# SPDX-License-Identifier: Apache-2.0
"""The two parts of absorbed queries, joined."""
