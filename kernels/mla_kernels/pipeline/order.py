# SPDX-License-Identifier: Apache-2.0
"""Which order a cycle gets: what the paper's theorem guarantees, and the best there is."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations, permutations, product

from mla_kernels.pipeline.chain import CUBE, VECTOR, Chain
from mla_kernels.pipeline.cycle import Cycle, earliest_starts

MAX_SEARCHED_PAIRS = 4


def plan_cycle(durations: Iterable[float]) -> Cycle:
    """The stall-free cycle with preload count n of Theorem 4.1 (proof: Theorem B.1).

    durations: [C1], [V1], ..., [Cn], [Vn], as for `Chain.of`, which says what raises ValueError.

    The paper proves it for sum [V] <= sum [C]: both units run their stages in turn 1, 2, ..., n
    from some start, and n - 1 of the edges [Ci] -> [Vi] stay inside the cycle. The other case is
    the first one read backwards, [Vn] -> [Cn] -> ... -> [C1]: its edges are the same ones. Of the
    starts that qualify, the one with the least work before the loop is taken.

    Where the paper slips: Theorem 4.1 says that the edges inside a cycle are all [V] -> [C]. Its
    proof is about [C] -> [V] (B.3 lists them), and with [V] -> [C] the statement is false: 1, 2, 3,
    1 has no stall-free cycle with [V1] -> [C2] inside. "Reversing roles" in B.4.3 must be read as
    reversing time: swapped roles would count [Vn] -> [C1], which is no edge of the chain.
    """
    chain = Chain.of(durations)
    n = chain.pairs
    found = []
    if chain.work(VECTOR) <= chain.work(CUBE):
        for last in _qualified(chain.times[0::2], chain.times[1::2]):
            # Cube ends with C(last + 1), vector with V(last).
            cube = tuple((last + 1 + i) % n + 1 for i in range(n))
            vector = tuple((last + i) % n + 1 for i in range(n))
            found.append(Cycle(chain, cube, vector, _all_but(cube[-1], n)))
    else:
        backwards = chain.times[::-1]
        for last in _qualified(backwards[0::2], backwards[1::2]):
            vector = tuple(n - (last + 1 + i) % n for i in reversed(range(n)))
            cube = tuple(n - (last + i) % n for i in reversed(range(n)))
            found.append(Cycle(chain, cube, vector, _all_but(vector[0], n)))
    return min(found, key=lambda cycle: cycle.preload_work)


def _qualified(cube: tuple[Fraction, ...], vector: tuple[Fraction, ...]) -> list[int]:
    """Every m in 1..n that satisfies Eq. 20 with a_i = [Vi] - [C(i+1)] (Eq. 18)."""
    n = len(cube)
    a = [vector[i] - cube[(i + 1) % n] for i in range(n)]
    qualified = []
    for m in range(1, n + 1):
        sums = (sum(a[(m - 1 - i) % n] for i in range(j)) for j in range(1, n))
        if all(total <= 0 for total in sums):
            qualified.append(m)
    return qualified


def _all_but(excluded: int, n: int) -> frozenset[int]:
    """The edges [Ci] -> [Vi] but for i = excluded."""
    return frozenset(2 * (i - 1) for i in range(1, n + 1) if i != excluded)


def fewest_preloads(durations: Iterable[float]) -> Cycle:
    """A stall-free cycle with the smallest preload count of all, by trying every order.

    n is what Theorem 4.1 guarantees for any durations; particular ones may allow less. Ties go to
    the least work before the loop. Raises ValueError as `plan_cycle` does, and for more than
    MAX_SEARCHED_PAIRS pairs.
    """
    chain = Chain.of(durations)
    n = chain.pairs
    if n > MAX_SEARCHED_PAIRS:
        raise ValueError(f"fewest_preloads takes at most {MAX_SEARCHED_PAIRS} pairs, got {n}")
    orders = list(permutations(range(1, n + 1)))
    for inside in range(2 * n - 1, -1, -1):
        found = [
            Cycle(chain, cube, vector, internal)
            for internal in map(frozenset, combinations(range(2 * n - 1), inside))
            for cube, vector in product(orders, orders)
            if _fits(chain, cube, vector, internal)
        ]
        if found:
            break
    return min(found, key=lambda cycle: cycle.preload_work)


def _fits(
    chain: Chain, cube: tuple[int, ...], vector: tuple[int, ...], internal: frozenset[int]
) -> bool:
    starts = earliest_starts(chain.times, cube, vector, internal)
    if starts is None:
        return False
    return all(start + chain.times[p] <= chain.bound for p, start in starts.items())
