# SPDX-License-Identifier: Apache-2.0
"""`deterministic=True`: the bits of a row's scores do not depend on the other rows of the call."""

import ast
import subprocess
import sys

import pytest
import torch
from mla_kernels import indexer_lengths, indexer_scores, indexer_topk
from mla_kernels.indexer.triton.launcher import tiles_of_call
from mla_kernels.testing.indexer_case import make_indexer_case
from mla_kernels.triton_common.runtime import INTERPRET

ROWS_OF_EACH = 4

# How the sum over the heads is laid out in every way to call the kernel with a row a tile.
LAYOUTS = """
import re, sys, tempfile
from pathlib import Path
from mla_kernels.arch import get_arch
from mla_kernels.indexer.triton import specs
from mla_kernels.offline.compiler import compile_spec

REDUCE = r"\\}\\) : \\(tensor<64x1x64xf32, (#\\w+)>\\) -> tensor<64x1xf32, #ttg.slice<\\{dim = 2"
found = []
for sm in map(int, sys.argv[1:]):
    arch = get_arch(sm)
    for spec in specs.specialisations(arch):
        given = spec.constexprs
        one_row = spec.name.startswith("indexer_scores/") and given.get("ROWS") == 1
        if one_row and given["H"] == 64 and given["Q_FP8"] and given["K_FP8"]:
            with tempfile.TemporaryDirectory() as folder:
                report = compile_spec(spec, arch, dump=Path(folder))
                assert report.error is None, report.error
                (text,) = (path.read_text() for path in Path(folder).glob("*.ttgir"))
            (layout,) = set(re.findall(REDUCE, text))
            found.append((sm, spec.name, re.search(f"^{layout} = (.*)$", text, re.M)[1]))
print(found)
"""


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_in_torch_a_row_has_the_bits_that_it_has_alone(fp8, ragged):
    case = make_indexer_case([3000, 130, 64, 0, 9], s_q=ROWS_OF_EACH, q_fp8=fp8, k_fp8=fp8)
    T = len(case.q)
    requests = torch.arange(T, dtype=torch.int32) // ROWS_OF_EACH
    lengths = indexer_lengths(case.seq_lens, T)
    how = {"request_ids": requests.clone()} if ragged else {}
    if ragged:
        how["request_ids"][5] = -1  # a padding row
        lengths[5] = 0
    how |= {"lengths": lengths, "deterministic": True}
    whole = indexer_scores(*case.args, **how, impl="torch")
    chosen = indexer_topk(*case.args, 40, **how, impl="torch")
    for t, request in enumerate(requests.tolist()):
        one = slice(request, request + 1)
        args = case.q[t : t + 1], case.k_cache, case.weights[t : t + 1]
        args += case.block_table[one], case.seq_lens[one]
        alone = {"lengths": lengths[t : t + 1], "deterministic": True, "impl": "torch"}
        assert torch.equal(indexer_scores(*args, **alone)[0], whole[t])
        assert torch.equal(indexer_topk(*args, 40, **alone)[0], chosen[t])


@pytest.mark.skipif(not INTERPRET, reason="tiles on a CPU need the interpreter")
@pytest.mark.parametrize(
    ("T", "B", "ragged", "shared"),
    [(1, 1, False, 1), (8, 4, False, 2), (8, 2, False, 2), (33, 2, True, 2), (6, 2, True, 1)],
)
def test_rows_share_no_tile(T, B, ragged, shared):
    q = torch.zeros(T, 64, 128, dtype=torch.float8_e4m3fn)
    k_cache = torch.zeros(1, 64, 132, dtype=torch.uint8)
    rows = [
        tiles_of_call(q, k_cache, B, ragged=ragged, deterministic=alone).rows
        for alone in (False, True)
    ]
    assert rows == [shared, 1]


def test_the_heads_of_a_row_are_added_in_one_way():
    """In decode and prompts, split or not."""
    command = [sys.executable, "-c", LAYOUTS, "80", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout)
    for sm in (80, 100):
        layouts = {layout for of, _, layout in found if of == sm}
        assert len(layouts) == 1 and sum(of == sm for of, _, _ in found) == 3
