# SPDX-License-Identifier: Apache-2.0
"""Dimensions of an MLA layer."""

import math
from dataclasses import dataclass, fields
from numbers import Real

from mla_kernels.checks import check_range
from mla_kernels.layouts import MlaDims


@dataclass(frozen=True)
class MlaLayerConfig:
    """Widths in elements; the defaults are DeepSeek-V3's (DeepSeek-V2 paper, section 2.1)."""

    dim: int = 7168
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    num_heads: int = 128
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "rope_theta":
                check_range(field.name, value, 1, 2**31 - 1)
                object.__setattr__(self, field.name, int(value))  # of NumPy's, too
            elif isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"Expected a number for rope_theta, got {value!r}")
            elif not value < math.inf or value <= 0:
                raise ValueError(f"Expected a finite rope_theta > 0, got {value!r}")
        if self.rope_dim % 2:
            raise ValueError(f"Expected an even rope_dim, got {self.rope_dim}")

    @property
    def cache(self) -> MlaDims:
        return MlaDims(self.kv_lora_rank, self.rope_dim)

    @property
    def qk_dim(self) -> int:
        """Width of a query and a key before absorption."""
        return self.nope_dim + self.rope_dim

    @property
    def down_dim(self) -> int:
        """Width of the joint down-projection: query latent, kv latent, rope part of the key."""
        return self.q_lora_rank + self.cache.head_dim

    @property
    def scale(self) -> float:
        """Softmax scale: that of the un-absorbed head, whose products the absorbed ones equal."""
        return self.qk_dim**-0.5
