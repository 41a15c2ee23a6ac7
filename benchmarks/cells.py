# SPDX-License-Identifier: Apache-2.0
"""Numbers in the tables of pages; what was not measured is an empty cell."""


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def quotient(over: float, under: float) -> float | None:
    """None where `under` is 0: answers of one token have no time between tokens."""
    return over / under if under else None
