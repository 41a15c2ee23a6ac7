# SPDX-License-Identifier: Apache-2.0
"""The benchmarks without a GPU: what is wrong is not timed."""

import sys
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def timed(monkeypatch):
    """What would have been timed, by name."""
    import decode_cpu
    import sparse_cpu

    names = []

    def least_ms(calls, repetitions):
        names.extend(calls)
        return dict.fromkeys(calls, 1.0)

    for module in (decode_cpu, sparse_cpu):
        monkeypatch.setattr(module, "least_ms", least_ms)
    torch.manual_seed(0)
    return names


@pytest.fixture
def stock(monkeypatch):
    """The reference in the place of vLLM's operator, which a machine may lack; `stock["lost"]` of
    the tokens it does not see."""
    import decode_cpu

    lost = {"lost": 0}

    def operator(q, cache, table, seq_lens):
        from mla_kernels import mla_decode

        options = {"scale": decode_cpu.SCALE, "kv_lora_rank": decode_cpu.DV, "impl": "reference"}
        return mla_decode(q.unsqueeze(1), cache, table, seq_lens - lost["lost"], **options)[0][:, 0]

    monkeypatch.setattr(decode_cpu, "stock_operator", lambda dtype: "cpu")
    monkeypatch.setattr(decode_cpu, "stock_cpu", operator)
    return lost


def short_sighted(call, q, cache, table, seq_lens, **options):
    """`call` without the last token of every request, the reference excepted."""
    lost = int(options.get("impl") != "reference")
    return call(q, cache, table, seq_lens - lost, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [300, 4096])
def test_decode_that_drops_a_token_is_not_timed(timed, stock, monkeypatch, dtype, tokens):
    import decode_cpu

    case = (1, tokens, False, 16, dtype, 1)
    assert decode_cpu.measure(*case) == {"ours": 1.0, "stock": 1.0}
    timed.clear()
    stock["lost"] = 1
    with pytest.raises(RuntimeError, match=f"stock, 1 x {tokens} differs from the reference"):
        decode_cpu.measure(*case)
    stock["lost"] = 0
    broken = partial(short_sighted, decode_cpu.mla_decode)
    monkeypatch.setattr(decode_cpu, "mla_decode", broken)
    with pytest.raises(RuntimeError, match=f"ours, 1 x {tokens} differs from the reference"):
        decode_cpu.measure(*case)
    assert timed == []


def test_decode_is_measured_with_the_lengths_that_its_rows_name(monkeypatch):
    import decode_cpu

    def paged(lens, block, dtype):
        raise StopIteration(lens)

    monkeypatch.setattr(decode_cpu, "paged", paged)
    for batch, longest, mixed in decode_cpu.SHAPES:
        with pytest.raises(StopIteration) as seen:
            decode_cpu.measure(batch, longest, mixed, 16, torch.float32, 1)
        (lens,) = seen.value.args
        assert len(lens) == batch and max(lens) == longest
        assert min(lens) == (longest // 16 if mixed else longest)  # as `lengths` says


def test_rounding_alone_is_no_fault(timed, stock):
    """With one head the largest of few numbers counts, and a reference in bf16 would be off too."""
    import decode_cpu

    for seed in range(20):
        torch.manual_seed(seed)
        decode_cpu.measure(1, 64, False, 1, torch.bfloat16, 1)
    assert len(timed) == 40


def fewer_slots(call, q, cache, slots, **options):
    """`call` without the first slot of every token, the reference excepted."""
    if options.get("impl") != "reference":
        slots = slots.clone()
        slots[:, 0] = -1
    return call(q, cache, slots, **options)


def other_choice(call, *batch, **options):
    """`call`, but the first of the chosen tokens is another one."""
    chosen = call(*batch, **options)
    chosen[:, 0] = batch[4].max() - 1
    return chosen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("mla_sparse_attention", fewer_slots, "flash differs from the reference"),
        ("mla_decode", short_sighted, "dense differs from the reference"),
        ("indexer_topk", other_choice, "the indexer's choice differs"),
    ],
)
def test_sparse_attention_that_is_wrong_is_not_timed(timed, monkeypatch, dtype, name, broken, says):
    import sparse_cpu

    how = {"heads": 4, "dtype": dtype, "repetitions": 1}
    sparse_cpu.measure_case((2, 400, 1, 128), **how)
    assert timed == ["flash", "pow2", "dense", "indexer"]
    timed.clear()
    monkeypatch.setattr(sparse_cpu, name, partial(broken, getattr(sparse_cpu, name)))
    with pytest.raises(RuntimeError, match=says):
        sparse_cpu.measure_case((2, 400, 1, 128), **how)
    assert timed == []


def test_accuracy_is_that_of_the_definition(monkeypatch):
    """On small inputs: bf16 outputs lie within bf16's rounding of fp64, and losing keys shows."""
    import accuracy

    monkeypatch.setattr(accuracy, "KEYS", 1024)
    monkeypatch.setattr(accuracy, "HEADS", 8)
    q, k = accuracy.make_inputs("normal", 1, seed=0)
    scores = torch.einsum("hd,nd->hn", q.double(), k.double()) * accuracy.SCALE
    want = torch.einsum("hn,nd->hd", scores.softmax(-1), k[:, : accuracy.VALUE_DIM].double())
    torch.testing.assert_close(accuracy.golden(q, k), want)
    errors = {
        m: accuracy.relative_error(accuracy.attend(q, k, m, 256), want) for m in accuracy.METHODS
    }
    printed = errors.pop("AMLA as printed")
    assert all(1e-3 < error < 2.5e-3 for error in errors.values())
    assert (
        printed > 1.3 * errors["AMLA corrected"]
    )  # the paper's line 11 adds what it should remove
    assert accuracy.relative_error(want + 0.01 * want, want) == pytest.approx(0.01)
    fewer = accuracy.golden(q, k[:-1])
    assert accuracy.relative_error(fewer, want) > 0.01


def test_accuracy_names_its_commit_and_does_without_a_plot(monkeypatch, tmp_path):
    import accuracy

    methods = dict.fromkeys(accuracy.METHODS, 1.0)
    row = {"distribution": "N(0,4)", "paper": {"Base": 1.0, "AMLA": 1.0}, "mean": methods}
    monkeypatch.setattr(accuracy, "measure", lambda name, seeds, kv_block: row)
    monkeypatch.setattr(accuracy, "commit", lambda: "1234567")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert accuracy.main(["--results", str(tmp_path)]) == 0
    assert ", commit 1234567." in (tmp_path / "accuracy.md").read_text()


class Servers:
    """In the place of servers.Server; `said` are the greedy tokens by backend and dtype, `loads`
    what was timed."""

    def __init__(self, monkeypatch, said):
        import serve_cpu

        self.said, self.loads = said, []
        monkeypatch.setattr(serve_cpu, "Server", self.start)
        monkeypatch.setattr(serve_cpu, "demo_model_path", lambda family: Path("model"))
        monkeypatch.setattr(serve_cpu, "describe_machine", lambda: dict.fromkeys(self.MACHINE, "m"))
        monkeypatch.setattr(serve_cpu, "greedy_tokens", lambda url, *_: said.get(url, [1, 2, 3, 4]))
        monkeypatch.setattr(serve_cpu, "run_load", self.load)
        monkeypatch.setattr(serve_cpu, "exit_on_signals", lambda: None)

    MACHINE = ("cpu", "cores", "vllm", "torch", "commit")

    def start(self, backend, model, options, log):
        server = MagicMock(
            backend=backend, url=f"{backend} {options[options.index('--dtype') + 1]}"
        )
        server.__enter__.return_value = server
        server.attention.return_value = backend.upper()
        return server

    def load(self, url, model, **load):
        from load import METRICS, STATISTICS

        self.loads.append(url)
        fast = url.startswith("ours")
        times = {f"{m}_{s}": 5.0 if fast else 10.0 for m in METRICS for s in STATISTICS}
        if load["output_len"] == 1:
            times["itl_p50"] = 0.0
        return {"output_tok_s": 30.0 if fast else 20.0, "failed": 0, **times}


WORDS = ["--concurrency", "2", "--repetitions", "2"]


@pytest.mark.parametrize("dtypes", [["bfloat16"], ["bfloat16", "float32"], ["float32"]])
def test_no_speed_of_servers_that_part_in_fp32(monkeypatch, tmp_path, capsys, dtypes):
    import serve_cpu

    servers = Servers(monkeypatch, {"ours float32": [1, 2, 3, 5]})
    (tmp_path / "serving.md").write_text("an earlier run's")
    assert serve_cpu.main([*WORDS, "--dtype", *dtypes, "--results", str(tmp_path)]) == 1
    assert servers.loads == []
    assert files_in(tmp_path) == ["serving.md", "serving_partial.json", "serving_partial.md"]
    assert (tmp_path / "serving.md").read_text() == "an earlier run's"
    page = (tmp_path / "serving_partial.md").read_text()
    assert "* float32: 75.0% same greedy tokens" in page and "32 |" not in page
    for said in (page, capsys.readouterr().err):
        assert "The backends disagree in fp32: no speed is reported." in said


def test_a_speed_of_bf16_stands_on_the_gate_of_fp32(monkeypatch, tmp_path):
    import serve_cpu

    servers = Servers(monkeypatch, {"ours bfloat16": [1, 2, 3, 5]})
    assert serve_cpu.main([*WORDS, "--dtype", "bfloat16", "--results", str(tmp_path)]) == 0
    assert servers.loads == ["ours bfloat16", "stock bfloat16"] * 3  # the first warms up
    page = (tmp_path / "serving_partial.md").read_text()
    assert "* float32: 100.0% same greedy tokens (ours = OURS, stock = STOCK)" in page
    assert "* bfloat16: 75.0% same greedy tokens" in page
    assert "| bfloat16 | 2 | 1.50 | 2.00 |" in page
    # 4 requests of 128 tokens
    times = "5.0 | 5.0 | - | - | 5.0 | 5.0 | - | - | 5.0 | 5.0 | 5.0 | 5.0"
    assert f"| bfloat16 | 2 | ours | 30 (30-30) | {times} |" in page
    assert "| float32 |" not in page


def test_speeds_stay_if_the_servers_of_the_next_dtype_die(monkeypatch, tmp_path):
    import serve_cpu

    servers, start = Servers(monkeypatch, {}), serve_cpu.Server

    def dying(*args):
        server = start(*args)
        if "bfloat16" in server.url:
            server.wait_ready.side_effect = RuntimeError("stock did not start")
        return server

    monkeypatch.setattr(serve_cpu, "Server", dying)
    with pytest.raises(RuntimeError, match="did not start"):
        serve_cpu.main([*WORDS, "--results", str(tmp_path)])
    assert set(servers.loads) == {"ours float32", "stock float32"}
    page = (tmp_path / "serving_partial.md").read_text()
    assert "| float32 | 2 | 1.50 | 2.00 |" in page and "bfloat16 |" not in page
    assert "Not whole: the run was cut off." in page


def test_speeds_of_some_clients_stay_if_the_run_is_cut_off_behind_them(monkeypatch, tmp_path):
    import serve_cpu

    servers = Servers(monkeypatch, {})

    def cut(*args, **load):
        if len(servers.loads) == 6 + 3:  # of 4 clients the second repetition has begun
            raise SystemExit(143)
        return servers.load(*args, **load)

    monkeypatch.setattr(serve_cpu, "run_load", cut)
    words = ["--concurrency", "2", "4", "--repetitions", "2", "--results", str(tmp_path)]
    with pytest.raises(SystemExit):
        serve_cpu.main(words)
    page = (tmp_path / "serving_partial.md").read_text()
    assert "| float32 | 2 | 1.50 | 2.00 |" in page and "| float32 | 4 |" not in page
    assert "Not whole: the run was cut off." in page


@pytest.mark.parametrize(
    ("failing", "lost"),
    [
        ({0}, "the warm-up"),
        ({2}, "repetition 0"),
        ({3, 5}, "repetition 1"),
    ],
    ids=["a warm-up", "one of ours", "all of stock"],
)
def test_a_load_of_which_a_request_failed_is_not_measured(failing, lost, monkeypatch, tmp_path):
    """It is neither in the medians nor the end of the run."""
    import serve_cpu

    servers = Servers(monkeypatch, {})

    def failing_at(*args, **load):
        row = servers.load(*args, **load)
        broken = len(servers.loads) - 1 in failing
        lost = {"failed": 3, "reason": "Bad Request", "output_tok_s": 1.0}
        return row | lost if broken else row

    monkeypatch.setattr(serve_cpu, "run_load", failing_at)
    assert serve_cpu.main([*WORDS, "--dtype", "float32", "--results", str(tmp_path)]) == 1
    assert len(servers.loads) == 6
    page = (tmp_path / "serving_partial.md").read_text()
    backend = "stock" if len(failing) == 2 else "ours"
    said = f"* float32, 2 clients, {backend}, {lost}: 3 requests failed: Bad Request"
    assert said in page.partition("Not measured:")[2] and page.count("requests failed") == len(
        failing
    )
    assert ("| float32 | 2 | 1.50 | 2.00 |" in page) == (backend == "ours")
    assert "| float32 | 2 | ours | 30 (30-30) |" in page and "Not whole" not in page


def test_loads_of_one_server_alone_do_not_replace_those_of_both(monkeypatch, tmp_path):
    import serve_cpu

    servers = Servers(monkeypatch, {})

    def load(url, *args, **options):
        row = servers.load(url, *args, **options)
        return row | {"failed": 2 * ("stock" in url), "reason": ""}

    monkeypatch.setattr(serve_cpu, "run_load", load)
    (tmp_path / "serving.md").write_text("an earlier run")
    assert serve_cpu.main(["--repetitions", "1", "--results", str(tmp_path)]) == 1
    assert (tmp_path / "serving.md").read_text() == "an earlier run"
    assert "| float32 | 8 | ours |" in (tmp_path / "serving_partial.md").read_text()


def test_answers_of_one_token_have_no_time_between_tokens(monkeypatch, tmp_path):
    import serve_cpu

    Servers(monkeypatch, {})
    words = [*WORDS, "--dtype", "float32", "--output-len", "1", "--results", str(tmp_path)]
    assert serve_cpu.main(words) == 0
    assert "| float32 | 2 | 1.50 |  |" in (tmp_path / "serving_partial.md").read_text()


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ("--dtype bfloat16 float32 float16 --concurrency 32 8 --repetitions 1", False),
        ("--dtype float32", True),
        ("--concurrency 8", True),
        ("--family v2-lite", True),
        ("--input-len 64", True),
        ("--quick", True),
    ],
)
def test_other_loads_do_not_replace_the_results_of_all(words, some, monkeypatch, tmp_path):
    import serve_cpu

    Servers(monkeypatch, {})
    assert serve_cpu.main([*words.split(), "--results", str(tmp_path)]) == 0
    assert files_in(tmp_path) == [f"serving{'_partial' * some}{end}" for end in (".json", ".md")]
    assert "Not whole" not in (tmp_path / f"serving{'_partial' * some}.md").read_text()


def test_what_a_server_would_cut_short_is_refused(capsys):
    import serve_cpu

    serve_cpu.parse_arguments(["--input-len", "3000", "--output-len", "1032"])
    with pytest.raises(SystemExit):
        serve_cpu.parse_arguments(["--input-len", "3000", "--output-len", "1033"])
    assert "of 4032 or less in all, got 3000 and 1033" in capsys.readouterr().err


def test_a_server_that_does_not_start_ends_the_run_with_its_reason(monkeypatch, tmp_path):
    import serve_cpu
    from servers import StartError

    servers = Servers(monkeypatch, {})

    def start(*args):
        server = servers.start(*args)
        server.wait_ready.side_effect = StartError("ours did not start: OutOfMemoryError: 2 GiB")
        return server

    monkeypatch.setattr(serve_cpu, "Server", start)
    with pytest.raises(SystemExit, match=r"^ours did not start: OutOfMemoryError: 2 GiB$"):
        serve_cpu.main(["--results", str(tmp_path)])


ROWS = {
    "decode_cpu": {"ours": 1.0, "stock": 1.0},
    "sparse_cpu": {"flash": 1.0, "pow2": 1.0, "indexer": 1.0},
    "accuracy": {"distribution": "N(0,4)"},
}


@pytest.fixture
def measured(monkeypatch):
    """`measured(name)`: the benchmark with two cases a dtype and thread, or two in all, and a
    stand-in for measuring one."""
    import importlib

    def prepare(name):
        module, row = importlib.import_module(name), ROWS[name]
        if name == "accuracy":
            methods = dict.fromkeys(module.METHODS, 1.0)
            row = row | {"paper": {"Base": 1.0, "AMLA": 1.0}, "mean": methods}
        part, cases = {
            "decode_cpu": ("measure", "SHAPES"),
            "sparse_cpu": ("measure_case", "CASES"),
            "accuracy": ("measure", "DISTRIBUTIONS"),
        }[name]
        measure = MagicMock(side_effect=lambda *_: dict(row))
        monkeypatch.setattr(module, part, measure)
        monkeypatch.setattr(module, cases, list(getattr(module, cases))[:2])
        if name == "accuracy":
            monkeypatch.setattr(module, "plot", lambda *_: None)
        else:
            machine = dict.fromkeys(("cpu", "vllm", "torch", "commit"), "m")
            monkeypatch.setattr(module, "describe_machine", lambda: machine)
            monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
        return module, measure

    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "current_platform", MagicMock())
    return prepare


@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("decode_cpu", "--threads 1"),
        ("decode_cpu", "--heads 128"),
        ("sparse_cpu", "--threads 2"),
        ("sparse_cpu", "--heads 8"),
        ("accuracy", "--seeds 1"),
        ("accuracy", "--kv-block 64"),
    ],
)
def test_results_of_some_and_of_a_run_that_is_cut_off_are_partial(name, some, measured, tmp_path):
    module, measure = measured(name)
    stem = name.removesuffix("_cpu")
    whole, part = ([f"{stem}{end}.json", f"{stem}{end}.md"] for end in ("", "_partial"))
    assert module.main([*some.split(), "--results", str(tmp_path)]) == 0
    assert files_in(tmp_path) == part
    assert "Not whole" not in (tmp_path / part[1]).read_text()
    assert module.main(["--results", str(tmp_path)]) == 0
    assert files_in(tmp_path) == whole
    before, found = (tmp_path / whole[0]).read_text(), measure.side_effect
    calls = iter([found, None])
    measure.side_effect = lambda *args: next(calls)(*args)  # the second call breaks
    with pytest.raises(TypeError):
        module.main(["--results", str(tmp_path)])
    assert files_in(tmp_path) == sorted(whole + part)
    assert (tmp_path / whole[0]).read_text() == before
    assert "Not whole: 1 of " in (tmp_path / part[1]).read_text()


@pytest.mark.parametrize(
    ("name", "problem", "says"),
    [
        (
            "decode_cpu",
            RuntimeError("stock differs from\n the reference"),
            "threads 1, dtype bfloat16, batch 1, lengths 256: "
            "RuntimeError: stock differs from the reference",
        ),
        (
            "sparse_cpu",
            AssertionError("Tensor-likes are not close!"),
            "threads 1, dtype bfloat16, requests 8, tokens 300, new 1, topk 2048: "
            "AssertionError: Tensor-likes are not close!",
        ),
    ],
)
def test_a_case_that_fails_is_listed_and_the_others_are_timed(
    name, problem, says, measured, tmp_path
):
    module, measure = measured(name)
    found, calls = measure.side_effect, []

    def second_fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise problem
        return found(*args)

    measure.side_effect = second_fails
    assert module.main(["--results", str(tmp_path)]) == 1
    stem = name.removesuffix("_cpu")
    assert files_in(tmp_path) == [f"{stem}.json", f"{stem}.md"] and len(calls) == 8
    page = (tmp_path / f"{stem}.md").read_text()
    assert page.endswith(f"\nNot timed:\n\n* {says}\n")
    assert sum(line.startswith(("| 1 |", "| 2 |")) for line in page.splitlines()) == 7


def test_quick_gives_way_to_what_is_asked_for():
    from serve_cpu import parse_arguments

    def found(*words):
        args = parse_arguments(words)
        return args.eager, args.repetitions, args.output_len

    assert found() == (False, 5, 128)
    assert found("--quick") == (True, 2, 32)
    assert found("--quick", "--repetitions", "7") == (True, 7, 32)
    assert found("--quick", "--output-len", "128") == (True, 2, 128)
