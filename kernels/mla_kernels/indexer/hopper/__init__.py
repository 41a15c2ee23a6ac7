# SPDX-License-Identifier: Apache-2.0
"""The indexer's score kernel for sm_90 (Gluon)."""
