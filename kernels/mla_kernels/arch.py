# SPDX-License-Identifier: Apache-2.0
"""What the supported GPU architectures offer: the one table that tile choices, kernel flags and
the offline compile checks read.

Numbers from the CUDA C++ programming guide, table "technical specifications per compute
capability". One CTA can use 1 KB less than the SM has; each resident CTA reserves that 1 KB.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

KB = 1024
MAX_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True)
class Arch:
    """One architecture.

    sm                    compute capability as an integer (90 = 9.0); 0 for AMD
    shared_memory         bytes one CTA may use
    shared_memory_per_sm  bytes of the SM; tests hold tiles of several CTAs an SM against it
    tensor_core           instruction family of `tl.dot` on it
    e4m3_convert          has e4m3fn conversion instructions (else: integer operations)
    programmatic_launch   has programmatic dependent launch (griddepcontrol)
    """

    sm: int
    shared_memory: int
    shared_memory_per_sm: int
    tensor_core: Literal["mma", "wgmma", "tcgen05", "mfma"]
    e4m3_convert: bool
    programmatic_launch: bool

    @property
    def name(self) -> str:
        return f"sm_{self.sm}" if self.sm else "amd"


ARCHS: dict[int, Arch] = {
    80: Arch(80, 163 * KB, 164 * KB, "mma", False, False),
    86: Arch(86, 99 * KB, 100 * KB, "mma", False, False),
    89: Arch(89, 99 * KB, 100 * KB, "mma", True, False),
    90: Arch(90, 227 * KB, 228 * KB, "wgmma", True, True),
    100: Arch(100, 227 * KB, 228 * KB, "tcgen05", True, True),
    120: Arch(120, 99 * KB, 100 * KB, "mma", True, True),
}

# CDNA has no e4m3fn instructions (its fp8 is e4m3fnuz) and 64 KB of LDS a work-group.
AMD = Arch(0, 64 * KB, 64 * KB, "mfma", False, False)


def get_arch(sm: int) -> Arch:
    """The entry of compute capability `sm`, or of the closest lower one of the same generation.

    sm_87 is served as sm_86, sm_103 as sm_100, sm_121 as sm_120: never with more shared memory
    than the device has. ValueError for a generation that the kernels are not built for.
    """
    served = [a for a in ARCHS if a <= sm and a // 10 == sm // 10]
    if not served:
        *first, last = map(str, ARCHS)
        raise ValueError(f"Expected a GPU of sm_{', '.join(first)} or {last}, got sm_{sm}")
    return ARCHS[max(served)]


@cache
def device_arch(device: torch.device) -> Arch:
    """The entry of a torch device, with its index ("cuda:0"). ValueError for an unserved one."""
    if device.type != "cuda":
        raise ValueError(f"Expected a CUDA or ROCm device, got {device}")
    if torch.version.hip is not None:
        return AMD
    major, minor = torch.cuda.get_device_capability(device)
    return get_arch(10 * major + minor)


def arch_of(device: torch.device) -> Arch:
    """The device's entry; in the interpreter that of sm_90."""
    return ARCHS[90] if device.type == "cpu" else device_arch(device)
