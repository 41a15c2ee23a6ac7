# SPDX-License-Identifier: Apache-2.0
"""The indexer's benchmark without a GPU: its cases, what it lets pass, how it calls DeepGEMM."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from mla_kernels.indexer.reference import indexer_scores_reference

KEYS, K = 192, 100


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Small cases and a clock that does not run."""
    import indexer_cases
    import sparse_indexer

    monkeypatch.setattr(sparse_indexer, "every_scorer", sparse_indexer.scorers, raising=False)
    monkeypatch.setattr(indexer_cases, "DEVICE", "cpu")
    monkeypatch.setattr(sparse_indexer, "DEVICE", "cpu")
    monkeypatch.setattr(sparse_indexer, "K", K)
    monkeypatch.setattr(sparse_indexer, "scorers", lambda batch: {"torch": {"impl": "torch"}})
    monkeypatch.setattr(sparse_indexer, "topk_peers", lambda *args, **options: {})
    monkeypatch.setattr(sparse_indexer, "deepgemm_logits", lambda batch: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


class Timer:
    def medians(self, runs):
        return dict.fromkeys(runs, 50.0)


def shapes():
    from indexer_cases import Shape

    return [
        Shape(2, KEYS),
        Shape(2, KEYS, 2),
        Shape(2, KEYS, 4),
        Shape(2, KEYS, cache="bf16"),
        Shape(1, KEYS, KEYS, prefill=True),
        Shape(1, KEYS, 50, "bf16", True),
    ]


NAMES = ["b2x192", "b2x192_q2", "b2x192_q4", "b2x192_bf16", "prefill192x192", "prefill50x192_bf16"]


@pytest.mark.parametrize("i", range(len(NAMES)), ids=NAMES)
def test_every_kind_of_case_passes_its_gates_and_is_timed(i):
    import sparse_indexer

    shape = shapes()[i]
    assert shape.name == NAMES[i]
    rows = sparse_indexer.bench(Timer(), shape)
    assert not [row for row in rows if "failed" in row]
    merge = "merge of 2 ranks"
    chosen = ["topk", merge] * (i in (0, 1, 2, 4))
    assert [row["op"] for row in rows] == ["scores", *chosen, "scores+topk", "scores+topk"]
    seen = sum(range(shape.keys - shape.s_q + 1, shape.keys + 1)) * shape.batch
    for row in rows:
        moved = {"topk": 4 * seen, merge: shape.rows * 5 * 4 * K}.get(row["op"], shape.bytes)
        assert row["gbps"] == round(moved / 50e3, 1)
    assert rows[0]["tflops"] == round(shape.flops / 50e6, 1)


def test_on_hopper_both_are_timed_in_fp8_too(monkeypatch):
    """With bits that their products do not have, only those in fp8 are wrong."""
    import sparse_indexer

    def on_hopper(of, error):
        def run(*args, fp8_products=False, **options):
            found = of(*args, **options)
            return found.mul_(1 + error * fp8_products) if found.is_floating_point() else found

        return run

    ways = {"torch": {"impl": "torch"}, sparse_indexer.FP8: {"fp8_products": True}}
    monkeypatch.setattr(sparse_indexer, "scorers", lambda batch: ways)
    scores, topk = sparse_indexer.indexer_scores, sparse_indexer.indexer_topk
    monkeypatch.setattr(sparse_indexer, "indexer_topk", on_hopper(topk, 0))
    for error, failing in ((1e-4, 0), (1e-2, 2)):
        monkeypatch.setattr(sparse_indexer, "indexer_scores", on_hopper(scores, error))
        rows = sparse_indexer.bench(Timer(), shapes()[0])
        both = [row for row in rows if row["op"] == "scores+topk"]
        names = [f"mla_kernels/{form}" for form in ("two steps", "fused")]
        assert {row["impl"] for row in both} == {*names, *(f"{n}/fp8_products" for n in names)}
        failed = [row["impl"] for row in both if "failed" in row]
        assert failed == [f"{name}/fp8_products" for name in names][:failing], error


@pytest.mark.parametrize("i", range(len(NAMES)), ids=NAMES)
def test_the_rows_are_the_last_tokens(i):
    """Bytes, products and what is right, counted key by key."""
    from indexer_cases import HEADS, golden, make_batch, score_error

    shape = shapes()[i]
    batch = make_batch(shape)
    first = KEYS - shape.s_q + 1
    assert batch.lengths.tolist() == [*range(first, KEYS + 1)] * shape.batch
    assert shape.flops == 2 * HEADS * 128 * int(batch.lengths.sum())
    assert shape.bytes == batch.case.k_cache.nbytes
    ids = torch.arange(shape.rows, dtype=torch.int32) // shape.s_q
    args = batch.args[:4]
    want = indexer_scores_reference(*args, batch.lengths, request_ids=ids)
    rows, right = golden(batch)
    assert torch.equal(right, want[rows])
    assert score_error(want, rows, right) == 0
    want[-1, int(batch.lengths[-1]) - 1] += 10
    assert score_error(want, rows, right) > 1e-5


def test_a_wrong_result_is_not_timed(monkeypatch):
    import sparse_indexer

    def shifted(of):
        return lambda *args, **options: of(*args, **options).add_(1)

    for name, failing in (
        ("indexer_scores", {"scores"}),
        ("exact_topk", {"topk", "merge of 2 ranks", "scores+topk"}),
        ("merge_topk", {"merge of 2 ranks"}),
        ("indexer_topk", {"scores+topk"}),
    ):
        two_steps_are_sound = name in ("indexer_topk", "merge_topk")
        with monkeypatch.context() as patch:
            patch.setattr(sparse_indexer, name, shifted(getattr(sparse_indexer, name)))
            rows = sparse_indexer.bench(Timer(), shapes()[1])
        found = {row["op"] for row in rows if "failed" in row}
        assert found >= failing, name
        (steps,) = (row for row in rows if row["impl"] == "mla_kernels/two steps")
        assert ("us" in steps) == two_steps_are_sound, name
        assert not [row for row in rows if "failed" in row and "us" in row]


def test_a_peer_that_chooses_wrongly_is_not_timed(monkeypatch):
    """In any order, of equal scores any, and what it likes behind the keys of a short row."""
    import sparse_indexer
    from sparse_report import markdown

    def peers(scores, lengths, k, *, prefill):
        def best():
            unseen = torch.arange(scores.shape[1]) >= lengths[:, None]
            return torch.topk(scores.masked_fill(unseen, -torch.inf), k, dim=1).indices

        def changed(column, key):
            found = best().int()
            found[-1, column] = key if key is not None else found[-1, 1]
            return found

        def raises():
            raise RuntimeError("no kernel image\nfor this GPU")

        return {
            "sound": best,
            "reversed": lambda: best().flip(1).int(),
            "worse": lambda: changed(0, int(scores[-1].argmin())),
            "twice": lambda: changed(0, None),
            "none": lambda: changed(0, -1),
            "outside": lambda: changed(0, scores.shape[1]),
            "unwritten": lambda: changed(0, -2),
            "raises": raises,
        }

    monkeypatch.setattr(sparse_indexer, "topk_peers", peers)
    for i in (0, 4):  # decode rows; rows of which some have fewer than K keys
        rows = [row for row in sparse_indexer.bench(Timer(), shapes()[i]) if row["op"] == "topk"]
        timed = {row["impl"] for row in rows if "us" in row}
        assert timed == {"mla_kernels/triton", "sound", "reversed"}
        failed = {row["impl"]: row["failed"] for row in rows if "failed" in row}
        assert set(failed) == {"worse", "twice", "none", "outside", "unwritten", "raises"}
        assert failed["raises"] == "RuntimeError: no kernel image for this GPU"
    attention = {"machine": {}, "command": "x", "rows": []}
    page = markdown(attention, {**attention, "rows": rows})
    assert f"* {NAMES[4]} raises: RuntimeError: no kernel image for this GPU\n" in page


def test_of_equal_scores_any_may_be_chosen():
    from indexer_cases import chooses_as_well, sorted_topk

    scores, lengths = torch.tensor([[2.0, 3.0, 2.0, 9.0]]), torch.tensor([3])
    want = sorted_topk(scores, lengths, 2)
    assert want.tolist() == [[0, 1]]
    for found, well in (([2, 1], True), ([0, 2], False), ([1, 3], False), ([1, 1], False)):
        assert chooses_as_well(torch.tensor([found]), want, scores, lengths) == well
    want = sorted_topk(scores, lengths, 3)  # twice the first for it and its equal
    for found, well in (([2, 1, 0], True), ([0, 1, 0], False)):
        assert chooses_as_well(torch.tensor([found]), want, scores, lengths) == well
    want = sorted_topk(scores, lengths, 4)
    for found, well in (([2, 1, 0, -1], True), ([3, 2, 1, 0], True), ([2, 1, 0, 0], False)):
        assert chooses_as_well(torch.tensor([found]), want, scores, lengths) == well


def test_logits_of_deepgemm_that_are_wrong_are_not_timed(monkeypatch):
    import sparse_indexer
    from indexer_cases import golden

    def logits(batch, off):
        scores = torch.zeros(batch.shape.rows, KEYS)
        rows, want = golden(batch)
        scores[rows] = want.float() * off
        return lambda: scores

    for off, timed in ((1.0, True), (1.01, False), (float("nan"), False)):
        monkeypatch.setattr(sparse_indexer, "deepgemm_logits", lambda b, off=off: logits(b, off))
        rows = sparse_indexer.bench(Timer(), shapes()[0])
        (row,) = (row for row in rows if row["impl"] == "deepgemm")
        assert ("us" in row) == timed and ("failed" in row) != timed


def test_the_sort_leaves_out_what_is_not_seen():
    from indexer_cases import sorted_topk

    scores = torch.tensor([[1.0, 3.0, 3.0, 9.0], [2.0, 9.0, 9.0, 9.0], [-0.0, 0.0, -torch.inf, 9]])
    lengths = torch.tensor([3, 1, 3], dtype=torch.int32)
    assert sorted_topk(scores, lengths, 2).tolist() == [[1, 2], [0, -1], [0, 1]]
    assert sorted_topk(scores, lengths, 3).tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, -1]]


NOT_LOADED = "libcudart.so.12: cannot open shared object file"


@pytest.mark.parametrize(
    ("problem", "there", "says"),
    [
        (TypeError("no such option"), True, ["TypeError: no such option"]),
        (ImportError(NOT_LOADED), True, [f"ImportError: {NOT_LOADED}"]),
        (ModuleNotFoundError("No module named 'vllm'"), False, []),
    ],
)
def test_deepgemm_is_left_out_only_where_vllm_is(problem, there, says, monkeypatch):
    import sparse_indexer

    def deepgemm(batch):
        raise problem

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    monkeypatch.setattr(sparse_indexer, "deepgemm_logits", deepgemm)
    rows = sparse_indexer.bench(Timer(), shapes()[0])
    failed = [(row["op"], row["impl"], row["failed"]) for row in rows if "failed" in row]
    assert failed == [("scores", "deepgemm", said) for said in says]


def test_scores_that_are_not_written_are_not_those_of_the_run_before(monkeypatch):
    """All write one buffer, which one of two leaves as it is. What lies behind stays -inf."""
    import sparse_indexer

    scores, topk, behind = sparse_indexer.indexer_scores, sparse_indexer.indexer_topk, []

    def lazy(*args, out, fp8_products=False, **options):
        behind.append(float(out[0, -1]))
        return out if fp8_products else scores(*args, out=out, **options)

    def fused(*args, fp8_products, **options):
        return topk(*args, **options)

    ways = {"torch": {"impl": "torch"}, sparse_indexer.FP8: {"fp8_products": True}}
    monkeypatch.setattr(sparse_indexer, "scorers", lambda batch: ways)
    monkeypatch.setattr(sparse_indexer, "indexer_scores", lazy)
    monkeypatch.setattr(sparse_indexer, "indexer_topk", fused)
    rows = sparse_indexer.bench(Timer(), shapes()[1])
    assert set(behind) == {-torch.inf}
    forms = ("torch", "two steps", "fused")
    timed = {row["impl"] for row in rows if "us" in row and row["op"].startswith("scores")}
    assert timed == {f"mla_kernels/{form}" for form in forms}
    failed = {row["impl"] for row in rows if "failed" in row}
    wrong = ("hopper", "two steps", "fused")
    assert failed == {f"mla_kernels/{form}/fp8_products" for form in wrong}


# Where vLLM has the number of rows of a request that it takes, and the options up to 0.32.
VERSIONS = [((1, 2, 4), True), ((1, 2), True), ((1,), True), (None, True), ((1, 2, 4), False)]


@pytest.mark.parametrize(("native", "cleans"), VERSIONS)
@pytest.mark.parametrize("i", range(len(NAMES)), ids=NAMES)
def test_deepgemm_is_asked_for_the_same_scores(i, native, cleans, monkeypatch):
    """A stand-in with the interface that vLLM documents, by our definition."""
    import indexer_peers
    from indexer_cases import golden, make_batch, score_error

    def schedule(lengths, block_size, sms):
        assert lengths.is_contiguous() and block_size == 64
        return "a schedule"

    def paged(q, cache, weights, lengths, table, planned, width, clean_logits):
        assert planned == "a schedule" and q[1] is None and q[0].shape[1] in (native or (1, 2))
        ids = torch.arange(lengths.numel(), dtype=torch.int32) // lengths.shape[1]
        args = q[0].flatten(0, 1), cache.squeeze(2), weights, table, lengths.flatten()
        scores = indexer_scores_reference(*args, request_ids=ids).float()
        assert scores.shape[1] == width
        return scores

    def prefill(q, kv, weights, starts, ends, clean_logits):
        keys = kv[0].double() * kv[1].double()[:, None]
        dots = torch.einsum("thd,nd->thn", q[0].double(), keys).relu()
        assert not starts.any() and ends.dtype == starts.dtype == torch.int32
        return torch.einsum("thn,th->tn", dots, weights.double()).float()

    def paged_033(q, cache, weights, lengths, table, planned, width, indices=None):
        assert indices is None
        return paged(q, cache, weights, lengths, table, planned, width, False)

    def prefill_033(q, kv, weights, starts, ends, max_seqlen_k):
        assert max_seqlen_k >= int((ends - starts).max())
        return prefill(q, kv, weights, starts, ends, False)[:, :max_seqlen_k]

    fake = SimpleNamespace(
        get_paged_mqa_logits_metadata=schedule,
        fp8_fp4_paged_mqa_logits=paged if cleans else paged_033,
        fp8_fp4_mqa_logits=prefill if cleans else prefill_033,
    )
    if native:
        fake.native_next_n_supported = lambda s_q: s_q in native
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", fake)
    monkeypatch.setitem(sys.modules, "vllm.utils", SimpleNamespace(deep_gemm=fake))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    batch = make_batch(shapes()[i])
    run = indexer_peers.deepgemm_logits(batch)
    assert (run is None) == (batch.shape.cache == "bf16")
    if run:
        assert score_error(run(), *golden(batch)) < 1e-6


def test_the_cases_are_those_that_an_engine_has():
    from indexer_cases import SHAPES

    names = [shape.name for shape in SHAPES]
    assert len(set(names)) == len(names)
    kinds = {(s.batch, s.s_q, s.cache, s.prefill) for s in SHAPES}
    assert {(64, 2, "fp8", False), (64, 4, "fp8", False), (256, 1, "fp8", False)} <= kinds
    assert {(64, 1, "bf16", False), (1, 2048, "fp8", True), (1, 2048, "bf16", True)} <= kinds
    assert any(shape.prefill and shape.s_q == shape.keys for shape in SHAPES)


def test_a_run_writes_its_rows_and_the_page_of_both(tmp_path, monkeypatch):
    import sparse_indexer

    monkeypatch.setattr(sparse_indexer, "Timer", Timer)
    monkeypatch.setattr(sparse_indexer, "describe_gpu", lambda: {"gpu": "X"})
    monkeypatch.setattr(sparse_indexer, "need_gpu", lambda: None)
    monkeypatch.setattr(sparse_indexer, "SHAPES", shapes())
    words = ["--cases", "_q2|prefill192", "--results", str(tmp_path)]
    assert sparse_indexer.main(words) == 0
    rows = json.loads((tmp_path / "sparse_indexer_partial.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {"b2x192_q2", "prefill192x192"}
    page = (tmp_path / "sparse_indexer_partial.md").read_text()
    assert "| prefill192x192 | 50.0 |" in page and not (tmp_path / "sparse.md").exists()
    # The attention has not run on this GPU: the page is of the indexer alone.
    assert sparse_indexer.main(words[2:]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sparse.md", "sparse_indexer.json"]
    page = (tmp_path / "sparse.md").read_text()
    assert page.startswith("# Sparse MLA on a GPU\n\n## Indexer scores and exact top-k\n\ngpu X.")
    assert "| prefill192x192 | 50.0 |" in page and "cold L2" in page and "slots" not in page
    attention = {"machine": {"gpu": "X"}, "command": "x", "rows": []}
    (tmp_path / "sparse.json").write_text(json.dumps(attention))
    # What was left of a run of the attention that was cut off is its own.
    (tmp_path / "sparse_partial.md").write_text("cut off")
    assert sparse_indexer.main(words[2:]) == 0
    page = (tmp_path / "sparse.md").read_text()
    assert "2048 slots a token" in page and "| prefill192x192 | 50.0 |" in page
    assert (tmp_path / "sparse_partial.md").read_text() == "cut off"


def test_a_gpu_without_the_hopper_kernel_has_the_portable_one(monkeypatch):
    import sparse_indexer
    from indexer_cases import Shape, make_batch

    scorers, batch = sparse_indexer.every_scorer, make_batch(Shape(2, KEYS))
    assert scorers(batch) == {"triton": {"impl": "triton"}}  # the tensors are on a CPU
    monkeypatch.setattr(sparse_indexer, "choose_impl", lambda *_, **options: None)
    assert list(scorers(batch)) == ["triton", "hopper", "hopper/fp8_products"]
