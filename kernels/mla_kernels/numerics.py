# SPDX-License-Identifier: Apache-2.0
"""Constants of the power-of-two softmax, shared by every implementation.

The scores are put on a fixed grid before the exponential: with L = fp32(scale * log2 e),

    t2 = fma(q . k, L, GRID_OFFSET)          # t = t2 - GRID_OFFSET is a multiple of 2^-12
    P  = bf16(exp2(t2 - (GRID_OFFSET + k)))  # k: the integer reference exponent of the row

The subtraction is exact and exp2 commutes with integer shifts, so neither the moment of a rescale
nor the choice of k changes a bit of the result. AMLA (section 3) rescales by powers of two; the
grid and the lazy threshold are this project's.
"""

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# 1.5 * 2^11: fp32 numbers near it are 2^-12 apart, so adding it snaps t to that grid.
GRID_OFFSET = 3072.0

# Finite stand-in for "no score seen yet" (a -inf reference turns a fully masked block into NaN).
EXPONENT_FLOOR = -float(2**20)

# Lazy rescale: the reference follows the row maximum only when that is more than 2^TAU above it.
TAU = 8.0
