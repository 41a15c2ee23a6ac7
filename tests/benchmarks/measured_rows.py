# SPDX-License-Identifier: Apache-2.0
"""Rows of benchmarks/serve.py as they would be measured, and the page of some."""


def step_row(backend, batch, ms, attention):
    times = {"step_ms": ms, "gpu_ms": ms * 0.9, "attention_ms": attention}
    key = {"heads": 128, "batch": batch, "context": 16384, "backend": backend}
    key |= {"layers": 2 if batch == 1 else 6, "rounds_ms": [ms, ms * (1.2 if batch == 1 else 1)]}
    return {**key, **times, "steps": int(200 / ms), "attention_share": attention / ms}


SETTINGS = {
    "model": "m", "dtype": "bfloat16", "compile": False, "rounds": 3, "layers": 4,
    "open_requests": 5, "together": False, "slo": "ttft:1 tpot:2", "as_is": False, "heads": [128],
    "eager": False, "reduced": False,
}  # fmt: skip


def serve_row(backend, speed, clients=4, **more):
    from load import METRICS, STATISTICS

    times = {f"{m}_{s}": 10.0 for m in METRICS for s in STATISTICS}
    load = {"shape": "8/8", "loop": "closed", "concurrency": clients, "failed": 0}
    load["completed"] = 3 * clients
    return {"backend": backend, **load, **times, "output_tok_s": speed, **more}


def serve_page(*rows, folder=None):
    from serve_report import Report
    from serve_results import markdown, write_results

    report = Report("serve", "python x", {"gpu": "G"}, SETTINGS, list(rows))
    if folder:
        write_results(report, folder)
    return markdown(report)
