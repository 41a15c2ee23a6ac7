# SPDX-License-Identifier: Apache-2.0
"""64-bit addresses: strides that fit 32 bits, rows that lie past 2^31 elements.

Memory that nothing touches takes none on a CPU, so that the interpreter sees this too. There a
missing cast is an address of another process, and ends this one.
"""

import functools

import pytest
import torch
from mla_kernels import checks, indexer_scores, mla_decode, mla_sparse_attention, write_kv_cache
from mla_kernels.arch import ARCHS
from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.decode.triton import launcher as decode_launcher
from mla_kernels.decode.triton.launcher import are_near
from mla_kernels.layer import MlaLayerBuffers, MlaLayerConfig, rope_table
from mla_kernels.layer.torch_impl import rotate_and_append_torch
from mla_kernels.layer.triton.launcher import launch_rotate_and_append
from mla_kernels.query.triton.launcher import launch_join_query
from mla_kernels.sparse.call import SparseCall
from mla_kernels.sparse.hopper.launcher import mla_sparse_attention_hopper
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.sparse.triton import launcher as sparse_launcher
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.indexer_case import make_indexer_case
from mla_kernels.testing.metrics import SHORT_BAR, measure
from mla_kernels.triton_common.runtime import INTERPRET

APART = 2**30


def far(x):
    """x [3, ...] with what its first dimension counts APART elements from each other."""
    memory = torch.empty(2 * APART + x[0].numel(), dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, (APART, *x.contiguous().stride()[1:])).copy_(x)


def decoded(case, q, kv_cache, block_table):
    """The definition's output of `case` with these in place of its own, not rounded to bf16."""
    args = q, kv_cache, block_table, case.seq_lens
    return mla_decode_reference(*args, **case.options, causal=True)[0]


SPARSE = {"scale": 0.04, "kv_lora_rank": 512}


def attended(q, kv_cache, slots):
    """The definition's output over the rows that `slots` name, not rounded to bf16."""
    rest = {"kv_scale": None, "lengths": None, "sink": None}
    return mla_sparse_attention_reference(q, kv_cache, slots, **SPARSE, **rest)[0]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("where", ["q", "kv_cache"])
def test_decode(device, where, block_size):
    case = decode_case([9, 16, 3], num_heads=2, block_size=block_size, device=device, junk=1.0)
    pages = case.block_table[:, 0].long()
    q, kv_cache = case.q, case.kv_cache[pages]
    near = torch.arange(3, dtype=torch.int32, device=device)[:, None]
    want = decoded(case, q, kv_cache, near)
    moved = (far(q), kv_cache) if where == "q" else (q, far(kv_cache))
    got, _ = mla_decode(*moved, near, case.seq_lens, **case.options, impl="triton")
    assert SHORT_BAR.failures(measure(got, want)) == []


@pytest.mark.parametrize("where", ["q", "kv_cache"])
def test_sparse_attention(device, where):
    q, kv_cache = torch.randn(3, 2, 576).bfloat16(), torch.randn(3, 64, 576).bfloat16()
    slots = torch.arange(3 * 64, dtype=torch.int32).view(3, 64)
    q, kv_cache, slots = q.to(device), kv_cache.to(device), slots.to(device)
    want = attended(q, kv_cache, slots)
    moved = (far(q), kv_cache) if where == "q" else (q, far(kv_cache))
    got, _ = mla_sparse_attention(*moved, slots, **SPARSE, impl="triton")
    assert SHORT_BAR.failures(measure(got, want)) == []


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("op", ["decode", "sparse"])
def test_rows_of_a_block(device, op, near):
    """As in a view of [block_size, num_blocks, D]: 32 bits must reach the last one."""
    case = decode_case([3, 16], num_heads=2, block_size=16, device=device, junk=1.0)
    shape, apart = case.kv_cache.shape, (2**30 - 576) // 15 - (1 if near else -1)
    memory = torch.empty(15 * apart + shape[0] * 576, dtype=torch.bfloat16, device=device)
    rest = memory.as_strided(shape, (576, apart, 1)).copy_(case.kv_cache), case.block_table
    if op == "decode":
        want = decoded(case, case.q, *rest)
        call = functools.partial(mla_decode, case.q, *rest, case.seq_lens, **case.options)
    else:
        slots = case.block_table[:, :1] * 16 + torch.arange(16, dtype=torch.int32, device=device)
        want = attended(case.q[:, 0], rest[0], slots)
        call = functools.partial(mla_sparse_attention, case.q[:, 0], rest[0], slots, **SPARSE)
    if near:
        assert SHORT_BAR.failures(measure(call(impl="triton")[0], want)) == []
    else:
        with pytest.raises(
            ValueError, match=r"within 2\^31 bytes of each other, got strides \(576, "
        ):
            call(impl="triton")


def far_heads(q):
    """q [..., 3 heads, D], its heads APART."""
    return far(q.transpose(0, -2).contiguous()).transpose(0, -2)


FP8 = {"cache_dtype": torch.float8_e4m3fn, "kv_scale": 2.0**-6}


@pytest.mark.parametrize(("op", "cache"), [("decode", {}), ("decode", FP8), ("sparse", {})])
def test_heads(device, op, cache):
    """As in a view of [H, T, D], a layer's own order. Over an fp8 cache a GPU has kernels for few
    rows, which must leave such heads to the general one."""
    case = decode_case([9, 16, 3], num_heads=3, block_size=64, device=device, junk=1.0, **cache)
    if op == "decode":
        rest = case.kv_cache, case.block_table, case.seq_lens
        want = decoded(case, case.q, *rest[:2])
        got, _ = mla_decode(far_heads(case.q), *rest, **case.options, impl="triton")
    else:
        q, slots = case.q[:, 0], torch.arange(3 * 5, dtype=torch.int32, device=device).view(3, 5)
        rest = torch.randn(1, 64, 576, device=device).bfloat16(), slots
        want = attended(q, *rest)
        got, _ = mla_sparse_attention(far_heads(q), *rest, **SPARSE, impl="triton")
    assert SHORT_BAR.failures(measure(got, want)) == []


@pytest.mark.parametrize(
    ("strides", "near"),
    [
        ((3 * 9216, 9216, 576, 1), True),
        ((2**40, 9216, 2**27, 1), True),
        ((0, 9216, 2**28, 1), False),
        ((0, 2**30, 576, 1), False),
    ],
)
def test_kernels_for_few_rows_take_near_ones_only(strides, near):
    assert are_near(torch.empty_strided((2, 3, 16, 576), strides, device="meta")) is near


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_kernels_for_few_rows_take_near_pages_only(dtype):
    size = dtype.itemsize
    for apart, near in ((2**32 - 16, True), (2**32, False)):
        strides = apart // size, 656, 1
        cache = torch.empty_strided((2, 64, 656), strides, dtype=dtype, device="meta")
        assert checks.pages_near(cache) is near


@pytest.mark.skipif(not INTERPRET, reason="a GPU would launch")
@pytest.mark.parametrize(("apart", "few"), [(2**32 - 16, True), (2**32, False)])
@pytest.mark.parametrize("op", ["decode", "sparse"])
def test_far_pages_are_left_to_the_general_kernel(monkeypatch, op, apart, few):
    """What a GPU would be given; nothing is launched, and nothing of the cache is touched."""
    cache = torch.empty_strided((2, 64, 656), (apart, 656, 1), dtype=torch.uint8)
    q, table = torch.zeros(1, 1, 16, 576).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
    module, taken = (decode_launcher if op == "decode" else sparse_launcher), []
    monkeypatch.setattr(module, "INTERPRET", False)
    monkeypatch.setattr(module, "arch_of", lambda _: ARCHS[90])
    monkeypatch.setattr(module, "launch_merge", lambda *_: None)
    for name in ("launch_few_rows", f"launch_{op}"):
        monkeypatch.setattr(module, name, lambda *_, name=name: taken.append(name))
    if op == "decode":
        mla_decode(q, cache, table, table[0], scale=0.04, impl="triton")
    else:
        mla_sparse_attention(q[0], cache, table, **SPARSE, impl="triton")
    assert taken == ["launch_few_rows" if few else f"launch_{op}"]


def test_the_sparse_kernel_of_an_sm_90_takes_near_rows_only():
    """With rows of a block 2^31 bytes apart; nothing of it is launched here."""
    q, slots = torch.zeros(1, 64, 576).bfloat16(), torch.zeros(1, 4, dtype=torch.int32)
    cache = torch.empty_strided((1, 64, 576), (576, 2**25, 1), dtype=torch.bfloat16, device="meta")
    call = SparseCall(q, cache, slots, q[..., :512], torch.zeros(1, 64), scale=0.04)
    with pytest.raises(ValueError, match=r"within 2\^31 bytes of each other"):
        mla_sparse_attention_hopper(call)


@pytest.mark.parametrize("where", ["kv_c", "k_pe", "kv_cache"])
def test_write_kv_cache(device, where):
    rows = {"kv_c": torch.randn(3, 512), "k_pe": torch.randn(3, 64)}
    call = {name: x.bfloat16().to(device) for name, x in rows.items()}
    near = torch.zeros(3, 64, 576, dtype=torch.bfloat16, device=device)
    call["slot_mapping"] = torch.tensor([191, 5, 70], dtype=torch.int32, device=device)
    write_kv_cache(**call, kv_cache=near, impl="torch")
    call["kv_cache"] = torch.zeros_like(near)
    call[where] = far(call[where])
    write_kv_cache(**call, impl="triton")
    assert torch.equal(call["kv_cache"], near)


def test_rotate_and_append(device):
    config = MlaLayerConfig(
        dim=8, q_lora_rank=8, kv_lora_rank=256, num_heads=2, nope_dim=8, rope_dim=32, v_dim=8
    )
    buffers = MlaLayerBuffers.allocate(config, 3, dtype=torch.bfloat16, device=device)
    buffers.q_up.normal_()
    buffers.down.normal_()
    near = torch.zeros(3, 16, 288, dtype=torch.bfloat16, device=device)
    block_table = torch.arange(3, dtype=torch.int32, device=device)[:, None]
    seq_lens = torch.tensor([1, 16, 7], dtype=torch.int32, device=device)
    rest = (block_table, seq_lens, rope_table(config, 16, device))
    rotate_and_append_torch(config, buffers, near, *rest)
    moved = far(torch.zeros_like(near))
    launch_rotate_and_append(config, buffers, moved, *rest)
    torch.testing.assert_close(moved, near, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("where", [0, 1])
def test_join_query(device, where):
    parts = [torch.randn(3, 2, n, device=device) for n in (64, 8)]
    want = torch.cat(parts, -1)
    parts[where] = far(parts[where])
    got = torch.empty_like(want)
    launch_join_query(*parts, got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("where", ["q", "heads", "k_cache"])
def test_indexer_scores(device, where):
    case = make_indexer_case([9, 64, 3], heads=3, spare_blocks=0, device=device)
    pages = case.block_table[:, 0].long()
    near = torch.arange(3, dtype=torch.int32, device=device)[:, None]
    call = {"q": case.q, "k_cache": case.k_cache[pages], "weights": case.weights}
    call |= {"block_table": near, "seq_lens": case.seq_lens}
    want = indexer_scores(**call, impl="reference")
    if where == "heads":
        moved = {"q": far(call["q"].transpose(0, 1)).transpose(0, 1)}
    else:
        moved = {where: far(call[where])}
    got = indexer_scores(**call | moved, impl="triton")
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
