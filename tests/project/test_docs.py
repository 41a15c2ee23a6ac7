# SPDX-License-Identifier: Apache-2.0
"""What the pages name exists: links, commands, files, settings; and figures are those measured."""

import json
import re
import statistics
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mla_kernels import indexer_scores
from mla_kernels.layouts import MlaDims
from mla_kernels.sparse.choice import is_few
from mla_kernels.sparse.hopper.support import choose_turns

ROOT = Path(__file__).parents[2]
LISTED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
FILES = LISTED.stdout.split()
PAGES = [
    name
    for name in FILES
    if name.endswith(".md") and ("results/" not in name or name.endswith("/README.md"))
]
FOLDERS = ("", "kernels/", "kernels/mla_kernels/", "serving/", "benchmarks/")


def anchors(text):
    """GitHub's names of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    here = ROOT / page
    for link in re.findall(r"\]\((?!http)([^)]+)\)", here.read_text()):
        path, _, anchor = link.partition("#")
        target = here.parent / path if path else here
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: no heading #{anchor} in {path}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_files_exist(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    commands = {"serve", "doctor", "demo-model", "plan", "version"}
    assert set(re.findall(r"(?:^    |`|\()mla-backend ([a-z-]+)", text, re.MULTILINE)) <= commands
    for script in re.findall(r"python ([\w/]+\.py)", text):
        assert script == "x.py" or (ROOT / script).exists(), f"{page}: {script}"
    for module in re.findall(r"python -m (m\w+(?:\.\w+)*)", text):
        path = module.replace(".", "/")
        found = [ROOT / f / f"{path}{end}" for f in FOLDERS for end in (".py", "/__main__.py")]
        assert any(p.exists() for p in found), f"{page}: {module}"
    for name in re.findall(r"`([\w./-]+\.(?:py|md|json|yaml))`", text):
        assert any(f"/{file}".endswith(f"/{name}") for file in FILES), f"{page}: {name}"


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page):
    from mla_backend.envs import ENV_VARS

    named = re.findall(r"\bMLA_BACKEND_[A-Z_]+\b", (ROOT / page).read_text())
    assert set(named) <= set(ENV_VARS)


def test_the_kernel_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    dense, sparse, names = *(block for block in blocks if "mla_kernels" in block), {}
    exec(dense, names)
    assert names["out"].shape == (4, 1, 16, 512) and bool(names["out"].isfinite().all())
    assert names["lse"][2].isinf().all()  # the request of length 0
    whole = names["out"][:, 0]
    exec(sparse, names)
    assert names["chosen"].shape == (4, 2048)  # more than any request has: all tokens are read
    assert (names["out"].float() - whole.float()).norm() < 0.01 * whole.float().norm()


def test_the_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert [page for page in PAGES if page.startswith("docs/") and f"({page}" not in text] == []


def test_the_readme_names_every_public_function():
    import mla_kernels

    text = (ROOT / "README.md").read_text()
    assert [name for name in mla_kernels.__all__ if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "mla-backend plan --model configs" in (ROOT / page).read_text()],
)
def test_plans_can_be_made(page, monkeypatch, capsys):
    from mla_serving import cli

    monkeypatch.chdir(ROOT)
    for line in re.findall(r"mla-backend (plan --model configs[^`\n]*)", (ROOT / page).read_text()):
        assert cli.main(line.split()) == 0, line
        assert "tokens" in capsys.readouterr().out


def test_figures_of_the_readme_are_those_measured():
    rows = re.findall(
        r"\]\((benchmarks/results/\S+\.md)\)[^|]*\| ([\d.]+) \| (\d+ of \d+ cases) \|",
        (ROOT / "README.md").read_text(),
    )
    assert len(rows) == 9
    for path, mean, share in rows:
        measured = (ROOT / path).read_text().lower().replace(";", ",")
        said = f"geometric mean {mean}, at least as fast in {share.removesuffix(' cases')}"
        assert said in measured, f"README's row of {path} is not what was measured last"


def test_engines_and_servers_are_as_measured():
    text = (ROOT / "docs/engines.md").read_text()
    page, share = r"\]\(\.\./(benchmarks/results/\S+\.md)\)[^|]*", r"(\d+ of \d+)"
    figures = rf"{page}\| ([\d.]+) \| {share} \| ([\d.]+), {share} \|\n"
    steps = re.findall(rf"^\| (?:\[?(\d+ heads)|the same).*?{figures}", text, re.MULTILINE)
    assert len(steps) == 11
    heads = ""
    for named, path, mean, faster, gpu_mean, gpu_faster in steps:
        heads = named or heads  # "the same" as in the row above
        said = (
            f"Whole steps, best peer / ours: geometric mean {mean}, at least as fast in {faster} "
            f"cases.\n\nGPU, best peer / ours: geometric mean {gpu_mean}, at least as fast in "
            f"{gpu_faster} cases."
        )
        _, _, section = (ROOT / path).read_text().partition(f"\n## {heads},")
        assert said in section.partition("\n## ")[0], f"row of {heads} in {path}"
    loads = re.findall(rf"{page}\| ([\d.]+) \| (\d+) of (\d+) \|\n", text)
    assert len(loads) == 22
    for path, mean, theirs, of in loads:
        ours = int(of) - int(theirs)
        said = f"geometric mean {mean}, at least as many in {ours} of {of} loads"
        assert said in (ROOT / path).read_text(), f"row of {path}"


def step_summaries(page):
    """{(heads, what is compared): (geometric mean, cases at least as fast, cases)} of a page."""
    found = {}
    for section in (ROOT / f"benchmarks/results/h200/{page}.md").read_text().split("\n## ")[1:]:
        lines = re.findall(
            r"^(.+), best peer / ours(.*): geometric mean ([\d.]+), .* in (\d+) of (\d+) cases",
            section,
            re.MULTILINE,
        )
        heads = int(section.split(" heads")[0])
        for what, queries, mean, faster, of in lines:
            found[heads, what + queries] = (mean, int(faster), int(of))
    return found


def test_what_engines_say_of_single_pages_of_steps_is_as_measured():
    text = " ".join((ROOT / "docs/engines.md").read_text().split())

    def said(page):
        """Of the bullet that links the page, which is all there is of it."""
        (bullet,) = [part for part in text.split(" * ") if f"h200/{page}.md" in part]
        return bullet

    for page in ("sparse_steps", "sparse_steps_fp8_ds_mla"):
        of = step_summaries(page)
        whole, gpu, attention = (
            sum(of[heads, what][1] for heads in (16, 128))
            for what in ("Whole steps", "GPU", "Attention")
        )
        cases = sum(of[heads, "GPU"][2] for heads in (16, 128))
        assert f"faster than FLASHMLA_SPARSE's in {attention} of {cases} cases" in said(page)
        assert f"whole steps are in {whole}" in said(page)
        assert "GPU time" not in said(page) or f"by GPU time in {gpu}" in said(page)

    of = step_summaries("sparse_steps_more_peers")
    (whole, *fast), (attention, *rest) = of[128, "Whole steps"], of[128, "Attention"]
    assert fast == rest == [4, 4] and "at least as fast in 4 of 4" in text
    assert f"(geometric means {whole} and {attention})" in said("sparse_steps_more_peers")

    of, bullet = step_summaries("sparse_steps_more_cases"), said("sparse_steps_more_cases")
    mean, faster, cases = of[128, "Attention"]
    assert f"attention is at least as fast in {faster} of {cases} cases ({mean})" in bullet
    mean, faster, cases = of[128, "Whole steps"]
    assert f"steps are in {faster} ({mean}), by GPU time in {of[128, 'GPU'][1]}" in bullet
    mean, faster, cases = of[16, "Whole steps"]
    assert f"16 heads whole steps of {cases} cases, in {faster} ({mean})" in bullet

    of, bullet = step_summaries("engine_steps_fp8"), said("engine_steps_fp8")
    queries = " with fp8 queries"
    assert of[128, "Attention"][1:] == (0, 18) and "slower than FLASHMLA's" in bullet
    assert of[128, "Attention" + queries][1:] == (18, 18) and "faster in all 18" in bullet
    wide, few = ([of[n, "Whole steps" + q][0] for q in ("", queries)] for n in (128, 16))
    assert f"take {wide[0]} of the best peer's speed, with fp8 queries {wide[1]}" in bullet
    assert f"with 16 heads {few[0]} and {few[1]}" in bullet
    gpu = sorted(of[n, "GPU" + q][0] for n in (128, 16) for q in ("", queries))
    assert float(gpu[0]) > 1 and f"above 1 ({gpu[0]} to {gpu[-1]})" in bullet


def test_every_page_of_engines_and_servers_is_named():
    text = (ROOT / "docs/engines.md").read_text()
    pages = [f for f in FILES if re.search(r"results/h\d+/.*(serving|steps)[^/]*\.md$", f)]
    assert len(pages) > 30
    assert [page for page in pages if f"](../{page})" not in text] == []


def test_engines_and_servers_of_the_readme_are_some_of_all():
    readme, engines = ((ROOT / page).read_text() for page in ("README.md", "docs/engines.md"))
    figures = r"^\|.*\| [\d.]+ \| \d+ of \d+ (?:\| [\d.]+, \d+ of \d+ )?\|$"
    rows = re.findall(figures, readme, re.MULTILINE)
    assert len(rows) == 7
    assert set(rows) < {line.replace("](../", "](") for line in engines.splitlines()}


@pytest.mark.parametrize(
    "version, old, new, cases, queries",
    [
        ("3.7.1", "h200/triton_3.7.1/with_3.6.json", "h200/triton_3.7.1", 36, 8),
        ("3.8", "h100/dense_decode.json", "h100/triton_3.8", 41, 9),
        ("3.9", "h200/triton_3.9/with_3.6.json", "h200/triton_3.9", 41, 9),
    ],
)
def test_what_a_newer_triton_costs_is_what_was_measured(version, old, new, cases, queries):
    """docs/support.md quotes ratios of two runs, of one commit but for 3.8; the README a range."""
    results = ROOT / "benchmarks/results"
    runs = [json.loads((results / path).read_text()) for path in (old, f"{new}/dense_decode.json")]
    triton = [run["machine"]["triton"] for run in runs]
    assert triton == ["3.6.0", version if version.count(".") == 2 else f"{version}.0"]
    assert len({run["machine"]["gpu"] for run in runs}) == 1
    assert len({run["machine"]["commit"] for run in runs}) == 1 + (version == "3.8")
    before, after = ({(r["case"], r["impl"]): r.get("us") for r in run["rows"]} for run in runs)
    support = (ROOT / "docs/support.md").read_text()
    (row,) = re.findall(rf"^\| {version} \|.*", support, re.MULTILINE)
    assert f"]: ../benchmarks/results/{new}/dense_decode.md\n" in support
    means = []
    counts = {"hopper/pow2": cases, "triton/pow2": cases, "hopper/fp8_query": queries}
    for name, count in counts.items():
        keys = [key for key in after if key[1] == f"mla_kernels/{name}"]
        assert len(keys) == count
        means.append(f"{statistics.geometric_mean(after[k] / before[k] for k in keys):.3f}")
    assert [f"[{means[0]}][{version[:3]}]", *means[1:]] == row.split(" | ")[4:7]
    readme = (ROOT / "README.md").read_text()
    said = (
        r"dense decode takes \[([\d.]+) to ([\d.]+) of the\s+time\]\S+ with the Hopper kernels,\s+"
        r"up\s+to\s+([\d.]+)\s+with the portable ones\s+and\s+up\s+to\s+([\d.]+)\s+with fp8 queries"
    )
    (bounds,) = re.findall(said, readme)
    assert bounds[0] <= means[0] <= bounds[1] and means[1] <= bounds[2] and means[2] <= bounds[3]


def test_what_the_indexer_takes_beside_deepgemm_is_what_was_measured():
    results = json.loads((ROOT / "benchmarks/results/h200/sparse_indexer.json").read_text())
    us = {(r["case"], r["impl"]): r["us"] for r in results["rows"] if r["op"] == "scores"}
    exact, fp8 = "mla_kernels/hopper", "mla_kernels/hopper/fp8_products"
    beside = [case for case, impl in us if impl == "deepgemm"]
    one = [case for case in beside if re.fullmatch(r"b\d+x\d+", case)]
    more = [case for case in beside if case not in one]

    def span(cases, impl, other, digits=2):
        ratios = [us[case, impl] / us[case, other] for case in cases]
        return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"

    of_one, of_more = span(one, exact, "deepgemm"), span(more, exact, "deepgemm")
    of_fp8 = span(beside, fp8, "deepgemm")
    readme, versions, plugin = (
        " ".join((ROOT / page).read_text().split())
        for page in ("README.md", "benchmarks/versions/indexer_topk.md", "docs/plugin.md")
    )
    assert f"scores take [{of_fp8} times DeepGEMM's time]" in readme
    assert f"take {of_one} times with one new token a request" in readme
    assert f"and {of_more} times with several or in prompts" in readme
    assert f"one new token a request take {of_one} times" in versions
    assert f"in prompts, {of_more} times" in versions
    assert f"`fp8_products` takes {of_fp8} times" in versions
    both = {(r["case"], r["impl"]): r["us"] for r in results["rows"] if r["op"] == "scores+topk"}
    gains = [
        us / both[case, "mla_kernels/fused"]
        for (case, impl), us in both.items()
        if impl == "mla_kernels/two steps"
    ]
    gain = f"{min(gains):.2f} to {max(gains):.2f}"
    assert f"The fused form is {gain} times as fast as the two steps" in versions
    assert f"take {span(one, fp8, exact)} of the time of exact ones with one new token" in plugin
    assert f"and {span(more, fp8, exact)} with prompts and drafts" in plugin
    assert f"Frobenius error), {span(more, exact, fp8, 1)} times as fast" in indexer_scores.__doc__


def test_sparse_prefill_beside_flashmla_alone_is_as_measured():
    results = json.loads((ROOT / "benchmarks/results/h200/sparse.json").read_text())
    us = {(r["case"], r["impl"]): r.get("us") for r in results["rows"] if r["op"] == "prefill"}
    ratios = [
        us[case, "peer/flashmla_prefill"] / us[case, "mla_kernels/hopper"]
        for case in sorted({case for case, _ in us})
    ]
    assert len(ratios) == 3
    readme = " ".join((ROOT / "README.md").read_text().split())
    mean = f"{statistics.geometric_mean(ratios):.2f}"
    assert f"prefill beside FlashMLA alone is {mean} times as fast" in readme


def test_what_the_readme_says_of_sparse_decode_is_what_was_measured():
    results = json.loads((ROOT / "benchmarks/results/h200/sparse.json").read_text())
    us = {(r["case"], r["impl"]): r.get("us") for r in results["rows"]}
    readme = " ".join((ROOT / "README.md").read_text().split())

    def ratio(case, impl, other, than):
        return us[case, impl] / us[other, than]

    hopper, portable = "mla_kernels/hopper", "mla_kernels/triton"
    cases = [
        ("b128_h128_q1_32k_fp8_ds_mla", hopper), ("b128_h16_q1_32k_fp8_ds_mla", hopper),
        ("b128_h128_q1_32k_bf16", hopper), ("b128_h16_q1_32k_fp8_ds_mla", portable),
    ]  # fmt: skip
    ends = [100 * ratio(f"{c}_half_tail", i, f"{c}_half_alone", i) - 100 for c, i in cases]
    low, high, few_heads = min(ends[:3]), max(ends[:3]), ends[3]
    assert f"{int(low)} to {round(high)} % in the Hopper kernel" in readme
    assert f"and {few_heads:.0f} % in the portable one for 16 heads" in readme


def test_which_tokens_the_readme_says_are_dealt_in_equal_shares(monkeypatch):
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    shared = [
        tokens
        for tokens in range(1, 300)
        for turn in choose_turns(tokens, 128, 2048, torch.device("cuda"))
        if turn.split.shares
    ]
    first, *_, last = shared
    assert shared == list(range(first, last + 1))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"and {first} to {last}, which do not fill it, are dealt to its SMs in equal" in readme


def test_how_many_first_tokens_of_v32_differ_is_what_was_measured():
    path = ROOT / "benchmarks/results/h200/vllm_0.32/sparse_extends.json"
    rows = json.loads(path.read_text())["rows"]
    differ = [row["not_run"] for row in rows if "not_run" in row]
    stock = sum("FLASHMLA_SPARSE differs" in why for why in differ)
    words = ["no", "one", "two", "three", "four", "five", "six", "seven"]
    readme = " ".join((ROOT / "benchmarks/results/README.md").read_text().split())
    assert f"{words[len(differ)].capitalize()} of its {len(rows)} cases differ by one" in readme
    assert f"in {words[stock]} of them vLLM's own backend does, too" in readme


def test_what_a_cache_of_one_scale_costs_sparse_attention_is_what_was_measured():
    results = json.loads((ROOT / "benchmarks/results/h200/sparse.json").read_text())
    us = {(r["case"], r["impl"]): r.get("us") for r in results["rows"]}
    few, many = (
        us[f"b128_h{heads}_q1_32k_fp8", "mla_kernels/triton"]
        / us[f"b128_h{heads}_q1_32k_fp8_ds_mla", f"mla_kernels/{impl}"]
        for heads, impl in ((16, "triton"), (128, "hopper"))
    )
    plugin = " ".join((ROOT / "docs/plugin.md").read_text().split())
    said = f"takes {few:.1f} times as long as fp8_ds_mla with 16 heads, {many:.1f} with 128"
    assert said in plugin


def words_of(page):
    return " ".join((ROOT / page).read_text().split())


def test_what_the_hopper_kernels_leave_to_the_portable_ones():
    from mla_kernels.decode.hopper import support as dense
    from mla_kernels.sparse.hopper import support as sparse

    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    of_dtype = {bf16: (bf16, fp8, torch.uint8), fp16: (fp16, fp8, torch.uint8)}
    cases = [(dtype, cache) for dtype, caches in of_dtype.items() for cache in caches]
    for dtype, cache in cases:
        for rescale in ("pow2", "amla", "flash"):
            left = dtype == fp16 or rescale == "flash" or (rescale == "amla" and cache != bf16)
            found = dense.refusal(MlaDims(), dtype, cache, 64, rescale)
            assert (found is not None) is left, (dtype, cache, rescale)
        left = dtype == fp16 or cache == fp8
        found = sparse.refusal(MlaDims(), dtype, cache, contiguous=True, aligned=True)
        assert (found is not None) is left, (dtype, cache)
    said = (
        "not for fp16, `MLA_BACKEND_RESCALE=flash` or, with an fp8 cache, `amla` "
        "(V3.2: nor with `--kv-cache-dtype fp8`)"
    )
    assert said in words_of("docs/troubleshooting.md")
    assert "on sm_90 the Hopper one (not of a float16 model)" in words_of("docs/plugin.md")


def test_dense_fp32_is_for_a_cpu_and_fp8_queries_for_one_kernel():
    from mla_kernels.decode.choice import choose_decode_impl
    from mla_kernels.decode.triton.support import check_supported

    with pytest.raises(ValueError, match="float32"):
        check_supported(MlaDims(), torch.float32)
    assert "on a CPU fp32, too" in words_of("docs/flash_mla.md")
    gpu, codes = torch.device("cuda"), torch.float8_e4m3fn
    for impl in ("torch", "reference"):
        assert choose_decode_impl(impl, gpu, dtype=codes, kv_cache_dtype=codes).impl == impl
    assert "no other kernel takes such queries" in words_of("docs/numerics.md")


def test_how_long_an_absorbed_end_of_a_prompt_may_be():
    from mla_backend.attention.extends import longest_extend

    def longest(impl, heads):
        return longest_extend(SimpleNamespace(impl=impl, deterministic=False), heads)

    said = (
        r"up to twice the heads of a rank, with the Hopper kernel (\d+) times them, from 8 heads "
        r"on 128 tokens \((\d+) to (\d+) with up to 63 heads that do not divide 64\), and never "
        r"more than 128; on a CPU up to three times the heads and (\d+) tokens"
    )
    (figures,) = re.findall(said, words_of("docs/plugin.md"))
    few, least, most, of_a_cpu = map(int, figures)
    uneven = [longest("hopper", heads) for heads in range(9, 64) if 64 % heads]
    assert (min(uneven), max(uneven)) == (least, most)
    for heads in range(1, 129):
        assert longest("triton", heads) == min(128, 2 * heads)
        assert longest("torch", heads) == min(of_a_cpu, 3 * heads)
        if heads < 8 or 64 % heads == 0 or heads > 64:
            assert longest("hopper", heads) == (few * heads if heads < 8 else 128)


def test_which_calls_are_repeated_is_what_records():
    names = {"mla_decode"}  # whose plan has them
    for file in (f for f in FILES if f.startswith("kernels/") and f.endswith(".py")):
        body = (ROOT / file).read_text()
        functions = re.split(r"^(?=def )", body, flags=re.MULTILINE)[1:]
        names |= {re.match(r"def (\w+)", f)[1] for f in functions if "_RECORDINGS.find(" in f}
    (said,) = re.findall(
        r"What a call of (.*?) does before its launches", words_of("docs/plugin.md")
    )
    assert set(re.findall(r"`(\w+)`", said)) == names and len(names) == 6


def test_where_flash_on_a_cpu_is_in_fp32(monkeypatch):
    from mla_kernels.decode import torch_sdpa

    words = words_of("docs/numerics.md")
    (tokens,) = re.findall(r"Requests of (\d+) tokens and more are computed in fp32", words)
    assert "where a call has three threads to 32 query rows" in words
    for threads, requests, rows, length, parts in (
        (3, 1, 32, int(tokens), 3), (3, 1, 32, int(tokens) - 1, 1), (2, 1, 16, 9999, 1),
        (3, 2, 16, 9999, 1), (6, 2, 16, 9999, 3), (3, 1, 33, 9999, 1),
    ):  # fmt: skip
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch_sdpa.parts_of(torch.Size([requests, 1, rows, 576]), length) == parts


def test_how_many_engines_the_gpu_tests_start(monkeypatch):
    for folder in ("tests/gpu", "tests/backend", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import engines

    counts = []
    for newer in (False, True):
        monkeypatch.setattr(engines, "FUSED_INDEXER", newer)
        monkeypatch.setattr(engines, "ASKS_FOR_BREAKABLE", not newer)
        for gpus in (1, 2):
            monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            counts.append(len(engines.all_engines()))
    said = f"It starts {min(counts)} to {max(counts)} small engines, eight at a time"
    assert said in words_of("CONTRIBUTING.md")


def parity_of(page):
    rows = json.loads((ROOT / f"benchmarks/results/{page}.json").read_text())["rows"]
    return {row["engine"]: row for row in rows}


def test_what_sparse_functions_take_beside_flashmla_is_what_was_measured():
    results = json.loads((ROOT / "benchmarks/results/h200/sparse.json").read_text())
    us = {(r["case"], r["impl"]): r.get("us") for r in results["rows"]}

    def ratios(heads):
        """Of decode with fp8_ds_mla rows, by the kernel that "auto" takes."""
        found = []
        for case, impl in us:
            given = re.fullmatch(r"b(\d+)_h(\d+)_q(\d+)_\d+k_fp8_ds_mla", case)
            if impl == "peer/flashmla" and given and int(given[2]) in heads:
                tokens = int(given[1]) * int(given[3])
                ours = "triton" if is_few(tokens, int(given[2]), torch.uint8) else "hopper"
                found.append(us[case, impl] / us[case, f"mla_kernels/{ours}"])
        return min(found), max(found)

    words = words_of("docs/flash_mla.md")
    low, high = ratios((64, 128))
    assert f"in decode {low:.2f} to {high:.2f} for 64 and 128 heads with fp8_ds_mla" in words
    low, high = ratios((8, 16, 32))
    assert f"{low:.1f} to {high:.1f} for 8 to 32 heads" in words
    case = "b128_h128_q1_32k_bf16"
    bf16 = us[case, "peer/flashmla_prefill"] / us[case, "mla_kernels/hopper"]
    assert f"{bf16:.2f} for 128 requests with 128 heads of bf16 rows" in words
    drop_in = [
        us[case, "peer/flashmla_prefill"] / us[case, impl]
        for case, impl in us
        if impl == "mla_kernels/flash_mla_sparse_fwd"
    ]
    assert len(drop_in) == 3
    assert (
        f"`flash_mla_sparse_fwd` has {min(drop_in):.2f} to {max(drop_in):.2f} in a prefill" in words
    )


def test_first_tokens_behind_a_cached_prefix_are_as_measured():
    results = json.loads((ROOT / "benchmarks/results/h200/extends.json").read_text())
    of = [r["ms"] for r in results["rows"] if (r["heads"], r["context"]) == (128, 32768)]
    gains = [ms["expanded"] / ms["absorbed"] for ms in of]
    peers = [min(ms["FLASHMLA"], ms["FLASH_ATTN_MLA"]) / ms["absorbed"] for ms in of]
    words = words_of("docs/plugin.md")
    assert f"come {min(gains):.1f} to {max(gains):.1f} times sooner for it" in words
    said = f"FLASH_ATTN_MLA takes {min(peers):.1f} to {max(peers):.1f} of our time there"
    assert said in words


def test_what_the_plugin_says_of_parity_is_as_measured():
    words, of = words_of("docs/plugin.md"), parity_of("h200/parity")
    ours, theirs = of["draft model"], of["FLASH_ATTN_MLA draft model"]
    assert f"[{ours['accepted']:.1%}".replace("%", " %") + " of its drafts accepted]" in words
    assert f"{theirs['accepted']:.1%}".replace("%", " %") + " with FLASH_ATTN_MLA for both" in words
    few, peer = of["CUSTOM v3.2 few"], of["FLASHMLA_SPARSE v3.2 few"]
    absorbed = of["CUSTOM v3.2 few absorbed"]
    assert f"({few['mean']:.3f} and {peer['mean']:.3f} nats in the mean)" in words
    assert f"part by up to {peer['largest_gap']:.2f} nats; with vLLM 0.32" in words
    assert f"further from it ({absorbed['mean']:.3f}), and parts" in words
    assert f"expanded form by up to {absorbed['largest_gap']:.2f}" in words
    newer = parity_of("h200/vllm_0.32/parity")
    theirs = newer["FLASHMLA_SPARSE v3.2 few"]
    said = f"({newer['CUSTOM v3.2 few']['mean']:.3f} and {theirs['mean']:.3f}) by up to "
    assert said + f"{theirs['largest_gap']:.2f}" in words
    second, first = of["other runner mtp"], of["mtp"]
    assert f"[{second['mean']:.4f} nats]" in words and f"with drafts, {first['mean']:.4f}" in words
    choices = [of[f"{name} v3.2 choices"] for name in ("CUSTOM", "FLASHMLA_SPARSE")]
    assert f"indexer chose, in {choices[0]['choices']['rows']} rows" in words
    assert max(c["choices"]["max"] for c in choices) <= 0.8
    assert "every choice is within 0.8 standard deviations" in words
    assert {f"{c['choices']['mean']:.2f}" for c in choices} == {"0.18"}
    assert "is 0.18 above the worst one chosen in the mean of either" in words
    assert f"at most {choices[1]['largest_gap']:.2f} nats below it" in words
    ranks = parity_of("h200/parity_ranks")
    dealt = ranks["CUSTOM v3.2 all dcp 2 mtp"]["mean"], ranks["CUSTOM v3.2 all dcp 2"]["mean"]
    assert f"[{dealt[0]:.4f} and {dealt[1]:.4f} nats in the mean]" in words
    assert f"ranks {ranks['FLASHMLA_SPARSE v3.2 all tp 2']['mean']:.4f})" in words


def test_the_accuracy_that_is_quoted_is_what_was_measured():
    page = (ROOT / "benchmarks/results/cpu/accuracy.md").read_text()
    rows = re.findall(r"^\| ([NU]\S+) \| (.*) \|$", page, re.MULTILINE)
    of = {name: list(map(float, figures.split(" | "))) for name, figures in rows}
    assert len(of) == 12
    _, flash, _, amla, printed, pow2, _ = of["N(0,1)"]
    said = re.findall(
        r"flash ([\d.]+)e-3, amla ([\d.]+)e-3, Algorithm 2 as printed ([\d.]+)e-3, "
        r"pow2 ([\d.]+)e-3",
        words_of("docs/numerics.md"),
    )
    # The page has three digits behind the point: the half of one more than is quoted.
    measured = [flash, amla, printed, pow2]
    assert [abs(float(a) - b) < 0.0051 for a, b in zip(said[0], measured, strict=True)] == [
        True
    ] * 4
    worst = max(100 * figures[-1] - 100 for figures in of.values())
    assert f"pow2 is up to {worst:.0f} % worse than flash" in words_of("docs/numerics.md")
