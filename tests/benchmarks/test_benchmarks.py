# SPDX-License-Identifier: Apache-2.0
"""What of the GPU benchmarks runs without a GPU: options, reports, the arithmetic of energy."""

import importlib
import importlib.util
import json

import pytest

PUBLISHED_CASES = 17


def report(mode: str, **extra) -> dict:
    def row(impl: str, us: float, **more) -> dict:
        return {
            "case": "b96_h128_q1_k16384", "impl": impl, "us": us, "tflops": 600.0, "gbps": 2500.0,
            "rel_err": 0.002, "mode": mode, "floor_us": 651.2, **more,
        }  # fmt: skip

    power = {"joule_per_step": 0.45, "watts": 690.4, "sm_mhz": 1400}
    rows = [
        row("mla_kernels/hopper/pow2", 700.0, **(power if extra.get("power") else {})),
        row("mla_kernels/triton/pow2", 800.0),
        row("peer/flashmla", 770.0),
        row("peer/vllm_triton", 2000.0),
        {"case": "b96_h128_q1_k16384", "impl": "peer/fa3", "failed": "fro inf", "mode": mode,
         "floor_us": 651.2},
    ]  # fmt: skip
    machine = {"gpu": "X", "read_gbps": 4400.0, "bf16_gemm_tflops": 685.0}
    found = {"machine": machine, "mode": mode, "command": "python x.py", "rows": rows}
    return found | ({"roofs": {"read_gbps": 4300.0}} if mode == "sustained" else {})


@pytest.mark.parametrize("mode", ["cold", "paused", "sustained"])
def test_dense_report(mode, tmp_path):
    from dense_report import write_report

    write_report(report(mode, power=True), tmp_path)
    stem = "dense_decode" if mode == "cold" else f"dense_{mode}"
    text = (tmp_path / f"{stem}.md").read_text()
    assert json.loads((tmp_path / f"{stem}.json").read_text())["mode"] == mode
    assert (
        "| b96_h128_q1_k16384 | 651.2 | 700.0 | 800.0 | 770.0 | 2000.0 | failed | 1.10 | 2.50 |"
        in text
    )
    assert "geometric mean 1.100, at least as fast in 1 of 1 cases" in text
    assert "peer/fa3: fro inf" in text
    assert ("0.450 (690, 1400)" in text) == (mode == "sustained")
    assert (tmp_path / f"{stem}.png").exists() == (mode == "cold")


def test_ours_is_held_to_the_better_peer():
    from dense_report import markdown

    found = report("cold")
    fa3 = next(row for row in found["rows"] if row["impl"] == "peer/fa3")
    for us, ratio in ((630.0, "0.90"), (900.0, "1.10")):
        fa3.pop("failed", None)
        fa3["us"] = us
        assert f"| 2000.0 | {us} | {ratio} | 2.50 |" in markdown(found)


def test_the_floor_is_the_longer_of_the_two():
    from dense_cases import even

    roofs = {"bf16_gemm_tflops": 700.0, "read_gbps": 4000.0}
    many, few = even(96, 128, 1, 4096), even(128, 8, 1, 4096)
    assert many.flops == 2 * 96 * 4096 * 128 * (576 + 512)
    assert few.bytes == 128 * 4096 * 1152 + 128 * 8 * (576 + 512) * 2
    several = even(4, 16, 3, 1000, "fp8_ds_mla")
    assert several.bytes == 4 * 1000 * 656 + 4 * 3 * 16 * (576 + 512) * 2
    assert several.flops == 2 * 4 * 1000 * 3 * 16 * (576 + 512)
    assert many.floor_us(roofs) == pytest.approx(many.flops / 700e12 * 1e6)
    assert few.floor_us(roofs) == pytest.approx(few.bytes / 4000e9 * 1e6)


@pytest.mark.parametrize("cache", ["bf16", "fp8_ds_mla"])
def test_what_kernels_are_held_to_is_the_definition(cache):
    """New tokens see one key less each; a block's rest, which is NaN, is seen by none."""
    import torch
    from dense_cases import SCALE, Shape, golden, make_batch
    from mla_kernels import mla_decode

    batch = make_batch(Shape("x", 4, 3, (100, 3, 64), cache), "cpu")
    tensors = batch.q, batch.kv_cache, batch.block_table, batch.seq_lens
    if cache == "bf16":
        tensors = batch.q, batch.kv_cache.nan_to_num(0.0), *tensors[2:]
    want, _ = mla_decode(*tensors, scale=SCALE, impl="reference")
    error = torch.linalg.norm(golden(batch, [2, 0]) - want[[2, 0]].float())
    assert error < 0.01 * torch.linalg.norm(want[[2, 0]].float())
    error = torch.linalg.norm(golden(batch, [1]) - want[[1]].float())
    assert error < 0.01 * torch.linalg.norm(want[[1]].float())


def test_what_fails_is_not_timed_and_rates_are_of_what_is(monkeypatch):
    """On a CPU, with ours in the place of a kernel: one that is sound, one that is not, one that
    raises."""
    import re

    import dense_decode
    from dense_cases import even, golden, make_batch

    def broken(batch):
        raise RuntimeError("no kernel image")

    def sound(batch):
        return lambda: golden(batch, [0, 1]).bfloat16()

    def wrong(batch):
        return lambda: 1.1 * golden(batch, [0, 1]).bfloat16()

    timed = []

    class Timer:
        def medians(self, runs, repeats):
            timed.extend(runs)
            return dict.fromkeys(runs, 50.0)

    shape = even(2, 4, 1, 100)
    batch = make_batch(shape, "cpu")
    monkeypatch.setattr(dense_decode, "make_batch", lambda shape: batch)
    monkeypatch.setattr(dense_decode, "OURS", {})
    monkeypatch.setattr(
        dense_decode,
        "PEERS",
        {
            "sound": sound,
            "wrong": wrong,
            "broken": lambda b: lambda: broken(b),
            "not made": broken,
            "not of this case": lambda batch: None,
        },
    )
    rows = dense_decode.bench(shape, Timer(), re.compile(""), "cold", 1.0)
    rows = {row["impl"]: row for row in rows}
    assert timed == ["sound"]
    assert "failed" not in rows["sound"] and rows["sound"]["us"] == 50.0
    assert rows["sound"]["gbps"] == round(shape.bytes / 50e-6 / 1e9, 1)
    assert rows["sound"]["tflops"] == round(shape.flops / 50e-6 / 1e12, 1)
    assert "fro" in rows["wrong"]["failed"] and "us" not in rows["wrong"]
    for name in ("broken", "not made"):
        assert "no kernel image" in rows[name]["failed"] and "us" not in rows[name]
    assert "not of this case" not in rows


NOT_LOADED = "libcudart.so.12: cannot open shared object file"


@pytest.mark.parametrize(
    ("problem", "there", "says"),
    [
        (ImportError(NOT_LOADED), True, [f"ImportError: {NOT_LOADED}"]),
        (ModuleNotFoundError("No module named 'vllm'"), False, []),
    ],
)
@pytest.mark.parametrize("name", ["dense_decode", "sparse"])
def test_a_peer_is_left_out_only_where_vllm_is(name, problem, there, says, monkeypatch):
    import re

    import dense_cases
    import sparse_cases

    def gone(batch):
        raise problem

    module = importlib.import_module(name)
    monkeypatch.setattr(sparse_cases, "DEVICE", "cpu")
    if name == "sparse":
        batch = sparse_cases.make_batch(sparse_cases.Shape(1, 4, context=2048, cache="bf16"))
    else:
        batch = dense_cases.make_batch(dense_cases.even(1, 4, 1, 64), "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    monkeypatch.setattr(module, "implementations", lambda: {"peer/flashmla": gone})
    rows, runs = module.check(batch, re.compile(""))
    assert [row["failed"] for row in rows] == says and runs == {}


def test_a_peer_that_reads_past_the_end_is_timed_over_zeros(monkeypatch):
    """One of ours never is, nor what is wrong for another reason; the page names it."""
    import re

    import dense_decode
    import torch
    from dense_cases import Shape, golden, make_batch
    from dense_report import markdown

    caches = []

    def past_the_end(batch):
        def run():
            caches.append(batch.kv_cache)
            last = batch.kv_cache[batch.block_table[0, 1], -1, :512].float()
            return (golden(batch, [0, 1]) + 0 * last).bfloat16()

        return run

    def sound(batch):
        return lambda: golden(batch, [0, 1]).bfloat16()

    def never(batch):
        return lambda: torch.nan * golden(batch, [0, 1]).bfloat16()

    shape = Shape("x", 4, 1, (100, 64))
    batch = make_batch(shape, "cpu")
    given = batch.kv_cache.clone()
    peers = {"peer/fa3": past_the_end, "peer/flashmla": sound, "peer/never": never}
    monkeypatch.setattr(dense_decode, "PEERS", peers)
    monkeypatch.setattr(
        dense_decode, "implementations", lambda: {"mla_kernels/hopper/pow2": past_the_end} | peers
    )
    rows, runs = dense_decode.check(batch, re.compile(""))
    assert {row["impl"]: row.get("tails") for row in rows} == {
        "mla_kernels/hopper/pow2": None,
        "peer/fa3": "zeros",
        "peer/flashmla": None,
        "peer/never": "zeros",
    }
    assert [row["impl"] for row in rows if "failed" in row] == [
        "mla_kernels/hopper/pow2",
        "peer/never",
    ]
    caches.clear()
    runs["peer/fa3"]()
    assert caches[0].isfinite().all() and list(runs) == ["peer/fa3", "peer/flashmla"]
    assert torch.equal(batch.kv_cache.nan_to_num(7), given.nan_to_num(7))
    for row in rows:
        row |= {"floor_us": 1.0} | ({"us": 2.0} if row["impl"] in runs else {})
    page = markdown(report("cold") | {"rows": rows})
    over_zeros = page.partition("zeros there.")[2].partition("Not timed:")[0]
    assert over_zeros.split() == ["*", "x", "peer/fa3"]
    assert "zeros" not in markdown(report("cold"))


def test_a_picture_of_an_earlier_run_does_not_stay_beside_other_rows(tmp_path, monkeypatch):
    import sys

    from dense_report import write_report

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "dense_decode.png").write_bytes(b"an earlier run's")
    write_report(report("cold"), tmp_path, "_partial")
    assert (tmp_path / "dense_decode.png").exists()
    write_report(report("cold"), tmp_path)
    assert not (tmp_path / "dense_decode.png").exists()


def test_fp8_queries_have_a_table_of_their_own():
    from dense_report import markdown

    found = report("cold")
    assert "fp8 queries" not in markdown(found)
    shared = {"mode": "cold", "floor_us": 80.0}
    found["rows"] += [
        {"case": "a_fp8", "impl": impl, "us": us, "rel_err": error, **shared}
        for impl, us, error in (
            ("mla_kernels/hopper/fp8_query", 100.0, 0.031),
            ("peer/flashmla_fp8", 125.0, 0.04),
        )
    ]
    found["rows"] += [
        {"case": "b_fp8", "impl": "mla_kernels/hopper/fp8_query", "us": 9.0, **shared},
        {"case": "b_fp8", "impl": "peer/flashmla_fp8", "failed": "fro inf", **shared},
    ]
    text = markdown(found)
    assert "| a_fp8 | 100.0 | 125.0 | 1.25 | 0.031 | 0.04 |" in text
    assert "| b_fp8 | 9.0 | failed |  |  |  |" in text
    assert "Geometric mean 1.250, at least as fast in 1 of 1 cases." in text
    # The table of all cases compares what is computed alike.
    assert "against the better peer: geometric mean 1.100" in text


def test_dense_report_without_nvml(tmp_path):
    from dense_report import write_report

    write_report(report("sustained"), tmp_path)
    assert "no energy" in (tmp_path / "dense_sustained.md").read_text()


def test_dense_options(capsys):
    from dense_cases import SHAPES
    from dense_decode import parse

    def cases(args) -> int:
        return sum(bool(args.cases.search(shape.name)) for shape in SHAPES)

    assert (parse([]).mode, cases(parse([]))) == ("cold", len(SHAPES))
    assert (parse(["--paused"]).mode, cases(parse(["--paused"]))) == ("paused", PUBLISHED_CASES)
    sustained = parse(["--sustained"])
    assert (sustained.mode, cases(sustained)) == ("sustained", 4)
    assert sustained.impls.search("peer/fa3")
    assert not sustained.impls.search("mla_kernels/triton/amla")
    assert cases(parse(["--sustained", "--cases", "^b1_"])) == 5
    with pytest.raises(SystemExit):
        parse(["--paused", "--sustained"])
    assert "not allowed with" in capsys.readouterr().err


def test_energy_is_taken_between_steps_of_the_counter():
    from power import summarise

    # 700 W; the counter moves every 0.1 s, the samples come every 0.03 s.
    samples = [(0.03 * i, 70_000 * int(0.3 * i), 1400) for i in range(40)]
    found = summarise(samples)
    assert found["watts"] == pytest.approx(700, rel=0.03)
    assert found["sm_mhz"] == 1400
    assert summarise(samples[:3]) == {}


def test_sparse_ratios_are_those_of_what_auto_takes():
    from sparse_report import attention_table, by_case

    def rows(case, hopper, portable):
        found = {
            "mla_kernels/hopper": hopper,
            "mla_kernels/triton": portable,
            "peer/flashmla": 90.0,
        }
        return [
            {"case": case, "op": "decode", "impl": impl, "us": us, "floor_us": 1.0}
            for impl, us in found.items()
        ]

    few = rows("b128_h16_q1_32k_fp8_ds_mla", 60.0, 45.0)
    many = rows("b128_h128_q1_32k_fp8_ds_mla", 60.0, 45.0)
    again = rows("b128_h128_q1_32k_fp8_ds_mla_runs", 10.0, 45.0)  # no second time in the mean
    lines = attention_table(by_case(few + many + again, "decode"))
    assert "| Hopper | 90.0 | 9.00 |" in lines[4]
    assert "| 60.0 | 45.0 |  |  | portable | 90.0 | 2.00 |" in lines[2]
    assert "| 60.0 | 45.0 |  |  | Hopper | 90.0 | 1.50 |" in lines[3]
    assert lines[-1] == "Geometric mean 1.73; at least as fast in 2 of 2."


def test_the_faster_of_two_peers_counts():
    from sparse_report import attention_table, by_case

    def lines(fa3):
        times = {"mla_kernels/hopper": 60.0, "peer/flashmla_prefill": 90.0, "peer/fa3": fa3}
        rows = [
            {"case": "b128_h128_q1_32k_bf16", "op": "decode", "impl": impl, "us": us, "floor_us": 1}
            for impl, us in times.items()
        ]
        return attention_table(by_case(rows, "decode"))

    assert "| FlashMLA | FA3 | best peer / auto |" in lines(30.0)[0]
    assert "| Hopper | 90.0 | 30.0 | 0.50 |" in lines(30.0)[2]
    assert "| Hopper | 90.0 | 120.0 | 1.50 |" in lines(120.0)[2]


def test_empty_slots_stand_beside_the_full_case():
    from sparse_report import markdown

    base = "b128_h16_q1_32k_fp8_ds_mla"
    times = {"": 100.0, "_half_tail": 52.0, "_half_scattered": 97.0, "_half_alone": 51.0}
    rows = [
        {
            "case": base + end,
            "op": "decode",
            "impl": "mla_kernels/triton",
            "us": us,
            "floor_us": 1.0,
        }
        for end, us in times.items()
    ]
    rows += [{**rows[0], "impl": "peer/flashmla", "us": 160.0}]
    rows += [{**rows[1], "impl": "peer/flashmla", "us": 160.0}]
    text = markdown({"machine": {}, "command": "x", "rows": rows}, None)
    assert f"| {base} | portable | 100.0 | 52.0 (0.52) | 97.0 (0.97) | 51.0 (0.51) |  |  |" in text
    assert f"| {base} | flashmla | 160.0 | 160.0 (1.00) |" in text
    # The table of all cases and its mean are of the full ones.
    assert "Geometric mean 1.60; at least as fast in 1 of 1." in text
    assert f"| {base}_half_tail" not in text
    assert "empty slots" not in markdown({"machine": {}, "command": "x", "rows": rows[:1]}, None)


PADDINGS = ("half_tail", "half_scattered", "half_alone", "lengths128", "128_alone")


@pytest.mark.parametrize("padding", PADDINGS)
def test_cases_with_empty_slots_are_what_they_are_named(padding, monkeypatch):
    """And the gate sees a kernel that reads a slot too many or too few."""
    import re

    import sparse
    import sparse_cases
    import torch

    monkeypatch.setattr(sparse_cases, "DEVICE", "cpu")
    shape = sparse_cases.Shape(2, 4, context=2048, cache="bf16", padding=padding)
    full = sparse_cases.Shape(2, 4, context=2048, cache="bf16")
    assert shape.name == f"{full.name}_{padding}"
    named = 128 if "128" in padding else 1024
    assert shape.flops * 2048 == full.flops * named
    batch = sparse_cases.make_batch(shape)
    width = named if padding.endswith("alone") else 2048
    assert batch.slots.shape == (2, width)
    used = batch.slots >= 0
    if batch.lengths is None:
        assert used.sum(1).tolist() == [named] * 2
        assert bool(used[:, named:].any()) == (padding == "half_scattered")
    else:
        assert batch.lengths.tolist() == [named] * 2 and bool(used.all())
    assert all(len(row[row >= 0].unique()) == (row >= 0).sum() for row in batch.slots)

    def off(batch):
        """One that takes the slots without the padding, or the last one of them for none."""
        slots = torch.where(used, batch.slots, 0)
        if padding.endswith("alone"):
            slots[:, -64:] = -1
        return sparse.ours(sparse.Batch(shape, batch.q, batch.kv_cache, slots), "torch")

    monkeypatch.setattr(
        sparse,
        "implementations",
        lambda: {"ours": lambda batch: sparse.ours(batch, "torch"), "off": off},
    )
    rows, runs = sparse.check(batch, re.compile(""))
    assert list(runs) == ["ours"]
    assert "fro" in next(row for row in rows if row["impl"] == "off")["failed"]


def test_the_floor_has_a_row_once_that_several_tokens_of_a_request_read(monkeypatch):
    import sparse_cases

    monkeypatch.setattr(sparse_cases, "DEVICE", "cpu")
    for shape in (
        sparse_cases.Shape(2, 4, 1, 4096, "bf16"),
        sparse_cases.Shape(2, 4, 2, 4096, "bf16"),
        sparse_cases.Shape(2, 4, 2, 4096, "bf16", order="runs"),
        sparse_cases.Shape(1, 4, 64, 4096, "bf16", prefill=True),
    ):
        batch = sparse_cases.make_batch(shape)
        rows, width = len(batch.slots.unique()), batch.kv_cache.shape[2]
        others = 4 * batch.slots.numel() + 2 * shape.tokens * shape.heads * (width + 512)
        assert shape.bytes == pytest.approx(2 * rows * width + others, rel=0.03)


def test_every_kind_of_empty_slots_is_measured_beside_its_full_case():
    from sparse_cases import SHAPES

    names = {shape.name for shape in SHAPES}
    for base in (
        "b128_h128_q1_32k_fp8_ds_mla",
        "b128_h16_q1_32k_fp8_ds_mla",
        "b128_h128_q1_32k_bf16",
    ):
        assert {base, *(f"{base}_{padding}" for padding in PADDINGS)} <= names


def flash_attention(q, k, v, q_v, block_table, seqused_k, softmax_scale, **known):
    """FlashAttention-3's absorbed form for one row of each sequence, in pages of one token."""
    import torch

    assert known.pop("max_seqlen_k") == block_table.shape[1] and known.pop("max_seqlen_q") == 1
    assert known.pop("cu_seqlens_q").tolist() == list(range(len(q) + 1))
    assert known == {"causal": True, "fa_version": 3} and q.is_contiguous() and q_v.is_contiguous()
    out = torch.empty_like(q_v)
    for t, count in enumerate(seqused_k.tolist()):
        pages = block_table[t, :count].long()
        rope, latent = k[pages, 0, 0].float(), v[pages, 0, 0].float()
        scores = q[t].float() @ rope.T + q_v[t].float() @ latent.T
        out[t] = (scores * softmax_scale).softmax(-1) @ latent
    return out


def test_peers_are_called_as_vllm_calls_them(monkeypatch):
    """FlashMLA's interface is that of `mla_kernels.flash_mla`, which stands in for it here."""
    import sys
    import types

    import sparse_cases
    import sparse_peers
    import torch
    from mla_kernels import flash_mla
    from mla_kernels.testing.metrics import SHORT_BAR, measure

    monkeypatch.setattr(sparse_cases, "DEVICE", "cpu")
    name = "vllm.third_party.flashmla.flash_mla_interface"
    monkeypatch.setitem(sys.modules, name, flash_mla)
    fa3 = types.SimpleNamespace(flash_attn_varlen_func=flash_attention)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", fa3)
    for cache in ("fp8_ds_mla", "bf16"):
        for padding in PADDINGS:
            shape = sparse_cases.Shape(2, 4, context=2048, cache=cache, padding=padding)
            batch = sparse_cases.make_batch(shape)
            runs = [run for make in sparse_peers.PEERS.values() if (run := make(batch))]
            takes_holes = cache == "fp8_ds_mla" or padding == "half_scattered"
            assert len(runs) == (1 if takes_holes else 2)
            for run in runs:
                out = run()
                assert out.shape == (2, 4, 512)
                assert not SHORT_BAR.failures(measure(out, sparse_cases.golden(batch, [0, 1])))
                assert torch.isfinite(out).all()
