# SPDX-License-Identifier: Apache-2.0
"""The sparse kernel for few heads on mma.sync, with explicit layouts (Gluon)."""
