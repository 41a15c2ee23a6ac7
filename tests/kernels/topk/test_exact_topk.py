# SPDX-License-Identifier: Apache-2.0
"""exact_topk against a stable descending sort, on the rows where top-k kernels go wrong."""

import numpy as np
import pytest
import torch
from mla_kernels import exact_topk, exact_topk_workspace
from mla_kernels.topk import plan, torch_impl
from mla_kernels.topk.api import MAX_K
from mla_kernels.topk.triton import many_launcher, spread_launcher
from torch.utils._python_dispatch import TorchDispatchMode

INF, NAN = float("inf"), float("nan")
IMPLS = ["reference", "torch", "triton"]


def stable_sort_topk(scores, k, lengths=None):
    """The first k of torch.sort(stable, descending), masked entries dropped, indices ascending."""
    out = torch.full((len(scores), k), -1, dtype=torch.int32)
    for t, row in enumerate(scores.cpu()):
        n = row.numel() if lengths is None else int(lengths[t])
        row = row[:n].nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
        order = torch.sort(row, descending=True, stable=True).indices
        chosen = order[row[order] > -INF][:k].sort().values
        out[t, : len(chosen)] = chosen.int()
    return out


def rows_of(kind, T, n, g):
    x = torch.randn(T, n, generator=g)
    u = torch.rand(T, n, generator=g)
    if kind == "equal":
        x = torch.full((T, n), -3.5)
    elif kind == "zeros":
        x = torch.where(u < 0.5, -0.0, 0.0)
    elif kind == "relu":  # most scores are an exact zero of either sign
        x = torch.relu(x - 0.7) * torch.where(u < 0.5, -1.0, 1.0)
    elif kind == "few":
        x = torch.randint(-2, 3, (T, n), generator=g).float()
    elif kind == "masked tail":
        x[:, n // 3 :] = -INF
    elif kind == "all masked":
        x = torch.full((T, n), -INF)
    elif kind == "inf and nan":
        x = torch.where(u < 0.1, NAN, torch.where(u < 0.15, INF, torch.where(u < 0.3, -INF, x)))
    elif kind == "inf alone":
        x = torch.where(u < 0.01, INF, -INF)
    elif kind == "ascending":
        x = torch.arange(n).float().expand(T, n).contiguous() - n / 2
    elif kind == "denormal":
        x = x * 1e-40
    elif kind == "one bit apart":
        bits = torch.randint(0, 40, (T, n), generator=g, dtype=torch.int32) + 0x3F800000
        x = bits.view(torch.float32)
    return x


KINDS = ["normal", "equal", "zeros", "relu", "few", "masked tail", "all masked", "inf and nan"]
KINDS += ["inf alone", "ascending", "denormal", "one bit apart"]


def check(scores, k, impl, device, lengths=None):
    want = stable_sort_topk(scores, k, lengths)
    moved = None if lengths is None else lengths.to(device)
    out = torch.full((len(scores), k), 123456789, dtype=torch.int32, device=device)
    got = exact_topk(scores.to(device), k, lengths=moved, out=out, impl=impl)
    assert got is out
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_a_stable_sort(impl, kind, device):
    g = torch.Generator().manual_seed(0)
    for n, k in ((1, 1), (1, 5), (63, 7), (300, 300), (1500, 64), (2100, 2048)):
        check(rows_of(kind, 2, n, g), k, impl, device)


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_past_the_length_do_not_take_part(impl, device):
    g = torch.Generator().manual_seed(1)
    n = 700
    lengths = torch.tensor([0, 1, 31, 350, 699, 700], dtype=torch.int32)
    for kind in ("normal", "few", "inf and nan"):
        scores = rows_of(kind, len(lengths), n, g)
        for t, length in enumerate(lengths):
            scores[t, length:] = INF if t % 2 else NAN
        check(scores, 40, impl, device, lengths)


@pytest.fixture
def short_levels(monkeypatch):
    """Rows of a few thousand take one or two levels, as rows of 32K to 1M do on a device; each row
    is one program's."""
    monkeypatch.setattr(spread_launcher, "resident_programs", lambda device: 0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(plan, "MAX_TOP", 128)


@pytest.fixture
def shared_rows(monkeypatch):
    """Rows of a few thousand are shared by programs, as few rows of 32K and more are."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(plan, "MAX_TOP", 128)
        monkeypatch.setattr(plan, "SPREAD_CHUNKS", (128, 512))
        monkeypatch.setattr(spread_launcher, "resident_programs", lambda device: 30)


@pytest.fixture
def many_rows(monkeypatch):
    """Two rows are already more than there are SMs: each is listed, then searched."""
    monkeypatch.setattr(many_launcher, "resident_programs", lambda device: 1)
    if not torch.cuda.is_available():
        monkeypatch.setattr(plan, "LIST_ROOM", 256)
        monkeypatch.setattr(plan, "MAX_TOP", 128)


HOW = ["short_levels", "shared_rows", "many_rows"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "levels"), [(1000, 16, 1), (5003, 16, 2), (8192, 100, 2)])
def test_levels_of_groups_lose_nothing(short_levels, n, k, levels, kind, device):
    if not torch.cuda.is_available():
        assert plan.topk_tiles(n, k).levels == levels
    g = torch.Generator().manual_seed(2)
    scores = rows_of(kind, 5, n, g)
    check(scores, k, "triton", device)
    # Rows of one table need different numbers of levels.
    lengths = torch.tensor([0, 100, 129, n // 2, n - 1], dtype=torch.int32)
    check(scores, k, "triton", device, lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "chunk"), [(301, 150, 128), (1400, 100, 512)])
def test_rows_shared_by_programs_lose_nothing(shared_rows, n, k, chunk, kind, device):
    if device == "cpu":
        assert spread_launcher.chunk_of_rows(3, n, k, torch.device(device)) == chunk
    else:
        n, k = 100 * n, 10 * k
    scores = rows_of(kind, 3, n, torch.Generator().manual_seed(7))
    # Rows of one table have different numbers of programs.
    check(scores, k, "triton", device, torch.tensor([n, n // 2, 5], dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(300, 100), (2003, 100), (4096, 16)])
def test_many_rows_lose_nothing(many_rows, n, k, kind, device):
    if device == "cuda":
        n, k = 16 * n, 16 * k
    g = torch.Generator().manual_seed(10)
    scores = rows_of(kind, 4, n, g)
    check(scores, k, "triton", device)
    check(scores, k, "triton", device, torch.tensor([n - 1, n // 2, 7, 0], dtype=torch.int32))


def hostile(room, k, n):
    """Rows whose groups, the scores that are `room` apart, tell little of them."""
    g = torch.Generator().manual_seed(11)
    rows = torch.randn(8, n, generator=g)
    group = torch.arange(n) % room
    rows[0] = torch.where(group < k, rows[0] + 9, rows[0])  # the best are in k groups
    rows[1] = torch.where(group < k // 2, rows[1], -INF)  # all are in fewer than k
    rows[1, group < k // 2] = torch.arange(int((group < k // 2).sum())).float()
    rows[2] = torch.where(group < k // 2, -1.0, -INF)
    rows[2, : k // 2] = 1.0  # the best of each is the same
    rows[3, :3] = torch.tensor([1e30, -1e30, INF])  # some are far away
    rows[4] = torch.randn(n // 64 + 1, generator=g).repeat_interleave(64)[:n]  # equal neighbours
    rows[5] = torch.exp(40 * rows[5])  # of all sizes
    rows[6] = torch.where(rows[6] > 1.5, rows[6], 0.25)  # the last are equal
    rows[7] = torch.where(
        torch.arange(n) < n - k - 3, 1.0, torch.nextafter(torch.ones(()), -rows[7])
    )
    return rows


@pytest.mark.parametrize("k", [64, 100])
def test_groups_may_tell_little_of_a_row(many_rows, k, device):
    room = plan.LIST_ROOM
    k = k * room // 256
    check(hostile(room, k, 33 * room + 5), k, "triton", device)


def test_when_rows_are_many(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(many_launcher, "resident_programs", lambda device: 132)
    assert many_launcher.are_many(133, 16385, 64, device)
    assert not many_launcher.are_many(132, 16385, 64, device)  # an SM each
    assert not many_launcher.are_many(4096, 16384, 64, device)  # a program holds a row
    monkeypatch.setattr(many_launcher, "resident_programs", lambda device: 0)
    assert not many_launcher.are_many(4096, 16385, 64, device)  # AMD


def test_the_list_takes_more_than_can_be_chosen():
    assert plan.LIST_ROOM >= 2 * MAX_K
    assert plan.workspace_words(32768) >= plan.LIST_ROOM + 32768 // 32


def test_shared_rows_of_one_length(shared_rows, device):
    n = 40016 if device == "cuda" else 400
    check(rows_of("normal", 2, n, torch.Generator().manual_seed(9)), 30, "triton", device)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: rows too long for the interpreter"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(40000, 2048), (40001, 2048), (140000, 100), (300001, 2048)])
@pytest.mark.parametrize("shared", [True, False])
def test_long_rows(n, k, kind, shared, monkeypatch):
    if not shared:
        monkeypatch.setattr(spread_launcher, "resident_programs", lambda device: 0)
    g = torch.Generator().manual_seed(6)
    scores = rows_of(kind, 3, n, g)
    check(scores, k, "triton", "cuda", torch.tensor([n, n // 2, 300], dtype=torch.int32))
    check(scores, k, "triton", "cuda", torch.tensor([n - 1, 0, 17000], dtype=torch.int32))


@pytest.mark.parametrize(
    ("impl", "kind"),
    [
        *(("torch", kind) for kind in KINDS),
        ("reference", "few"),
        ("triton", "few"),  # one kind: the interpreter takes ten seconds for it
    ],
)
def test_the_longest_row(impl, kind, device):
    """2^20 scores, the last one the best."""
    scores = rows_of(kind, 1, plan.MAX_WIDTH, torch.Generator().manual_seed(8))
    scores[0, -1] = 100.0
    assert plan.MAX_WIDTH == 2**20
    check(scores, 2048, impl, device)


@pytest.mark.parametrize("how", HOW)
def test_the_best_may_sit_in_one_group_or_one_in_each(how, device, request):
    request.getfixturevalue(how)
    n, k = 4096, 32
    scores = torch.randn(3, n, generator=torch.Generator().manual_seed(3))
    scores[0, 1000 : 1000 + k] += 100  # k neighbours
    scores[1, :: n // k] += 100  # one in each of k groups
    scores[2, n - 1] = 100  # and the last score of a row
    check(scores, k, "triton", device)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("how", HOW)
def test_a_hundred_runs_agree(how, impl, device, request):
    request.getfixturevalue(how)
    interpreted = device == "cpu" and impl == "triton"  # slowly, and its programs in order
    n = 40000 if device == "cuda" else 300 if interpreted else 4000
    scores = rows_of("few", 2, n, torch.Generator().manual_seed(4)).to(device)
    first = exact_topk(scores, 16, impl=impl)
    for _ in range(3 if interpreted else 100):
        assert torch.equal(exact_topk(scores, 16, impl=impl), first)


@pytest.mark.parametrize("how", HOW)
def test_rows_may_be_strided_and_the_workspace_given(how, device, request):
    request.getfixturevalue(how)
    wide = rows_of("normal", 3, 3000, torch.Generator().manual_seed(5)).to(device)
    scores = wide[:, 100:2100]
    workspace = exact_topk_workspace(3, 2000, torch.device(device))
    got = exact_topk(scores, 20, workspace=workspace, impl="triton")
    assert torch.equal(got.cpu(), stable_sort_topk(scores, 20))


class LargestResult(TorchDispatchMode):
    """Elements of the largest result of an operator while this is entered."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.elements = max(self.elements, *(x.numel() for x in made))
        return result


def test_torch_takes_a_prompt_over_a_long_context_in_turns(monkeypatch, device):
    """Else what it makes of the scores is several times as large as they are."""
    monkeypatch.setattr(torch_impl, "MAX_ELEMENTS", 2500)
    T, n, k = 11, 1000, 30
    wide = rows_of("few", T, n + 7, torch.Generator().manual_seed(12))
    scores, lengths = wide[:, 3 : n + 3], torch.arange(T, dtype=torch.int32) * 100
    check(scores, k, "torch", device)
    check(scores, k, "torch", device, lengths)
    given = scores.to(device)
    with LargestResult() as largest:
        torch_impl.exact_topk_torch(given, k)
    assert largest.elements <= 2500
    monkeypatch.setattr(torch_impl, "MAX_ELEMENTS", n - 1)  # one row is more than is taken at once
    check(scores, k, "torch", device, lengths)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_and_no_columns(impl, device):
    assert exact_topk(torch.empty(0, 5, device=device), 3, impl=impl).shape == (0, 3)
    assert exact_topk(torch.empty(2, 0, device=device), 3, impl=impl).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 9, dtype=torch.bfloat16)}, r"scores.dtype in \[torch.float32\]"),
        ({"scores": torch.zeros(9)}, r"scores of shape \[T, n\]"),
        ({"scores": torch.zeros(9, 2).T}, "contiguous last dimension"),
        (
            {"scores": torch.zeros(1, 2**20 + 1)},
            r"n \(scores.shape\[1\]\) in 0..1048576, got 1048577",
        ),
        ({"k": 0}, "k in 1..2048, got 0"),
        ({"k": 2049}, "k in 1..2048, got 2049"),
        ({"k": torch.tensor(3)}, r"k in 1..2048, got tensor\(3\)"),
        ({"workspace": torch.empty(9)}, r"workspace.dtype in \[torch.int32\]"),
        ({"workspace": torch.empty(9, device="meta").int()}, "workspace on cpu.*got meta"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths of shape \[2\]"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths.dtype"),
        ({"out": torch.zeros(2, 5, dtype=torch.int32)}, r"out of shape \[2, 3\]"),
        ({"k": np.int64(3), "out": torch.zeros(2, 5, dtype=torch.int32)}, r"out of shape \[2, 3\]"),
        ({"impl": "hopper"}, "impl of exact_topk"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        exact_topk(**{"scores": torch.zeros(2, 9), "k": 3, **change})


def test_when_rows_are_shared():
    assert plan.spread_chunk(1, 131072, 132) == 4096
    assert plan.spread_chunk(1, 2**20, 132) == 8192
    assert plan.spread_chunk(8, 131072, 132) == 8192
    assert plan.spread_chunk(64, 32768, 132) == 16384
    assert plan.spread_chunk(64, 131072, 132) is None
    assert plan.spread_chunk(66, 32768, 132) == 16384  # as many programs as run at once, not one
    assert plan.spread_chunk(67, 32768, 132) is None  # more: they wait for each other
    assert plan.spread_chunk(1, 2**20, 256) == 4096  # as many programs as have words of their own
    assert plan.spread_chunk(1, 2**20, 512) is None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert spread_launcher.chunk_of_rows(1, 16384, 2048, device) is None  # one program holds it


@pytest.mark.parametrize("chunk", plan.SPREAD_CHUNKS)
def test_no_more_threads_than_keys(chunk):
    """A program with more would count some keys twice."""
    threads = 32 * spread_launcher.spread_warps(chunk)
    assert threads <= chunk
    modes = {"has_lengths": False, "pdl": False, "ptx": False}
    for programs in (1, 32, 33, plan.SPREAD_PARTS):  # whose words a warp reads, or all threads
        parts = spread_launcher.spread_constants(9, programs * chunk, chunk, 0, 0, **modes)["PARTS"]
        assert parts >= programs and (parts <= 32 or parts >= threads)


@pytest.mark.parametrize("k", [1, MAX_K])
@pytest.mark.parametrize("width", [1, 129, 4096, 16384, 16385, 131073, 131080, 2**20])
def test_tiles_and_levels_hold_a_row(width, k):
    """Of 131073 scores the last has a group of level 1 to itself, and that one of level 2, which
    begins another 64 bytes."""
    tiles = plan.topk_tiles(width, k)
    assert tiles.top <= tiles.tile <= plan.MAX_TOP
    assert 32 * tiles.num_warps <= tiles.tile
    assert tiles.top * plan.GROUP**tiles.levels >= width
    workspace = plan.exact_topk_workspace(3, width, torch.device("cpu"))
    level1, level2 = plan.level_views(workspace, 3, width)
    assert level1.shape[1] * plan.GROUP >= width and level2.shape[1] * plan.GROUP**2 >= width


@pytest.mark.parametrize("how", HOW)
def test_a_small_workspace_and_a_row_too_long_are_refused(how, device, request):
    request.getfixturevalue(how)
    scores = torch.zeros(2, 4000, device=device)
    if not torch.cuda.is_available():
        small = torch.empty(10, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=r"workspace of .* int32, got 10"):
            exact_topk(scores, 3, workspace=small, impl="triton")
    with pytest.raises(ValueError, match=f"at most {plan.MAX_WIDTH} scores"):
        plan.topk_tiles(plan.MAX_WIDTH + 1, 3)


@pytest.mark.parametrize("width", [1, 4095, 4097, 70_000])
def test_rows_of_a_bitmap_do_not_overlap(width):
    """A program writes the bits of LIST_ROOM scores at a time, past the end of a row too."""
    workspace = plan.exact_topk_workspace(3, width, torch.device("cpu"))
    _, bitmaps = plan.list_views(workspace, 3, width)
    assert bitmaps.shape[1] * plan.BITMAP_WORD >= width
    assert bitmaps.shape[1] * plan.BITMAP_WORD % plan.LIST_ROOM == 0


def test_workspaces_of_no_size():
    cpu = torch.device("cpu")
    for rows, width, name in ((-1, 9, "rows"), (9, -1, "width"), (1, plan.MAX_WIDTH + 1, "width")):
        with pytest.raises(ValueError, match=f"{name} in 0"):
            plan.exact_topk_workspace(rows, width, cpu)
