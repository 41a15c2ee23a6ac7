# SPDX-License-Identifier: Apache-2.0
"""One decode step of a whole MLA layer (the AMD developer challenge's case) beside plain PyTorch.

    python benchmarks/mla_layer.py [--batch B] [--prefill L ...] [--impl NAME ...] [--results DIR]

Each case is checked against a naive fp32 layer first; a case that fails is reported and not timed,
nor is what this GPU cannot run.
Writes results/h200/mla_layer.json and .md beside this file; other GPUs: --results DIR. Of other
cases or implementations than all, and while it runs, it is mla_layer_partial. Times are medians of
CUDA-graph replays with a cold L2; those of the naive layer of eager calls.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import count, length
from gpu import DEVICE, Timer, describe_gpu, need_gpu
from mla_kernels import mla_layer, plan_mla_decode
from mla_kernels.decode.choice import choose_decode_impl
from mla_kernels.layer import MlaLayerBuffers, MlaLayerConfig, MlaLayerWeights, rope_table
from mla_kernels.layer.rope import rotate
from mla_kernels.testing.naive_layer import NaiveMlaLayer
from outputs import claim, command, write, write_json
from partial import gather

PAGE = 64
BATCH, PREFILLS, IMPLS = 128, (512, 2048, 4096, 6144), ("hopper", "triton")
CHECKED_REQUESTS = (0, 1, 77, 127)
NAIVE = "torch/naive"
OUT_OF_MEMORY = "out of memory"
NOT_RUN = "not run"  # of a row that says why


@dataclass
class Case:
    """One batch at one length. `past` holds unrotated rows, `rows` those of the absorbed layer."""

    batch: int
    prefill: int
    x: torch.Tensor
    past: torch.Tensor
    rows: torch.Tensor
    naive: NaiveMlaLayer
    weights: MlaLayerWeights

    @property
    def name(self) -> str:
        return f"b{self.batch}_p{self.prefill}"


def make_case(naive: NaiveMlaLayer, weights: MlaLayerWeights, batch: int, prefill: int) -> Case:
    torch.manual_seed(prefill)
    c = naive.config
    x = torch.randn(batch, 1, c.dim, device=DEVICE, dtype=torch.bfloat16)
    past = torch.randn(batch, prefill, c.cache.head_dim, device=DEVICE, dtype=torch.bfloat16)
    return Case(batch, prefill, x, past, naive.rotated_rows(past), naive, weights)


def make_naive(config: MlaLayerConfig) -> NaiveMlaLayer:
    """bf16 weights that keep activations near 1 and give scores of standard deviation about 2."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = NaiveMlaLayer(config).bfloat16().requires_grad_(False)
    for name, weight in layer.named_parameters():
        gain = 2.0 if name == "q_up.weight" else 1.0
        weight.copy_(torch.randn_like(weight) * gain * weight.shape[1] ** -0.5)
    return layer


def ours(case: Case, impl: str) -> Callable[[], torch.Tensor]:
    """A step of `mla_layer` and the update of its plan, over a paged cache in shuffled pages."""
    c, B = case.naive.config, case.batch
    blocks = -(-(case.prefill + 1) // PAGE)
    order = torch.randperm(B * blocks, device=DEVICE)
    cache = torch.full((B * blocks, PAGE, c.cache.head_dim), torch.nan, device=DEVICE)
    cache = cache.bfloat16()
    padded = torch.nn.functional.pad(case.rows, (0, 0, 0, blocks * PAGE - case.prefill))
    cache[order] = padded.view(B * blocks, PAGE, -1)
    block_table = order.view(B, blocks).int()
    seq_lens = torch.full((B,), case.prefill + 1, dtype=torch.int32, device=DEVICE)
    table = rope_table(c, blocks * PAGE, DEVICE)
    buffers = MlaLayerBuffers.allocate(c, B, dtype=torch.bfloat16, device=DEVICE)

    plan = plan_mla_decode(seq_lens, num_heads=c.num_heads, s_q=1, impl=impl)

    def step() -> torch.Tensor:
        plan.update(seq_lens)
        args = (case.x, cache, block_table, seq_lens, case.weights, table)
        return mla_layer(*args, buffers=buffers, plan=plan, impl=impl)

    return step


def absorbed_torch(case: Case) -> Callable[[], torch.Tensor]:
    """The absorbed layer over a contiguous cache in plain PyTorch, through torch.compile."""
    c, L = case.naive.config, case.prefill + 1
    w = case.weights
    cache = torch.nn.functional.pad(case.rows, (0, 0, 0, 1))
    cos_sin = rope_table(c, L, DEVICE)[-1]

    def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        down = x[:, 0] @ w.down.T
        q_c, kv_c, k_pe = down.split([c.q_lora_rank, c.kv_lora_rank, c.rope_dim], dim=-1)
        q = (q_c @ w.q_up.T).view(-1, c.num_heads, c.qk_dim)
        q_nope, q_pe = q.split([c.nope_dim, c.rope_dim], dim=-1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w.k_up).transpose(0, 1)
        q = torch.cat([q_latent, rotate(q_pe, cos_sin).to(x.dtype)], dim=-1)
        cache[:, L - 1] = torch.cat([kv_c, rotate(k_pe, cos_sin).to(x.dtype)], dim=-1)
        scores = torch.bmm(q, cache.mT).float() * c.scale
        latent = torch.bmm(scores.softmax(-1).to(x.dtype), cache[..., : c.kv_lora_rank])
        v = torch.bmm(latent.transpose(0, 1), w.v_up).transpose(0, 1)
        return (v.flatten(1) @ w.out.T)[:, None]

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    return lambda: compiled(case.x, cache)


def naive_torch(case: Case) -> Callable[[], torch.Tensor]:
    return lambda: case.naive(case.x, case.past)[0]


def golden(case: Case, requests: list[int]) -> torch.Tensor:
    """The naive layer in fp32 on some requests, one at a time: keys of all would not fit."""
    layer = NaiveMlaLayer(case.naive.config).to(DEVICE).requires_grad_(False)
    layer.load_state_dict(case.naive.state_dict())
    outs = [layer(case.x[b : b + 1].float(), case.past[b : b + 1].float())[0] for b in requests]
    return torch.cat(outs)


def relative_error(x: torch.Tensor, want: torch.Tensor) -> float:
    return float((x.double() - want.double()).norm() / want.double().norm())


def floor_us(case: Case, roofs: dict[str, float]) -> tuple[float, str]:
    """The least time a step can take by the machine's measured roofs, and which of them says so."""
    w, c, L = case.weights, case.naive.config, case.prefill + 1
    matrices = (w.down, w.q_up, w.k_up, w.v_up, w.out)
    bytes_moved = 2 * (sum(m.numel() for m in matrices) + case.batch * L * c.cache.head_dim)
    attention = c.num_heads * L * (c.cache.head_dim + c.kv_lora_rank)
    flops = 2 * case.batch * (sum(m.numel() for m in matrices) + attention)
    memory, compute = (
        bytes_moved / roofs["read_gbps"] / 1e3,
        flops / roofs["bf16_gemm_tflops"] / 1e6,
    )
    return (memory, "memory") if memory > compute else (compute, "compute")


def eager_us(run: Callable[[], object], repeats: int = 5) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def refusal(impl: str) -> str:
    """Why this GPU cannot run one of our implementations; "" if it can."""
    try:
        choose_decode_impl(impl, torch.device(DEVICE))
    except ValueError as error:
        return str(error)
    return ""


def run_case(case: Case, impls: list[str], roofs: dict[str, float]) -> list[dict[str, object]]:
    requests = [b for b in CHECKED_REQUESTS if b < case.batch]
    want = golden(case, requests)
    bar = 1.2 * relative_error(case.naive(case.x[requests], case.past[requests])[0], want)
    makers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        f"mla_kernels/{impl}": lambda impl=impl: ours(case, impl) for impl in impls
    }
    makers |= {
        "torch.compile/absorbed": lambda: absorbed_torch(case),
        NAIVE: lambda: naive_torch(case),
    }
    refused = {f"mla_kernels/{impl}": refusal(impl) for impl in impls}
    floor, roof = floor_us(case, roofs)
    rows: list[dict[str, object]] = []
    for name, maker in makers.items():
        gc.collect()
        torch.cuda.empty_cache()
        row: dict[str, object] = {"case": case.name, "impl": name, "floor_us": round(floor, 1)}
        row |= {"roof": roof, "us": None, "rel_err": None, "note": ""}
        if why := refused.get(name):
            rows.append(row | {"note": NOT_RUN, "why": why})
            print(json.dumps(rows[-1]), flush=True)
            continue
        try:
            step = maker()
            error = relative_error(step()[requests], want)
            row["rel_err"] = round(error, 6)
            if not error <= bar:
                row["note"] = f"wrong: error above {bar:.4f}"
            elif name == NAIVE:  # kernels of milliseconds, and no memory left for a graph
                row["us"] = round(eager_us(step), 1)
            else:
                row["us"] = round(Timer().medians({name: step})[name], 1)
        except torch.OutOfMemoryError:
            row["note"] = OUT_OF_MEMORY
        rows.append(row)
        print(json.dumps(row), flush=True)
        step = None
    return rows


def markdown(result: dict[str, Any]) -> str:
    machine, rows = result["machine"], result["rows"]
    impls = list(dict.fromkeys(str(r["impl"]) for r in rows))
    cell = {(r["case"], r["impl"]): r for r in rows}
    lines = [
        f"# One decode step of an MLA layer ({machine['gpu']}, commit {machine['commit']})",
        "",
        f"`{result['command']}`, microseconds.",
        "",
        *([result["note"], ""] if "note" in result else []),
        "| case | floor (us) | " + " | ".join(impls) + " |",
        "|---" * (2 + len(impls)) + "|",
    ]
    for case in dict.fromkeys(str(r["case"]) for r in rows):
        first = cell[case, impls[0]]
        shown = [cell[case, i]["us"] or cell[case, i]["note"] for i in impls]
        cells = [case, f"{first['floor_us']} ({first['roof']})", *map(str, shown)]
        lines.append("| " + " | ".join(cells) + " |")
    whys = {f"* {r['impl']}: {r['why']}" for r in rows if "why" in r}
    lines += ["", "Not run:", "", *sorted(whys)] if whys else []
    return "\n".join(lines) + "\n"


def write_report(result: dict[str, Any], folder: Path, ending: str) -> None:
    """mla_layer.json and .md in `folder`, with `ending` behind their names."""
    write_json(folder / f"mla_layer{ending}.json", result)
    write(folder / f"mla_layer{ending}.md", markdown(result))


def main() -> int:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=count, default=BATCH)
    parser.add_argument("--prefill", type=length, nargs="+", default=list(PREFILLS))
    parser.add_argument("--impl", nargs="+", choices=IMPLS, default=list(IMPLS))
    parser.add_argument("--results", type=Path, default=here / "results" / "h200")
    args = parser.parse_args()
    claim(args.results)
    need_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = describe_gpu()
    naive = make_naive(MlaLayerConfig())
    weights = naive.absorbed_weights()

    def measure_case(prefill: int) -> list[dict[str, object]]:
        return run_case(make_case(naive, weights, args.batch, prefill), args.impl, machine)

    result = {"machine": machine, "command": command("mla_layer")}
    chosen = (args.batch, tuple(args.prefill), tuple(args.impl))
    some = chosen != (BATCH, PREFILLS, IMPLS)
    cases = args.prefill
    rows = gather("mla_layer", result, cases, measure_case, write_report, args, some=some)
    # Keys of all requests may not fit: of the naive layer alone that is no fault.
    forgiven = (NAIVE, OUT_OF_MEMORY)
    faults = (r for r in rows if r["note"] not in ("", NOT_RUN))
    return int(any((r["impl"], r["note"]) != forgiven for r in faults))


if __name__ == "__main__":
    sys.exit(main())
