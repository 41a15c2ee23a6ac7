# SPDX-License-Identifier: Apache-2.0
"""Energy and clock of the GPU while something runs, from NVML (nvidia-ml-py, the extra `bench`)."""

import threading
import time
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

POLL_SECONDS = 0.005


def find_nvml() -> ModuleType | None:
    """nvidia-ml-py, or the copy that vLLM carries."""
    try:
        import pynvml
    except ImportError:
        try:
            from vllm.third_party import pynvml
        except ImportError:
            return None
    return pynvml


class PowerMeter:
    """Polls NVML from a thread between `start` and `read`. Without NVML it reads nothing."""

    def __init__(self) -> None:
        self._nvml = find_nvml()
        self._samples: list[tuple[float, int, int]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self._nvml is None:
            print("neither nvidia-ml-py nor vLLM is installed: no energy", flush=True)
            return
        self._nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self._device = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def start(self) -> None:
        if self._nvml is not None:
            self._samples.clear()
            self._stop.clear()
            self._thread = threading.Thread(target=self._poll, daemon=True)
            self._thread.start()

    def _poll(self) -> None:
        nvml: Any = self._nvml
        while not self._stop.wait(POLL_SECONDS):
            energy = nvml.nvmlDeviceGetTotalEnergyConsumption(self._device)
            clock = nvml.nvmlDeviceGetClockInfo(self._device, nvml.NVML_CLOCK_SM)
            self._samples.append((time.monotonic(), energy, clock))

    def read(self) -> dict[str, float]:
        """Stop; mean watts and SM clock in MHz since `start`, or nothing."""
        self._stop.set()
        if self._thread is None:
            return {}
        self._thread.join()
        self._thread = None
        return summarise(self._samples)


def summarise(samples: list[tuple[float, int, int]]) -> dict[str, float]:
    """watts and sm_mhz of (seconds, millijoules, MHz) samples.

    The energy counter moves in steps, up to tenths of a second apart: only the moments at which it
    moved are used, the first and the last of them.
    """
    moved = [
        (now, energy) for (_, before, _), (now, energy, _) in pairwise(samples) if energy != before
    ]
    if len(moved) < 2:
        return {}
    (t0, e0), (t1, e1) = moved[0], moved[-1]
    return {
        "watts": round((e1 - e0) / (t1 - t0) / 1e3, 1),
        "sm_mhz": round(sum(clock for _, _, clock in samples) / len(samples)),
    }
