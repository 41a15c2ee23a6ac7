# SPDX-License-Identifier: Apache-2.0
"""Numbers in the tables of pages; what was not measured is an empty cell."""

from typing import Any

from load import METRICS, STATISTICS

# Of fewer a percentile is the largest of them, or nearly.
FEWEST_SAMPLES = {"p95": 20, "p99": 100}
_NEEDS = ", ".join(f"{name} needs {least}" for name, least in FEWEST_SAMPLES.items())
FEW_SAMPLES = (
    f"-: of too few ({_NEEDS}); TTFT and TPOT are of requests, ITL of the times between tokens."
)
TIME_HEADS = [f"{metric.upper()} {statistic}" for metric in METRICS for statistic in STATISTICS]


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def quotient(over: float, under: float) -> float | None:
    """None where `under` is 0: answers of one token have no time between tokens."""
    return over / under if under else None


def times(row: dict[str, Any], requests: int, output_len: int) -> list[str]:
    """The cells under TIME_HEADS of a load of so many requests, each of `output_len` tokens."""
    between = output_len - 1
    samples = {"ttft": requests, "tpot": requests if between else 0, "itl": requests * between}
    return [
        "-"
        if samples[metric] < FEWEST_SAMPLES.get(statistic, 1)
        else f"{row[f'{metric}_{statistic}']:.1f}"
        for metric in METRICS
        for statistic in STATISTICS
    ]
