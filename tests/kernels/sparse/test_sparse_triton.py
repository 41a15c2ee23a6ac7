# SPDX-License-Identifier: Apache-2.0
"""The portable sparse kernel: every branch against the definition, exact cases to the bit."""

import itertools
import math

import pytest
import torch
from mla_kernels import mla_sparse_attention, mla_sparse_workspace
from mla_kernels.arch import ARCHS, arch_of
from mla_kernels.decode.triton.specs import ALIGNMENTS
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse import api
from mla_kernels.sparse import call as sparse_call
from mla_kernels.sparse.call import SparseCall
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.sparse.triton import launcher, tiles
from mla_kernels.sparse.triton.launcher import mla_sparse_attention_triton
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.metrics import SHORT_BAR, measure
from mla_kernels.testing.unaligned import unaligned
from mla_kernels.triton_common.record import Recordings

FORMATS = {"bf16": None, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}


def sparse_case(lengths, K, *, heads=16, cache="bf16", seed=0, device="cpu", **options):
    """(q [T, H, Dk], cache, slots [T, K], keyword arguments): one token a request, slots of its own
    rows in random order, then -1. All other rows of the cache decode to NaN."""
    case = decode_case(
        list(lengths), num_heads=heads, cache_dtype=FORMATS[cache], seed=seed, device=device,
        kv_scale=2.0**-6 if cache == "fp8" else None, **options,
    )  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    block = case.kv_cache.shape[1]
    slots = torch.full((len(lengths), K), -1, dtype=torch.int32)
    for t, n in enumerate(lengths):
        position = torch.randperm(n, generator=g)[:K]
        page = case.block_table[t].cpu()[position // block]
        slots[t, : len(position)] = page * block + position % block
    return case.q[:, 0], case.kv_cache, slots.to(device), case.options


def attend(q, kv, slots, options, splits=None, **more):
    """The kernel into poisoned results and workspace, cut into `splits` ranges if given."""
    T, H, _ = q.shape
    rank = options["kv_lora_rank"]
    out = q.new_full((T, H, rank), torch.nan)
    lse = q.new_full((T, H), torch.nan, dtype=torch.float32)
    if splits is None:
        more["impl"] = "triton"
        mla_sparse_attention(q, kv, slots, out=out, lse=lse, **options, **more)
        return out, lse
    arch = ARCHS[90]
    tile = tiles.choose_tile(H, "float", arch) if "tile" not in more else more.pop("tile")
    spans = -(-max(1, -(-slots.shape[1] // tile.tokens)) // splits)
    size = tiles.partial_bytes(T, H, splits, rank)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=q.device)  # NaN as fp32
    modes = {k: v for k, v in (options | more).items() if k != "kv_lora_rank"}
    call = SparseCall(q, kv, slots, out, lse, workspace=workspace, **modes)
    split = tiles.Split(splits, spans * tile.tokens)
    mla_sparse_attention_triton(call, tile=tile, split=split)
    return out, lse


def check(q, kv, slots, options, splits=None, **more):
    out, lse = attend(q, kv, slots, options, splits, **more)
    more.pop("tile", None)
    more.pop("deterministic", None)
    want, want_lse = mla_sparse_attention_reference(
        q, kv, slots, **{"lengths": None, "sink": None, **options, **more}
    )
    assert SHORT_BAR.failures(measure(out, want)) == []
    seen = torch.isfinite(want_lse)
    assert torch.equal(seen, torch.isfinite(lse))
    assert not out[~seen].any() and bool((lse[~seen] == -torch.inf).all())
    assert not seen.any() or (lse - want_lse)[seen].abs().max() < 2**-8


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("heads", [1, 16, 24, 72])
@pytest.mark.parametrize("splits", [1, 3])
def test_matches_the_definition(device, cache, heads, splits):
    check(*sparse_case((300, 0, 64, 1), 130, heads=heads, cache=cache, device=device), splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_in_a_query_shows_in_its_row_alone(device, splits):
    q, kv, slots, options = sparse_case((300, 64), 130, heads=4, device=device)
    q[1, 2, 3] = torch.nan
    out, lse = attend(q, kv, slots, options, splits)
    assert lse.isnan().nonzero().tolist() == [[1, 2]]
    assert torch.equal(out.isnan(), lse.isnan()[..., None].expand_as(out))


@pytest.mark.parametrize("K", [2048, 4096])
def test_a_workspace_serves_deterministic_calls(device, K):
    q, kv, slots, options = sparse_case((300,), K, heads=128, device=device)
    workspace = mla_sparse_workspace(1, 128, K, device=q.device, impl="triton")
    options |= {"deterministic": True, "impl": "triton"}
    out, _ = mla_sparse_attention(q, kv, slots, **options, workspace=workspace)
    assert torch.equal(out, mla_sparse_attention(q, kv, slots, **options)[0])


@pytest.mark.parametrize("column", [3, 570])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_an_infinite_query_leaves_the_other_rows_their_digits(device, number, column):
    """They are fp16 beside fp8 caches, over a power of two that a tile's rows share."""
    q, kv, slots, options = sparse_case((300, 64), 130, cache="fp8", device=device)
    want, want_lse = attend(q, kv, slots, options)
    q[1, 2, column] = number
    out, lse = attend(q, kv, slots, options)
    assert lse.isnan().nonzero().tolist() == [[1, 2]]
    want[1, 2], want_lse[1, 2] = torch.nan, torch.nan
    assert torch.equal(out.nan_to_num(9e9), want.nan_to_num(9e9))
    assert torch.equal(lse.nan_to_num(9e9), want_lse.nan_to_num(9e9))


@pytest.mark.parametrize("heads", [16, 72])
@pytest.mark.parametrize("on_device", [False, True])
def test_fp8_scales(device, heads, on_device):
    """Of any value. Only for wgmma e4m3 * scale is rounded to bf16, as the definition does."""
    q, kv, slots, options = sparse_case((90,), 70, heads=heads, cache="fp8", device=device)
    options["kv_scale"] = torch.tensor([0.02], device=device) if on_device else 0.02
    out, _ = attend(q, kv, slots, options)
    rounds = tiles.choose_tile(heads, "fp8", arch_of(q.device)).wgmma
    want, _ = mla_sparse_attention(
        q if rounds else q.float(), kv, slots, impl="reference", **options
    )
    assert SHORT_BAR.failures(measure(out, want)) == []


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize(
    "tile",
    [
        tiles.Tile(32, 16, warps=8, stages=2),
        tiles.Tile(16, 64, warps=4, stages=2, parts=1),
        tiles.Tile(64, 64, warps=8, stages=2, parts=1, wgmma=True),
    ],
)
def test_tiles(device, cache, tile):
    if tile.wgmma and device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    check(*sparse_case((200, 70), 200, heads=12, cache=cache, device=device), 1, tile=tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dims", [MlaDims(), MlaDims(256, 32)])
def test_dtypes_dims_and_block_sizes(device, dtype, block_size, dims):
    case = sparse_case((90, 33), 70, dims=dims, dtype=dtype, block_size=block_size, device=device)
    check(*case)


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("heads", [16, 72])
@pytest.mark.parametrize("dims", [MlaDims(256, 32), MlaDims(256, 64), MlaDims(512, 32)])
def test_other_rows_in_every_format(device, cache, heads, dims):
    check(*sparse_case((90, 33), 70, heads=heads, cache=cache, dims=dims, device=device))


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("heads", [16, 72])
@pytest.mark.parametrize("options", [{}, {"dims": MlaDims(256, 64)}, {"dtype": torch.float16}])
def test_rows_that_start_anywhere(device, cache, heads, options):
    case = sparse_case((90, 0, 17), 70, heads=heads, cache=cache, device=device, **options)
    q, kv, slots, known = case
    results = []
    for align in ALIGNMENTS["float" if cache == "bf16" else cache]:
        placed = unaligned(kv, align)
        results.append(attend(q, placed, slots, known))
        assert torch.equal(results[-1][0], results[0][0])
    check(q, placed, slots, known)
    check(q, placed, slots, known, deterministic=True)


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("splits", [1, 4])
def test_minus_one_and_numbers_outside_the_cache_stand_anywhere(device, cache, splits):
    q, kv, slots, options = sparse_case((300, 300, 300), 64, cache=cache, device=device)
    spread = torch.full((3, 256), -1, dtype=torch.int32, device=device)
    g = torch.Generator().manual_seed(1)
    spread[0, torch.randperm(256, generator=g)[:64].sort().values.to(device)] = slots[0]
    spread[1, 192:] = slots[1]  # whole tiles of none before the first slot
    spread[2, 3:67] = slots[2]
    outside = [kv.shape[0] * kv.shape[1], 2**31 - 1, -(2**31), -2]
    spread[2, :3] = torch.tensor(outside[:3])
    spread[0, (spread[0] == -1).nonzero()[:40, 0]] = outside[0]
    got, want = attend(q, kv, spread, options, splits), attend(q, kv, slots, options, 1)
    assert SHORT_BAR.failures(measure(got[0], want[0])) == []
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=0)
    check(q, kv, spread, options, splits)


@pytest.mark.parametrize("cache", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(("heads", "splits"), [(8, 3), (72, 1)])
def test_half_queries_over_fp8_caches(device, cache, heads, splits):
    case = sparse_case(
        (300, 0, 64, 1), 130, heads=heads, cache=cache, dtype=torch.float16, device=device
    )
    check(*case, splits)


def test_trailing_minus_one_changes_no_bit(device):
    q, kv, slots, options = sparse_case((100, 30), 100, device=device)
    wide = torch.cat([slots, torch.full_like(slots, -1)], 1)
    for a, b in zip(attend(q, kv, wide, options, 1), attend(q, kv, slots, options, 1), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_cut_rows_off(device, splits):
    case = sparse_case((300,) * 6, 96, device=device)
    lengths = torch.tensor([0, 1, 65, 96, 500, -3], dtype=torch.int32, device=device)
    check(*case, splits, lengths=lengths)


@pytest.mark.parametrize("splits", [1, 2])
def test_sink_takes_weight_and_no_value(device, splits):
    q, kv, slots, options = sparse_case((300, 1, 0), 64, heads=5, device=device)
    sink = torch.tensor([-torch.inf, torch.inf, 0.7, 90.0, -90.0], device=device)
    check(q, kv, slots, options, splits, sink=sink)
    out, _ = attend(q, kv, slots, options, splits, sink=sink)
    assert not out[:, 1].any(), "an infinite sink takes all the weight"


@pytest.mark.parametrize("splits", [1, 3])
def test_scores_far_above_the_first_tile(device, splits):
    """Rows outgrow the reference that the first tile gave them, and are done again."""
    q, kv, slots, options = sparse_case((200, 200), 192, device=device, q_std=0.1)
    big = slots[0, 150].item()
    kv.view(-1, kv.shape[2])[big] = (q[0, 3] * 3000).to(kv.dtype)
    check(q, kv, slots, options, splits)
    out, _ = attend(q, kv, slots, options, splits)
    want = kv.view(-1, kv.shape[2])[big, : options["kv_lora_rank"]]
    assert torch.equal(out[0, 3], want), "one needle takes all the weight"


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_sums_are_exact_and_every_slot_counts_once(device, splits):
    """q = 0 and integer values: all weights are 1, no rounding, any split gives the same bits."""
    g = torch.Generator().manual_seed(2)
    values = torch.randint(-8, 9, (256, 576), generator=g).float()
    q = torch.zeros(1, 1, 6, 576, device=device)
    case = decode_case([256], tokens=[values.to(device)], q=q, device=device)
    slot = torch.randperm(256, generator=g).to(device)
    slots = (case.block_table[0, slot // 64] * 64 + slot % 64).int()[None]
    out, lse = attend(case.q[:, 0], case.kv_cache, slots, case.options, splits)
    exact = (values.sum(0)[:512] / 256).bfloat16().to(device)
    assert torch.equal(out, exact.expand_as(out))
    assert (lse - math.log(256)).abs().max() < 1e-6


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("splits", [1, 3])
def test_largest_scores(device, cache, splits):
    """Also where rows are done again, and where the largest score is negative."""
    q, kv, slots, options = sparse_case((200, 200, 0), 192, cache=cache, device=device, q_std=0.1)
    slots[1, 5::2] = -1
    if cache == "bf16":
        kv.view(-1, kv.shape[2])[slots[0, 150].item()] = (q[0, 3] * 3000).to(kv.dtype)
        q[1, 0] = -kv.view(-1, kv.shape[2])[slots[1, 0].item()] * 9
        slots[1, 1:] = -1
    got, want = (q.new_full(q.shape[:2], torch.nan, dtype=torch.float32) for _ in range(2))
    check(q, kv, slots, options, splits, max_logits=got)
    mla_sparse_attention(q, kv, slots, impl="reference", max_logits=want, **options)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert bool((got[2] == -torch.inf).all()) and (cache != "bf16" or got[1, 0] < -1)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("room", [None, 2])
def test_deterministic_bits_are_those_of_a_token_alone(device, impl, room, monkeypatch):
    """Also where the workspace holds fewer tokens than there are."""
    q, kv, slots, options = sparse_case((700, 600, 3), 600, heads=8, device=device)
    monkeypatch.setattr(launcher, "choose_turns", None)  # by the number of tokens
    if room:
        size = tiles.partial_bytes(room, 8, tiles.fixed_split(600).splits, 512)
        options["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)

    def run(rows):
        return mla_sparse_attention(
            q[rows], kv, slots[rows], impl=impl, deterministic=True, **options
        )

    for batch in ([0, 1, 2], [2, 2, 2, 0]):
        together = run(batch)
        for at in (0, len(batch) - 1):
            for a, b in zip(run([batch[at]]), together, strict=True):
                assert torch.equal(a[0], b[at])
    options.pop("workspace", None)
    check(q, kv, slots, options, deterministic=True)


def test_deterministic_calls_without_a_workspace_take_turns(device, monkeypatch):
    """In one workspace: a recording, which runs here, keeps all that is allocated, and a replay
    allocates it at once. Also where a token needs more than a call allocates otherwise."""
    q, kv, slots, options = sparse_case((700, 600, 3), 600, heads=8, device=device)
    want = attend(q, kv, slots, options, deterministic=True)
    one = tiles.partial_bytes(1, 8, tiles.fixed_split(600).splits, 512)
    monkeypatch.setattr(sparse_call, "FIXED_WORKSPACE", one - 1)
    partials, needed, places = SparseCall.partials, [], []

    def noted(part, split):
        acc, sums = partials(part, split)
        needed.append(4 * (acc.numel() + sums.numel()))
        places.append(acc.data_ptr())
        return acc, sums

    monkeypatch.setattr(SparseCall, "partials", noted)
    monkeypatch.setattr(api, "_RECORDINGS", Recordings())  # it would repeat the call above
    got = attend(q, kv, slots, options, deterministic=True)
    assert needed == [one] * 3 and len(set(places)) == 1
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    workspace = torch.empty(one - 4, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=f"Expected workspace of {one} bytes, got {one - 4}"):
        attend(q, kv, slots, options, deterministic=True, workspace=workspace)


@pytest.mark.parametrize("cache", FORMATS)
def test_tokens_behind_whole_waves_are_a_launch_of_their_own(device, cache, monkeypatch):
    monkeypatch.setattr(tiles, "capacities", lambda tile, device: (16, 16))
    launches, launch = [], launcher.launch_and_merge

    def record(call, tile, split, *args):
        launches.append((call.shape[0], split.splits))
        launch(call, tile, split, *args)

    monkeypatch.setattr(launcher, "launch_and_merge", record)
    lengths = [300, *range(15), 0, 300, 1]
    sink = torch.linspace(-1, 1, 16, device=device)
    q, kv, slots, options = sparse_case(lengths, 512, cache=cache, device=device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    options |= {"sink": sink, "lengths": counts}
    check(q, kv, slots, options)
    assert [tokens for tokens, _ in launches] == [16, 3]
    assert launches[0][1] == 1 < launches[1][1]


def test_ranges_of_the_deterministic_mode():
    assert [tiles.fixed_split(K).splits for K in (0, 1, 512, 513, 2048)] == [1, 1, 1, 2, 4]
    one = tiles.partial_bytes(1, 16, 4, 512)
    assert tiles.partial_bytes(7, 16, 1, 512) == 0  # one range has no partial results
    assert [tiles.tokens_at_once(16, 4, 512, n * one + 5) for n in (0, 3, 40)] == [0, 3, 32]


def test_a_slot_named_twice_counts_twice(device):
    q, kv, slots, options = sparse_case((40,), 4, device=device)
    check(q, kv, torch.cat([slots, slots, slots[:, :1]], 1), options)


@pytest.mark.parametrize("cache", FORMATS)
def test_strided_cache_and_query(device, cache):
    q, kv, slots, options = sparse_case((70, 20), 50, cache=cache, device=device)
    gaps = torch.full((kv.shape[0], 80, kv.shape[2]), 127, device=device).to(kv.dtype)[:, :64]
    gaps.copy_(kv)
    wide = torch.cat([q, torch.full_like(q, torch.nan)], 1)[:, : q.shape[1]]
    spread = torch.cat([slots, slots * 0 + 1], 1)[:, :50]
    got, want = attend(wide, gaps, spread, options), attend(q, kv, slots, options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_no_tokens_and_no_slots(device):
    q, kv, slots, options = sparse_case((70, 20), 50, device=device)
    out, lse = attend(q, kv, slots[:, :0], options)
    assert not out.any() and bool((lse == -torch.inf).all())
    assert attend(q[:0], kv, slots[:0], options)[0].shape == (0, 16, 512)


def test_workspace(device):
    q, kv, slots, options = sparse_case((300, 200), 1024, heads=8, device=device)
    workspace = mla_sparse_workspace(2, 8, 1024, device=q.device, impl="triton")
    assert workspace.numel() > 0
    workspace.fill_(0xFF)
    got = attend(q, kv, slots, options, workspace=workspace)
    want = attend(q, kv, slots, options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    with pytest.raises(ValueError, match=r"Expected workspace of .* bytes, got 16"):
        attend(q, kv, slots, options, workspace=workspace[:16])


def test_what_the_kernel_does_not_take_is_refused(device):
    q, kv, slots, options = sparse_case((70,), 50, device=device)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        attend(q.float(), kv.float(), slots, options)
    with pytest.raises(ValueError, match="kv_lora_rank, rope dim"):
        attend(q, kv, slots, options | {"kv_lora_rank": 500})


@pytest.mark.parametrize("heads", [8, 32, 128])
def test_split_covers_all_slots_and_fits_the_workspace(heads):
    arch, cpu = ARCHS[90], torch.device("cpu")
    tile = tiles.choose_tile(heads, "float", arch)
    for T in (1, 2, 3, 7, 40):
        for K in (0, 1, 31, 100, 2048):
            split = tiles.choose_split(T, heads, K, tile, cpu)
            assert split.span % tile.tokens == 0
            assert split.splits * split.span >= K > (split.splits - 1) * split.span or K == 0
            needed = tiles.partial_bytes(T, heads, split.splits, 512)
            assert needed <= tiles.largest_workspace(40, heads, K, 512, cpu)
    assert tiles.choose_split(4096, heads, 2048, tile, cpu).splits == 1


@pytest.mark.parametrize("sms", [4, 132])
@pytest.mark.parametrize("sm", ARCHS)
def test_a_workspace_is_enough_for_every_cache(sm, sms, monkeypatch):
    """Of every dtype of queries, every number of tokens up to that asked for, and one token in
    deterministic mode."""
    arch, cpu = ARCHS[sm], torch.device("cpu")
    monkeypatch.setattr(tiles, "arch_of", lambda device: arch)
    monkeypatch.setattr(tiles, "INTERPRETED_SMS", sms)
    for heads, most in itertools.product((8, 32, 128), (0, 1, 3, 70)):
        needed = [0, tiles.partial_bytes(min(most, 1), heads, tiles.fixed_split(2048).splits, 512)]
        for kv_format, half in itertools.product(ALIGNMENTS, (False, True)):
            used = [tiles.choose_tile(heads, kv_format, arch, half=half)]
            used.append(tiles.choose_few_rows(heads, MlaDims(), kv_format, arch))
            for t, tile in itertools.product(range(1, most + 1), filter(None, used)):
                splits = tiles.choose_split(t, heads, 2048, tile, cpu).splits
                needed.append(tiles.partial_bytes(t, heads, splits, 512))
        assert tiles.largest_workspace(most, heads, 2048, 512, cpu) == max(needed)
