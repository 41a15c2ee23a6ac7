# SPDX-License-Identifier: Apache-2.0
"""The selftest sees kernels that are wrong."""

import subprocess
import sys

import pytest
import torch
from mla_kernels.cache import torch_impl as cache_torch
from mla_kernels.decode.torch_impl import mla_decode_torch
from mla_kernels.indexer.torch_impl import indexer_scores_torch
from mla_kernels.sparse.torch_impl import mla_sparse_attention_torch
from mla_kernels.topk.torch_impl import exact_topk_torch

from mla_backend.doctor import selftest


def test_selftest_sees_a_wrong_kernel(monkeypatch):
    right = cache_torch.write_kv_cache_torch

    def one_row_off(kv_c, k_pe, kv_cache, slot_mapping, **options):
        right(kv_c, k_pe, kv_cache, slot_mapping + (slot_mapping == 64), **options)

    monkeypatch.setattr("mla_kernels.cache.api.write_kv_cache_torch", one_row_off)

    def drops_a_token(q, kv_cache, block_table, seq_lens, **options):
        return mla_decode_torch(q, kv_cache, block_table, (seq_lens - 1).clamp(min=0), **options)

    monkeypatch.setattr("mla_kernels.decode.api.mla_decode_torch", drops_a_token)

    def another_choice(scores, k, **options):
        return exact_topk_torch(-scores, k, **options)

    monkeypatch.setattr("mla_kernels.topk.api.exact_topk_torch", another_choice)
    monkeypatch.setattr(
        "mla_kernels.indexer.api.indexer_scores_torch",
        lambda *args, **options: indexer_scores_torch(*args, **options) * 1.01,
    )
    monkeypatch.setattr(
        "mla_kernels.sparse.api.mla_sparse_attention_torch",
        lambda q, *args, **options: mla_sparse_attention_torch(q * 1.1, *args, **options),
    )
    shown = {r.name: r for r in selftest.run()}
    ops = ("mla_decode", "write_kv_cache", "indexer_scores", "exact_topk", "mla_sparse_attention")
    for name in (f"selftest {op} torch" for op in ops):
        assert shown[name].status == "fail"
        assert shown[name].mend


def test_selftest_without_memory_of_the_gpu_blames_no_kernel(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("mla_kernels.decode.api.mla_decode_torch", full)
    shown = {r.name: r for r in selftest.run()}["selftest mla_decode torch"]
    assert (shown.status, shown.mend) == ("fail", selftest._NO_ROOM)


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_selftest_sees_a_wrong_kernel_without_assertions(flag):
    """PYTHONOPTIMIZE=1 takes every `assert` away."""
    code = (
        "from mla_backend.doctor import selftest\n"
        "from mla_kernels.cache import api as cache\n"
        "from mla_kernels.sparse import api as sparse\n"
        "from mla_kernels.topk import api as topk\n"
        "import mla_kernels.decode.api as decode\n"
        "topk_of, decode_of = topk.exact_topk_torch, decode.mla_decode_torch\n"
        "sparse_of = sparse.mla_sparse_attention_torch\n"
        "def scaled(q, *args, out=None, **options):\n"
        "    result, lse = decode_of(q, *args, out=out, **options)\n"
        "    return result.mul_(1.1), lse\n"
        "topk.exact_topk_torch = lambda scores, k, **o: topk_of(-scores, k, **o)\n"
        "cache.write_kv_cache_torch = lambda *_, **__: None\n"
        "decode.mla_decode_torch = scaled\n"
        "sparse.mla_sparse_attention_torch = lambda q, *a, **o: sparse_of(q * 1.1, *a, **o)\n"
        "print(*(r.name for r in selftest.run() if r.status == 'ok'), sep='\\n')"
    )
    run = subprocess.run([sys.executable, flag, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == ["selftest indexer_scores torch"]
