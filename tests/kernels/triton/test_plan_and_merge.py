# SPDX-License-Identifier: Apache-2.0
"""The device plan covers every tile once, whatever the lengths; the merge folds its partials."""

import pytest
import torch
from mla_kernels.decode.hopper import launcher as hopper_launcher
from mla_kernels.decode.hopper import parts as hopper_parts
from mla_kernels.decode.hopper.parts import spare_for
from mla_kernels.decode.merge.kernel import merge_kernel
from mla_kernels.decode.merge.launcher import merge_tile
from mla_kernels.decode.plan import api as plans
from mla_kernels.decode.plan.kernel import PLAN_TILE
from mla_kernels.decode.plan.launcher import SPARE, build_plan
from mla_kernels.dispatch import Choice
from mla_kernels.numerics import EXPONENT_FLOOR, LN2
from mla_kernels.testing.cases import decode_case

LENGTHS = {
    "one": [1],
    "one long": [131072],
    "long beside short": [131072, *[200] * 31],
    "all empty": [0, 0, 0],
    "empty first and last": [0, 700, 0, 64, 65, 0],
    "many equal": [4096] * 96,
    "more requests than parts": list(range(0, 600, 2)),
    "more requests than lanes": [i % 700 for i in range(1500)],
}


def lengths(name):
    if name == "random":
        g = torch.Generator().manual_seed(0)
        lens = torch.randint(0, 3000, (257,), generator=g, dtype=torch.int32)
        lens[torch.rand(257, generator=g) < 0.2] = 0
        return lens
    return torch.tensor(LENGTHS[name], dtype=torch.int32)


def segments(plan, lens):
    """[(first tile, end tile, split)] of each request, walked as the kernels do."""
    found = [[] for _ in lens]
    for first, tile, last, last_end, split, first_end, *_ in plan.parts.tolist():
        request = first
        assert last < 0 or last_end > 0  # its part in the last one is not empty
        while request <= last:
            end = -(-int(lens[request]) // PLAN_TILE)
            if request == last:
                end = min(end, last_end)
            assert request > first or end == first_end
            chunk = int(plan.requests[request, 2]) if plan.chunk else end
            while tile < end:
                stop = min(tile + chunk, end)
                found[request].append((tile, stop, split))
                tile, split = stop, split + 1
            request, tile, split = request + 1, 0, 0
    return found


@pytest.mark.parametrize("name", [*LENGTHS, "random"])
@pytest.mark.parametrize("num_parts", [1, 2, 7, 66, 132])
@pytest.mark.parametrize(("deterministic", "spare"), [(False, 0), (False, 4), (True, 0)])
def test_every_tile_is_read_once_and_no_split_is_empty(
    device, name, num_parts, deterministic, spare
):
    lens = lengths(name).to(device)
    plan = build_plan(
        lens,
        num_heads=16,
        s_q=1,
        num_parts=num_parts,
        deterministic=deterministic,
        spare=spare,
    )
    slots = []
    for length, request, found in zip(
        lens, plan.requests.tolist(), segments(plan, lens), strict=True
    ):
        slot, splits = request[:2]
        assert [s for _, _, s in sorted(found)] == list(range(splits))
        position = 0
        for first, end, _ in sorted(found):
            assert first == position and end > first
            position = end
        assert position == -(-int(length) // PLAN_TILE)
        if splits > 1:
            slots += range(slot, slot + splits)
    assert len(set(slots)) == len(slots) and all(0 <= s < plan.acc.shape[0] for s in slots)


def test_a_plan_of_one_part_has_memory_that_tma_takes(device):
    """As for 8 x 128 rows on an H100 of which MIG leaves 16 SMs."""
    lens = torch.tensor([900, 3], dtype=torch.int32, device=device)
    plan = build_plan(lens, num_heads=128, s_q=8, num_parts=1)
    assert plan.acc.shape == (1, 1024, 512) and plan.sums.shape == (1, 1024, 2)


def test_work_is_even(device):
    """The fullest part has no more than its share of tiles and overheads, rounded up."""
    lens = lengths("long beside short").to(device)
    plan = build_plan(lens, num_heads=16, s_q=1, num_parts=132)
    tiles = torch.div(lens + PLAN_TILE - 1, PLAN_TILE, rounding_mode="floor")
    share = -(-int((tiles + 2).sum()) // 132)
    work = []
    for request, tile, last, last_end, *_ in plan.parts.tolist():
        done = 0
        while request <= last:
            end = min(int(tiles[request]), last_end) if request == last else int(tiles[request])
            done, request, tile = done + end - tile, request + 1, 0
        work.append(done)
    assert max(work) <= share and sum(work) == int(tiles.sum())


@pytest.mark.parametrize(
    ("batch", "tokens", "spare"),
    [
        (128, 4096, 0), (132, 300, 0), (64, 4096, 0), (32, 8192, 0),
        (128, 16384, SPARE), (128, 65536, SPARE), (32, 65536, SPARE), (66, 131072, SPARE),
    ],
)  # fmt: skip
def test_requests_that_fit_their_own_parts_are_cut_as_little_as_can_be(
    device, batch, tokens, spare
):
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    plan = build_plan(lens, num_heads=16, s_q=1, num_parts=132, spare=spare)
    assert plan.requests[:, 1].tolist() == [132 // batch] * batch
    firsts = [(row[0], row[2]) for row in plan.parts.tolist() if row[2] >= 0]
    assert all(first == last for first, last in firsts)


def test_long_requests_are_cut_where_there_is_nothing_to_spare(device):
    lens = torch.full((128,), 16384, dtype=torch.int32, device=device)
    plan = build_plan(lens, num_heads=16, s_q=1, num_parts=132)
    assert (plan.requests[:, 1] > 1).any()


@pytest.mark.parametrize(
    ("rows", "dtype", "spare"),
    [
        (16, torch.bfloat16, SPARE), (32, torch.bfloat16, SPARE), (33, torch.bfloat16, 0),
        (16, torch.float8_e4m3fn, 0), (16, torch.uint8, 0),
    ],
)  # fmt: skip
def test_parts_have_work_to_spare_only_where_memory_is_the_limit(rows, dtype, spare):
    assert spare_for(rows, dtype) == spare


@pytest.mark.parametrize(
    ("kv_cache_dtype", "cut"), [(torch.bfloat16, False), (torch.float8_e4m3fn, True)]
)
def test_a_plan_for_the_hopper_kernel_spares_cuts(device, monkeypatch, kv_cache_dtype, cut):
    hopper = Choice("hopper", "as on sm_90")
    monkeypatch.setattr(plans, "choose_decode_impl", lambda *args, **options: hopper)
    monkeypatch.setattr(hopper_parts, "parts_for", lambda *args: 132)
    lens = torch.full((128,), 16384, dtype=torch.int32, device=device)
    plan = plans.plan_mla_decode(lens, num_heads=16, s_q=1, kv_cache_dtype=kv_cache_dtype)
    assert bool((plan.device_plan.requests[:, 1] > 1).any()) == cut


class PlanAskedError(Exception):
    """Stops a launch where its plan would be made."""


@pytest.mark.parametrize(("heads", "s_q", "spare"), [(16, 2, SPARE), (16, 3, 0), (64, 1, 0)])
def test_the_hopper_kernel_without_a_plan_spares_the_same_cuts(monkeypatch, heads, s_q, spare):
    asked = {}

    def stop(lens, **options):
        asked.update(options)
        raise PlanAskedError

    monkeypatch.setattr(hopper_launcher, "build_plan", stop)
    monkeypatch.setattr(hopper_parts, "parts_for", lambda *args: 132)
    case = decode_case([300, 70], num_heads=heads, s_q=s_q)
    lse = torch.empty(case.q.shape[:3])
    with pytest.raises(PlanAskedError):
        hopper_launcher.mla_decode_hopper(
            *case.args, scale=0.1, kv_scale=None, q_scale=None, causal=True, rescale="pow2",
            plan=None, out=case.poisoned_out(), lse=lse, deterministic=False,
        )  # fmt: skip
    assert (asked["spare"], asked["num_parts"]) == (spare, 132)


def test_chunks_of_a_request_do_not_depend_on_the_batch(device):
    lens = lengths("random").to(device)
    together = build_plan(lens, num_heads=16, s_q=1, deterministic=True, max_seq_len=4096)
    for b in (0, 3, 200, 256):
        alone = build_plan(
            lens[b : b + 1], num_heads=16, s_q=1, deterministic=True, max_seq_len=4096
        )
        cuts = [s[:2] for s in sorted(segments(together, lens)[b])]
        assert cuts == [s[:2] for s in sorted(segments(alone, lens[b : b + 1])[0])]


@pytest.mark.parametrize("tiles", [1, 31, 32, 64, 100, 127, 128, 129, 160, 1024, 1025, 1040, 5000])
def test_chunks_do_not_depend_on_the_room_for_longer_requests(device, tiles):
    """Nor do they outgrow a workspace that is made for just this length."""
    lens = torch.tensor([tiles * PLAN_TILE], dtype=torch.int32, device=device)
    options = {"num_heads": 1, "s_q": 1, "deterministic": True}
    plans = [build_plan(lens, **options, max_seq_len=n) for n in (tiles * PLAN_TILE, 2**20, None)]
    chunks = [plan.requests[0, 1:3].tolist() for plan in plans]
    assert chunks[0] == chunks[1] == chunks[2]
    assert chunks[0][0] <= plans[0].acc.shape[0]


@pytest.mark.parametrize("tiles", [64, 65, 127, 129, 131, 2000])
def test_requests_longer_than_the_workspace_was_made_for_keep_to_their_room(device, tiles):
    lens = torch.full((3,), tiles * PLAN_TILE, dtype=torch.int32, device=device)
    options = {"num_heads": 1, "s_q": 1, "deterministic": True, "max_seq_len": 64 * PLAN_TILE}
    plan = build_plan(lens, **options)
    assert plan.acc.shape[0] == 6
    assert plan.requests[:, :2].tolist() == [[0, 2], [2, 2], [4, 2]]


def test_a_plan_is_updated_in_place(device):
    lens = torch.tensor([100, 5000], dtype=torch.int32, device=device)
    plan = build_plan(lens, num_heads=16, s_q=1, num_parts=8)
    buffers = (plan.parts, plan.requests, plan.acc, plan.sums)
    new = torch.tensor([7000, 3], dtype=torch.int32, device=device)
    plan.update(new)
    assert all(
        a is b
        for a, b in zip(buffers, (plan.parts, plan.requests, plan.acc, plan.sums), strict=True)
    )
    fresh = build_plan(new, num_heads=16, s_q=1, num_parts=8)
    assert torch.equal(plan.requests, fresh.requests)
    assert torch.equal(plan.parts[:, :6], fresh.parts[:, :6])


@pytest.mark.parametrize(("num_parts", "batch"), [(4, 3), (60, 7), (132, 1)])
@pytest.mark.parametrize("latent", [512, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_merge(device, num_parts, batch, latent, deterministic):
    rows = 5
    g = torch.Generator().manual_seed(num_parts)
    lens = torch.randint(1, 6000, (batch,), generator=g, dtype=torch.int32)
    lens[0] = 4000
    if batch > 2:
        lens[1] = 0
    plan = build_plan(
        lens.to(device),
        num_heads=rows,
        s_q=1,
        kv_lora_rank=latent,
        num_parts=num_parts,
        deterministic=deterministic,
        max_seq_len=6000,
    )
    random_partials(plan, g)
    check_merge(plan)


@pytest.mark.parametrize(
    ("rows", "num_parts", "lens", "in_turns"),
    [(5, 4, [4000] * 3, False), (32, 60, [20000, *[60] * 6], True)],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_largest_reference_is_that_of_a_later_split(
    device, rows, num_parts, lens, in_turns, deterministic
):
    """So far above the first one's that factors relative to that one overflow. Each row has it in
    another split, the last among them, and beside it one that counts."""
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    options = {"num_heads": rows, "s_q": 1, "kv_lora_rank": 256, "num_parts": num_parts}
    plan = build_plan(seq_lens, **options, deterministic=deterministic, max_seq_len=max(lens))
    random_partials(plan, torch.Generator().manual_seed(num_parts))
    most = int(plan.requests[:, 1].max())
    assert most > 1 and (most > merge_tile(plan).splits) == in_turns
    for slot, splits, *_ in plan.requests.tolist():
        for row in range(rows if splits > 1 else 0):
            top = splits - 1 - row % (splits - 1)
            plan.sums[slot + top, row, 1] = 400.0
            if top > 1:
                plan.sums[slot + top - 1, row, 1] = 397.0
    check_merge(plan)


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_that_some_splits_or_all_saw_nothing_of(device, deterministic):
    seq_lens = torch.tensor([20000, *[60] * 6], dtype=torch.int32, device=device)
    options = {"num_heads": 32, "s_q": 1, "kv_lora_rank": 256, "num_parts": 60}
    plan = build_plan(seq_lens, **options, deterministic=deterministic, max_seq_len=20000)
    random_partials(plan, torch.Generator().manual_seed(0))
    slot, splits, *_ = plan.requests[0].tolist()
    assert splits > merge_tile(plan).splits
    for row, seen in ((0, 0), (1, splits - 1)):  # the first none, the second the last split
        unseen = slice(slot, slot + splits - (seen > 0))
        plan.acc[unseen, row], plan.sums[unseen, row, 0] = 0.0, 0.0
        plan.sums[unseen, row, 1] = EXPONENT_FLOOR
    check_merge(plan)


def random_partials(plan, generator):
    acc, sums = plan.acc, plan.sums
    acc.copy_(torch.randn(acc.shape, generator=generator))
    sums[..., 0] = (torch.rand(sums.shape[:2], generator=generator) + 0.5).to(sums.device)
    sums[..., 1] = torch.randint(-40, 20, sums.shape[:2], generator=generator).to(sums)


def check_merge(plan):
    """The merge of the plan's partials against the sum in fp64."""
    batch, rows, latent, device = len(plan.requests), plan.rows, plan.kv_lora_rank, plan.acc.device
    out = torch.full((batch, rows, latent), torch.nan, device=device)
    lse = torch.full((batch, rows), torch.nan, device=device)
    tile = merge_tile(plan)
    merge_kernel[(-(-rows // tile.rows), latent // tile.cols, batch)](
        plan.acc, plan.sums, plan.requests, out, lse, rows,
        DV=latent, ROWS=tile.rows, COLS=tile.cols, SPLITS=tile.splits, ORDERED=plan.chunk > 0,
        PDL=False, num_warps=4,
    )  # fmt: skip
    for b, (slot, splits, *_) in enumerate(plan.requests.tolist()):
        if splits == 1:  # written by the decode kernel: left alone
            assert out[b].isnan().all() and lse[b].isnan().all()
        elif splits == 0:
            assert (out[b] == 0).all() and (lse[b] == -torch.inf).all()
        else:
            l, k = plan.sums[slot : slot + splits].double().unbind(-1)
            top = k.amax(0)
            weight = torch.exp2(k - top)
            total = (l * weight).sum(0)
            want = (plan.acc[slot : slot + splits].double() * weight[..., None]).sum(0)
            want /= total.where(total > 0, 1)[:, None]
            torch.testing.assert_close(out[b].double(), want, rtol=0, atol=3e-5)
            torch.testing.assert_close(
                lse[b].double(), (top + total.log2()) * LN2, rtol=1e-6, atol=1e-5
            )


def test_more_requests_than_a_grid_has_room_for():
    with pytest.raises(ValueError, match=r"number of requests in 0\.\.65535, got 65536"):
        build_plan(torch.zeros(65536, dtype=torch.int32), num_heads=16, s_q=1)
