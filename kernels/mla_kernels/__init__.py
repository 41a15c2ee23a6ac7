# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention kernels for torch and Triton. Imports no serving engine."""
