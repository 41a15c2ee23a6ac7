# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: their memory, and the rates that were measured on them.

`rates.json` is the part of benchmarks/results/*/dense_decode.json that the plan reads;
`python -m mla_serving.plan.rates FILE ...` makes it of such files and prints it.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

# MiB that the driver reports; `--gpu-memory-gib` for another or an exact figure.
MEMORY_MIB = {
    "a100-40": 40960,
    "a100": 81920,
    "h20": 97871,
    "h100": 81559,
    "h200": 143771,
    "b200": 183359,
    "l40s": 46068,
    "rtx4090": 24564,
}
SM_80 = ("a100-40", "a100")  # those of compute capability 8.0
SM_10X = ("b200",)  # and 10.x
_SOURCE = "benchmarks/results/{gpu}/dense_decode.json"
_CASE = re.compile(r"b(\d+)_h(\d+)_q1_k(\d+)(?:_(fp8|fp8_ds_mla))?")
_OURS = re.compile(r"mla_kernels/(hopper|triton)/pow2")


@dataclass(frozen=True)
class Case:
    """One measured decode call: batch x context with `heads`, one new token a request."""

    name: str
    batch: int
    heads: int
    context: int
    cache: str  # "16 bit", "fp8" or "fp8_ds_mla"
    us: float
    floor_us: float

    def distance(self, batch: int, heads: int, context: float) -> float:
        """How unlike another call it is, by ratios; heads weigh most."""
        work = abs(math.log(self.batch * self.context / (batch * context)))
        heads_apart = abs(math.log(self.heads / heads))
        return 4 * heads_apart + work + abs(math.log(self.batch / batch))


@dataclass(frozen=True)
class Rates:
    """`read_gbps` and `gemm_tflops` are the roofs that were measured beside the cases."""

    gpu: str
    source: str
    read_gbps: float
    gemm_tflops: float
    cases: tuple[Case, ...]

    def with_cache(self, cache: str) -> list[Case]:
        return [case for case in self.cases if case.cache == cache]


def load(gpu: str) -> Rates | None:
    """What was measured on `gpu`; None if nothing was."""
    table = json.loads((resources.files(__package__) / "rates.json").read_text())
    if gpu not in table:
        return None
    entry = table[gpu]
    cases = tuple(Case(**case) for case in entry.pop("cases"))
    return Rates(gpu=gpu, cases=cases, **entry)


def known_name(driver_name: str) -> str:
    """The name here of a GPU that the driver calls, say, "NVIDIA H100 80GB HBM3". ValueError for
    one that MEMORY_MIB lacks."""
    for gpu in sorted(MEMORY_MIB, key=len, reverse=True):  # h200 before h20
        if gpu in driver_name.lower().replace(" ", ""):
            return gpu
    raise ValueError(f"Expected a GPU of {', '.join(MEMORY_MIB)}, got {driver_name!r}")


def table(report: dict[str, Any]) -> dict[str, Any]:
    """What `rates.json` has of one GPU, by its name, from the results of
    benchmarks/dense_decode.py: our faster kernel of each case."""
    best: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        match = _CASE.fullmatch(row["case"])
        if match is None or "us" not in row or _OURS.fullmatch(row["impl"]) is None:
            continue
        if row["case"] in best and best[row["case"]]["us"] <= row["us"]:
            continue
        batch, heads, context, cache = match.groups()
        best[row["case"]] = {
            "name": row["case"],
            "batch": int(batch),
            "heads": int(heads),
            "context": int(context),
            "cache": cache or "16 bit",
            "us": row["us"],
            "floor_us": row["floor_us"],
        }
    machine = report["machine"]
    gpu = known_name(machine["gpu"])
    return {
        gpu: {
            "source": _SOURCE.format(gpu=gpu),
            "read_gbps": machine["read_gbps"],
            "gemm_tflops": machine["bf16_gemm_tflops"],
            "cases": list(best.values()),
        }
    }


if __name__ == "__main__":
    tables: dict[str, Any] = {}
    for name in sys.argv[1:]:
        tables |= table(json.loads(Path(name).read_text()))
    print(json.dumps(tables, indent=1))
