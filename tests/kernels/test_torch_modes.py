# SPDX-License-Identifier: Apache-2.0
"""What a caller has set in torch changes nothing of what the ops compute in torch."""

import pytest
import torch
from mla_kernels import indexer_scores, mla_decode, mla_sparse_attention
from mla_kernels.decode import torch_scratch
from mla_kernels.indexer import rows
from mla_kernels.testing.cases import decode_case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RESCALES = ["pow2", "amla", "flash"]


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def another_default_device():
    """The device of new tensors that are told none, for which any other than a CPU will do."""
    return torch.device("meta")


def check(call, mode):
    want = call()
    vars(torch_scratch._BUFFERS).clear()  # which would hide where new memory lies
    with mode():
        got = call()
    after = call()
    for x, *others in zip(want, got, after, strict=True):
        assert all(y.dtype == x.dtype and torch.equal(y, x) for y in others)


@pytest.mark.parametrize("mode", [autocast, another_default_device])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rescale", RESCALES)
def test_decode(rescale, dtype, mode):
    case = decode_case([300, 3, 0, 129], s_q=2, dtype=dtype)
    check(lambda: mla_decode(*case.args, **case.options, rescale=rescale), mode)


@pytest.mark.parametrize("mode", [autocast, another_default_device])
def test_a_request_in_parts(mode):
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    case = decode_case([5000], s_q=1, num_heads=4)
    try:
        check(lambda: mla_decode(*case.args, **case.options, rescale="flash"), mode)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", [autocast, another_default_device])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rescale", ["pow2", "flash"])
def test_sparse_attention(rescale, dtype, mode):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 576, generator=g).to(dtype)
    kv_cache = torch.randn(4, 64, 576, generator=g).to(dtype)
    slots = torch.randint(-1, 256, (3, 70), generator=g, dtype=torch.int32)
    call = {"scale": 0.05, "rescale": rescale}
    check(lambda: mla_sparse_attention(q, kv_cache, slots, **call), mode)


@pytest.mark.parametrize("mode", [autocast, another_default_device])
def test_indexer(monkeypatch, mode):
    monkeypatch.setattr(rows, "INTERPRET", False)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 64, 128, generator=g).bfloat16()
    k_cache = torch.randn(4, 64, 128, generator=g).bfloat16()
    weights = torch.rand(3, 64, generator=g)
    block_table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    seq_lens = torch.tensor([100, 70], dtype=torch.int32)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)

    def call():
        request_ids, lengths = torch.empty(2, 3, dtype=torch.int32, device="cpu")
        ragged = {"request_ids": request_ids, "lengths": lengths}
        rows.token_rows(starts, seq_lens, **ragged)
        scores = indexer_scores(q, k_cache, weights, block_table, seq_lens, **ragged)
        return request_ids, lengths, scores

    check(call, mode)
