# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of AMD GPUs, whose compute capabilities look like those of NVIDIA's."""


def on_amd_gpu() -> bool:
    """Whether this process computes on an AMD GPU: gfx90a calls itself 9.0, gfx942 9.4."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def fp8_is_fnuz() -> bool:
    """Whether fp8 caches are e4m3fnuz here, as on gfx942, which has no e4m3fn."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_fp8_fnuz())
