# SPDX-License-Identifier: Apache-2.0
"""The decode kernel for 16 and 32 query rows on mma.sync, with explicit layouts (Gluon)."""
