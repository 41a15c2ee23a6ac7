# SPDX-License-Identifier: Apache-2.0
"""The Preload Pipeline against the paper's theorem, its proof's cases and a brute force of ours."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from mla_kernels.pipeline import (
    Chain,
    Cycle,
    fewest_preloads,
    plan_cycle,
    simulate,
    timeline_png,
    timeline_text,
)
from mla_kernels.pipeline.chain import CUBE, VECTOR


def random_durations(rng: random.Random, n: int) -> list[int]:
    """Small integers make ties and exact fits common; one stage may outweigh all others."""
    times = [rng.randint(0, 6) for _ in range(2 * n)]
    if rng.random() < 0.3:
        times[rng.randrange(2 * n)] = rng.randint(6, 40)
    return times if any(times) else random_durations(rng, n)


def fits(times, cube, vector, internal) -> bool:
    """Whether a cycle as long as the busier unit's work exists, by relaxing longest paths."""
    pairs = [(2 * a - 2, 2 * b - 2) for a, b in itertools.pairwise(cube)]
    pairs += [(2 * a - 1, 2 * b - 1) for a, b in itertools.pairwise(vector)]
    pairs += [(p, p + 1) for p in internal]
    start = [0] * len(times)
    bound = max(sum(times[0::2]), sum(times[1::2]))
    for _ in range(len(times)):
        for before, after in pairs:
            start[after] = max(start[after], start[before] + times[before])
    settled = all(start[b] >= start[a] + times[a] for a, b in pairs)
    return settled and all(s + t <= bound for s, t in zip(start, times, strict=True))


def most_internal(times, edges) -> int:
    """The most edges out of `edges` that one stall-free cycle can hold inside, over all orders."""
    n = len(times) // 2
    orders = list(itertools.permutations(range(1, n + 1)))
    for size in range(len(edges), 0, -1):
        for internal in itertools.combinations(edges, size):
            for cube, vector in itertools.product(orders, orders):
                if fits(times, cube, vector, internal):
                    return size
    return 0


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_the_plan_is_stall_free_with_preload_count_n(n):
    """Theorem 4.1 (2): n - 1 internal edges, all [C] -> [V], for any durations."""
    rng = random.Random(n)
    for _ in range(150):
        times = random_durations(rng, n)
        cycle = plan_cycle(times)
        assert cycle.stall_free, times
        assert cycle.preload_count == n, times
        assert all(p % 2 == 0 for p in cycle.internal), times
        assert fits(times, cycle.cube_order, cycle.vector_order, cycle.internal), times


def test_the_plan_holds_for_durations_that_are_no_round_numbers():
    rng = random.Random(0)
    for _ in range(200):
        times = [rng.random() * 10 ** rng.randint(-3, 3) for _ in range(6)]
        assert plan_cycle(times).stall_free, times


def test_both_units_keep_the_chain_order_round_the_cycle():
    """The theorem needs rotations of 1, 2, ..., n only."""
    rng = random.Random(1)
    for _ in range(100):
        cycle = plan_cycle(random_durations(rng, 4))
        for order in (cycle.cube_order, cycle.vector_order):
            assert all(b == a % 4 + 1 for a, b in itertools.pairwise(order))


@pytest.mark.parametrize(("n", "trials"), [(1, 20), (2, 60), (3, 25)])
def test_search_finds_what_brute_force_finds(n, trials):
    rng = random.Random(10 + n)
    for _ in range(trials):
        times = random_durations(rng, n)
        cycle = fewest_preloads(times)
        assert cycle.stall_free, times
        best = 2 * n - 1 - most_internal(times, range(2 * n - 1))
        assert cycle.preload_count == best <= n, times


def test_of_searched_cycles_the_one_with_the_least_work_before_the_loop_is_taken():
    rng = random.Random(4)
    others = 0
    for _ in range(40):
        times = [rng.randint(1, 6) for _ in range(4)]  # fits() lets stages of 0 wait in a circle
        found = fewest_preloads(times)
        for internal in itertools.combinations(range(3), 3 - found.preload_count):
            for cube, vector in itertools.product(itertools.permutations((1, 2)), repeat=2):
                if fits(times, cube, vector, internal):
                    other = Cycle(found.chain, cube, vector, frozenset(internal))
                    assert other.preload_work >= found.preload_work, times
                    others += other.preload_work > found.preload_work
    assert others


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_than_n_is_not_always_possible(n):
    """Theorem 4.1 (1), by the durations of Eq. 16: one [Vk] that fits beside all [C] only."""
    rng = random.Random(20 + n)
    for k in range(n):
        times = [rng.randint(3, 6) for _ in range(2 * n)]
        cube = sum(times[0::2])
        times[1::2] = [0] * n
        times[2 * k + 1] = cube - min(times[0::2]) + 1
        assert most_internal(times, range(2 * n - 1)) == n - 1
        assert fewest_preloads(times).preload_count == n


def test_fewer_than_n_is_sometimes_possible():
    """[V1] fits beside [C2] and [V2] is nothing: one preload, where the paper's AMLA takes two."""
    cycle = fewest_preloads([9, 4, 8])
    assert (cycle.preload_count, cycle.cube_order) == (1, (1, 2))
    assert plan_cycle([9, 4, 8]).preload_count == 2


@pytest.mark.parametrize("times", [[1, 2, 3, 1], [1, 3, 2, 1]])
def test_theorem_4_1_is_wrong_about_the_direction_of_the_edges(times):
    """Not [V] -> [C]: with such edges alone neither case reaches n - 1 = 1."""
    assert most_internal(times, [1]) == 0
    assert most_internal(times, [0, 2]) == 1
    assert plan_cycle(times).preload_count == 2


def test_eq_17_of_the_paper_is_what_the_plan_satisfies():
    """Eq. 17 for n = 3 as B.3 spells it out: the order 1, 2, 3 needs V1+V2 <= C2+C3, V2 <= C3."""
    rng = random.Random(3)
    seen = set()
    for _ in range(300):
        times = random_durations(rng, 3)
        if sum(times[1::2]) > sum(times[0::2]):
            continue
        (c1, c2, c3), (v1, v2, v3) = times[0::2], times[1::2]
        allowed = {
            (1, 2, 3): v1 + v2 <= c2 + c3 and v2 <= c3,
            (2, 3, 1): v2 + v3 <= c3 + c1 and v3 <= c1,
            (3, 1, 2): v3 + v1 <= c1 + c2 and v1 <= c2,
        }
        order = plan_cycle(times).cube_order
        assert allowed[order], times
        seen.add(order)
    assert len(seen) == 3


def test_amla_as_in_section_4_1_3():
    """Cycle [C1] [C2] [V1]; preload C1 V1 C1; drain C2 C2 V1."""
    cycle = plan_cycle([9, 8.5, 8])
    timeline = simulate(cycle, 6)

    def names(phase):
        return sorted(
            cycle.chain.label(e.stage)
            for e in timeline.events
            if e.phase == phase and e.end > e.start
        )

    assert cycle.preload_count == 2
    assert names("preload") == ["C1", "C1", "V1"]
    assert names("drain") == ["C2", "C2", "V1"]
    assert names("steady") == sorted(["C1", "C2", "V1"] * 4)
    assert timeline.stalls(CUBE) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 20])
def test_simulation_runs_every_stage_once_and_in_order(n, blocks):
    rng = random.Random(100 * n + blocks)
    for _ in range(20):
        cycle = plan_cycle(random_durations(rng, n))
        timeline = simulate(cycle, blocks)
        at = {(e.stage, e.block): e for e in timeline.events}
        assert len(at) == len(timeline.events) == 2 * n * blocks
        for (stage, block), event in at.items():
            assert event.end - event.start == cycle.chain.times[stage]
            assert not stage or event.start >= at[stage - 1, block].end
        for unit in (CUBE, VECTOR):
            events = [e for e in timeline.events if e.unit == unit]
            assert all(b.start >= a.end for a, b in itertools.pairwise(events))
        preloaded = [e for e in timeline.events if e.phase == "preload" and e.stage == 0]
        assert len(preloaded) == min(n, blocks)
        busier = CUBE if cycle.chain.work(CUBE) >= cycle.chain.work(VECTOR) else VECTOR
        assert timeline.stalls(busier) == 0
        steady = [e.start for e in timeline.events if e.phase == "steady"]
        if steady:
            rest = [e.end for e in timeline.events if e.phase == "steady" and e.unit == busier]
            assert max(rest) - min(steady) == (blocks - n) * cycle.chain.bound


def test_an_order_that_stalls_says_so():
    """The theorem's work in an order that it does not pick: [V1] too long for what is beside it."""
    chain = Chain.of([2, 5, 5])
    cycle = Cycle(chain, (2, 1), (1, 2), frozenset({0}))
    assert not cycle.stall_free
    assert cycle.length == 5 + 2 + 5
    assert simulate(cycle, 10).stalls(CUBE) > 0
    assert plan_cycle([2, 5, 5]).length == 7


def test_exact_fits_fit():
    """0.1 + 0.2 > 0.3 in floating point; the fractions of the same text do not round."""
    times = [Fraction(1, 10), Fraction(3, 10), Fraction(2, 10), Fraction(0)]
    assert plan_cycle(times).stall_free
    assert plan_cycle(times).length == Fraction(3, 10)


def test_decimals_fit_as_whole_numbers_do():
    """0.3 + 0.8 is a little less than 1.1 in binary."""
    for times in ([3, 11, 3, 1, 8], [8, 1, 5, 6, 5, 9], [4, 2, 8, 2, 1, 10]):
        whole, decimal = fewest_preloads(times), fewest_preloads([t / 10 for t in times])
        assert decimal.preload_count == whole.preload_count == 2
        assert (decimal.cube_order, decimal.internal) == (whole.cube_order, whole.internal)
        assert decimal.length * 10 == whole.length


@pytest.mark.parametrize(
    ("times", "dtype"),
    [([100, 90, 80, 10], np.int8), ([2**62, 1, 2**62, 1], np.int64)]
    + [([0.1, 0.3, 0.2, 0.1], dtype) for dtype in (np.float16, np.float32, np.float64)],
)
def test_numbers_of_numpy_are_what_they_print_as(times, dtype):
    got, want = Chain.of(np.array(times, dtype)), Chain.of(times)
    assert (got, got.bound) == (want, want.bound)


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ([], "at least one above 0"),
        ([0, 0], "at least one above 0"),
        ([1, -2], "finite numbers >= 0, got -2"),
        ([1, float("nan")], "got nan"),
        ([1, float("inf")], "got inf"),
        ([1, "2"], "got '2'"),
    ],
)
def test_bad_durations(durations, message):
    for plan in (plan_cycle, fewest_preloads):
        with pytest.raises(ValueError, match=message):
            plan(durations)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chain": None}, "chain of type Chain, got NoneType"),
        ({"chain": [1, 1, 1, 1]}, "chain of type Chain, got list"),
        ({"cube_order": None}, "cube_order must hold each of 1 to 2 once, got None"),
        ({"cube_order": (1, "2")}, r"cube_order must hold .*got \(1, '2'\)"),
        ({"vector_order": 2}, "vector_order must hold each of 1 to 2 once, got 2"),
        ({"vector_order": (1.0, 2.0)}, r"vector_order must hold .*got \(1.0, 2.0\)"),
        ({"internal": None}, "internal must be a set of edges, got None"),
        ({"internal": [0]}, r"internal must be a set of edges, got \[0\]"),
        ({"internal": {0, "1"}}, "internal must be a set of edges, got {"),
    ],
)
def test_cycles_of_other_types(change, message):
    good = {"chain": Chain.of([1] * 4), "cube_order": (1, 2), "vector_order": (1, 2)}
    good["internal"] = frozenset()
    assert Cycle(**good).length == 2
    with pytest.raises(ValueError, match=message):
        Cycle(**good | change)


@pytest.mark.parametrize(
    "times", [None, [Fraction(1)] * 2, (1, 2), (Fraction(1),), (Fraction(0),) * 2]
)
def test_a_chain_is_of_exact_times(times):
    with pytest.raises(ValueError, match=r"times must be those of Chain.of, got "):
        Chain(times)


@pytest.mark.parametrize("wrong", [None, "x", Chain.of([1, 1])])
def test_what_is_no_cycle_and_no_timeline(wrong, tmp_path):
    with pytest.raises(ValueError, match="cycle of type Cycle, got "):
        simulate(wrong, 3)
    with pytest.raises(ValueError, match="timeline of type Timeline, got "):
        timeline_text(wrong)
    with pytest.raises(ValueError, match="timeline of type Timeline, got "):
        timeline_png(wrong, tmp_path / "x.png")


def test_bad_cycles_and_counts():
    chain = Chain.of([1, 1, 1, 1])
    with pytest.raises(ValueError, match="cube_order must hold each of 1 to 2 once"):
        Cycle(chain, (1, 1), (1, 2), frozenset())
    with pytest.raises(ValueError, match="vector_order must hold"):
        Cycle(chain, (1, 2), (1,), frozenset())
    with pytest.raises(ValueError, match=r"from 0 to 2, got \[3\]"):
        Cycle(chain, (1, 2), (1, 2), frozenset({3}))
    with pytest.raises(ValueError, match="no cycle with C1 -> V1, V1 -> C2, C2 -> V2"):
        Cycle(Chain.of([1] * 4), (2, 1), (1, 2), frozenset({0, 1, 2}))
    for blocks in (0, 1.5, None):
        with pytest.raises(ValueError, match=rf"blocks in 1\.\.\d+, got {blocks}"):
            simulate(plan_cycle([1, 1]), blocks)
    with pytest.raises(ValueError, match=r"finite numbers >= 0, got 10{400}$"):
        plan_cycle([10**400])
    for durations in (5, torch.tensor(5)):
        with pytest.raises(ValueError, match=r"a list of numbers, got .*5"):
            plan_cycle(durations)
    with pytest.raises(ValueError, match="at most 4 pairs, got 5"):
        fewest_preloads([1] * 10)


def test_numbers_of_any_kind():
    """As numpy gives them."""
    assert Chain.of([np.float32(1.5), np.int64(2)]) == Chain.of([1.5, 2])
    assert simulate(plan_cycle([1, 1]), np.int64(3)).blocks == 3
