# SPDX-License-Identifier: Apache-2.0
"""Case builders and plain models that tests and benchmarks share."""
