# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: their memory, and the rates that were measured on them.

`rates.json` is the part of benchmarks/results/ that the plan reads: of each GPU dense_decode.json
and, as far as there are such, sparse.json and sparse_indexer.json;
`python -m mla_serving.plan.rates FOLDER ...` makes it of such folders and prints it.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
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
SM_90 = ("h20", "h100", "h200")  # of 9.0
SM_10X = ("b200",)  # and 10.x
DENSE, SPARSE, INDEXER = "dense_decode", "sparse", "sparse_indexer"  # benchmarks of `Rates.cases`
INDEX_HEADS, INDEX_TOPK = 64, 2048  # of all cases of the last two
# Our kernels, and the decode cases in each benchmark. Of sparse attention those of one new token a
# request: it takes several as requests of their own.
_ROWS = {
    DENSE: (
        r"mla_kernels/(?P<kernel>hopper|triton)/pow2",
        r"b(?P<batch>\d+)_h(?P<heads>\d+)_q(?P<new>\d+)_k(?P<context>\d+)"
        r"(_(?P<cache>fp8|fp8_ds_mla))?",
    ),
    SPARSE: (
        r"mla_kernels/(?P<kernel>hopper|triton)",
        r"b(?P<batch>\d+)_h(?P<heads>\d+)_q1_\d+k_(?P<cache>bf16|fp8|fp8_ds_mla)"
        r"(?P<half>_half_tail)?",
    ),
    INDEXER: (
        r"mla_kernels/fused(?P<fp8>/fp8_products)?",
        r"b(?P<batch>\d+)x(?P<context>\d+)(_q(?P<new>\d+))?",
    ),
}


@dataclass(frozen=True)
class Case:
    """One measured decode call: `batch` requests, `new_tokens` of each.

    heads    of attention, or of the indexer
    rows     of queries a request: heads of all its new tokens, which read the same
    context  tokens that a request reads: of sparse attention those that the indexer chose
    cache    "16 bit", "fp8" or "fp8_ds_mla"; an indexer's is "fp8"
    us       an indexer's are of scores and top-k
    kernel   "hopper" or "triton"; of an indexer "auto", as each of its ops has its own
    """

    name: str
    batch: int
    heads: int
    context: int
    cache: str
    us: float
    kernel: str = "auto"
    new_tokens: int = 1

    @property
    def rows(self) -> int:
        return self.heads * self.new_tokens

    def distance(self, batch: int, rows: int, context: float) -> float:
        """How unlike another call it is, by ratios; rows weigh most."""
        work = abs(math.log(self.batch * self.context / (batch * context)))
        rows_apart = abs(math.log(self.rows / rows))
        return 4 * rows_apart + work + abs(math.log(self.batch / batch))


@dataclass(frozen=True)
class Rates:
    """`read_gbps` and `gemm_tflops` are the roofs that were measured beside the dense cases;
    `cases` are by benchmark."""

    gpu: str
    read_gbps: float
    gemm_tflops: float
    cases: Mapping[str, tuple[Case, ...]]

    def with_cache(self, benchmark: str, cache: str) -> list[Case]:
        return [case for case in self.cases.get(benchmark, ()) if case.cache == cache]

    def source(self, sparse: bool) -> str:
        """The files behind the roofs and the cases, as a shell's pattern."""
        more = [name for name in (SPARSE, INDEXER) if sparse and name in self.cases]
        names = ",".join([DENSE, *more])
        return f"benchmarks/results/{self.gpu}/{f'{{{names}}}' if more else names}.json"


def load(gpu: str) -> Rates | None:
    """What was measured on `gpu`; None if nothing was."""
    table = json.loads((resources.files(__package__) / "rates.json").read_text())
    if gpu not in table:
        return None
    entry = table[gpu]
    cases = {
        benchmark: tuple(Case(**case) for case in found)
        for benchmark, found in entry.pop("cases").items()
    }
    return Rates(gpu=gpu, cases=cases, **entry)


def known_name(driver_name: str) -> str:
    """The name here of a GPU that the driver calls, say, "NVIDIA H100 80GB HBM3". ValueError for
    one that MEMORY_MIB lacks."""
    for gpu in sorted(MEMORY_MIB, key=len, reverse=True):  # h200 before h20
        if gpu in driver_name.lower().replace(" ", ""):
            return gpu
    raise ValueError(f"Expected a GPU of {', '.join(MEMORY_MIB)}, got {driver_name!r}")


def table(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What `rates.json` has of one GPU, by its name, from the results of its benchmarks."""
    machine = reports[DENSE]["machine"]
    return {
        known_name(machine["gpu"]): {
            "read_gbps": machine["read_gbps"],
            "gemm_tflops": machine["bf16_gemm_tflops"],
            "cases": {name: _cases(name, report["rows"]) for name, report in reports.items()},
        }
    }


def read(folder: Path) -> dict[str, Any]:
    """`table` of the results in a folder."""
    files = {name: folder / f"{name}.json" for name in _ROWS}
    return table({n: json.loads(f.read_text()) for n, f in files.items() if f.exists()})


def _cases(benchmark: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case with each of our kernels; an indexer's with products in fp8, vLLM's default on
    Hopper, where those were measured."""
    ours, cases = map(re.compile, _ROWS[benchmark])
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        match, impl = cases.fullmatch(row["case"]), ours.fullmatch(row["impl"])
        if match is None or "us" not in row or impl is None:
            continue
        kernel = impl.groupdict().get("kernel", "auto")
        key = row["case"], kernel
        if key in found and not impl.groupdict().get("fp8"):
            continue
        of, cache = match.groupdict(), match.groupdict().get("cache", "fp8")
        chosen = INDEX_TOPK // 2 if of.get("half") else INDEX_TOPK
        found[key] = {
            "name": row["case"],
            "batch": int(of["batch"]),
            "heads": int(of.get("heads", INDEX_HEADS)),
            "context": int(of.get("context", chosen)),
            "cache": "16 bit" if cache in (None, "bf16") else cache,
            "us": row["us"],
            "kernel": kernel,
        }
        if (new := int(of.get("new") or 1)) > 1:
            found[key]["new_tokens"] = new
    return list(found.values())


if __name__ == "__main__":
    tables: dict[str, Any] = {}
    for name in sys.argv[1:]:
        tables |= read(Path(name))
    print(json.dumps(tables, indent=1))
