# SPDX-License-Identifier: Apache-2.0
"""The profiles of configs/serve: servers over several GPUs, and over two groups of them that stand
for two machines. Judged as engines on several ranks are, in test_ranks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import PROFILES_STOCK, wide_scenarios
from oracle import NOISE, distance, divergences
from profile_server import CONFIGS, ProfileServer, workers
from test_parity import outputs_of

PROFILES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if "cpu" not in path.stem)
EXPERTS = "experts"


def run(profile, model, gpus, folder):
    """(answers to all scenarios, what /mla/info says of the workers behind them)"""
    with ProfileServer(profile, model, gpus, folder) as server:
        name = server.get("/v1/models")["data"][0]["id"]
        outputs = [o for part in wide_scenarios().values() for o in server.answer(name, part)]
        return outputs, server.get("/mla/info")["attention"]["workers"]


@pytest.fixture(scope="module")
def served(gpus, checkpoint, tmp_path_factory):
    """`served(profile)`: what `run` gives. All start at once."""
    model = checkpoint(EXPERTS)
    places = {profile: gpus[: workers(profile, len(gpus))] for profile in PROFILES}
    folder = tmp_path_factory.mktemp("profiles")
    with ThreadPoolExecutor(len(PROFILES)) as pool:
        futures = {
            profile: pool.submit(run, profile, model, place, folder / profile)
            for profile, place in places.items()
            if place
        }
        yield lambda profile: futures[profile].result()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_answers_as_one_gpu(profile, served, gpus, engines, checkpoint, ranks_table):
    ranks = workers(profile, len(gpus))
    if not ranks:
        pytest.skip("needs two GPUs")
    path = checkpoint(EXPERTS)
    outputs, told = served(profile)
    alone, stock = (
        outputs_of(engines(f"{backend} {EXPERTS}")) for backend in ("CUSTOM", PROFILES_STOCK)
    )
    bar, d = distance(path, stock), distance(path, outputs)
    gaps = divergences(path, outputs, alone)
    ranks_table(f"configs/serve/{profile}.yaml", d, gaps, len(outputs))
    assert all(gap <= 2 * bar.max for gap in gaps), (gaps, bar)
    assert d.mean <= NOISE * bar.mean
    assert d.p99 <= NOISE * bar.p99
    assert len(told) == ranks
    assert {worker["decode"]["impl"] for worker in told} == {"hopper"}
    assert all(worker["decode_steps"] > 20 for worker in told)
