# SPDX-License-Identifier: Apache-2.0
"""The sparse kernel on a GPU: real sizes, CUDA graphs, a decode step that allocates nothing."""

import pytest
import torch
from mla_kernels import mla_sparse_attention, mla_sparse_workspace
from mla_kernels.cache.torch_impl import encode_rows
from mla_kernels.sparse.reference import mla_sparse_attention_reference
from mla_kernels.testing.cases import scales_to_powers_of_two
from mla_kernels.testing.graphs import captured
from mla_kernels.testing.metrics import SHORT_BAR, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

K = 2048
SCALE = 576**-0.5
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs sm_90",
)
IMPLS = ["triton", pytest.param("hopper", marks=HOPPER)]
CASES = [
    *(("triton", cache) for cache in DTYPES),
    *(pytest.param("hopper", cache, marks=HOPPER) for cache in ("bf16", "fp8_ds_mla")),
]


class Step:
    """A decode step as a server runs it: other queries and slots, the same memory."""

    def __init__(self, T, heads, cache="bf16", blocks=256, impl="auto", page=64):
        g = torch.Generator("cuda").manual_seed(0)
        self.impl, self.lengths, self.sink = impl, None, None
        rows = torch.randn(blocks * 64, 576, generator=g, device="cuda").bfloat16()
        self.kv_scale = 2.0**-6 if cache == "fp8" else None
        if cache != "bf16":
            rows = encode_rows(rows[:, :512], rows[:, 512:], DTYPES[cache], self.kv_scale)
        self.kv = rows.view(blocks * 64 // page, page, -1)
        self.q = torch.empty(T, heads, 576, dtype=torch.bfloat16, device="cuda")
        self.slots = torch.empty(T, K, dtype=torch.int32, device="cuda")
        self.out = torch.empty(T, heads, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(T, heads, device="cuda")
        self.workspace = mla_sparse_workspace(T, heads, K, device=self.q.device)
        self.change(0)

    def change(self, seed):
        """New queries and slots; one of several tokens has none. Results are poisoned."""
        g = torch.Generator("cuda").manual_seed(seed)
        self.q.normal_(generator=g).mul_(0.5)
        T, num_slots = len(self.q), self.kv.shape[0] * self.kv.shape[1]
        self.slots.random_(0, num_slots, generator=g)
        lengths = torch.randint(1, K + 1, (T, 1), generator=g, device="cuda")
        if T > 1:
            lengths[seed % T] = 0
        self.slots[torch.arange(K, device="cuda") >= lengths] = -1
        for result in (self.out, self.lse):
            result.fill_(torch.nan)
        self.workspace.fill_(0xFF)

    def __call__(self):
        mla_sparse_attention(
            self.q, self.kv, self.slots, scale=SCALE, kv_scale=self.kv_scale,
            lengths=self.lengths, sink=self.sink, impl=self.impl,
            out=self.out, lse=self.lse, workspace=self.workspace,
        )  # fmt: skip

    def check(self, tokens=4):
        torch.cuda.synchronize()
        T = len(self.q)
        some = sorted({*range(0, T, max(1, T // tokens)), T - 1})
        want, lse = mla_sparse_attention_reference(
            self.q[some], self.kv, self.slots[some], scale=SCALE, kv_lora_rank=512,
            kv_scale=self.kv_scale, sink=self.sink,
            lengths=None if self.lengths is None else self.lengths[some],
        )  # fmt: skip
        assert SHORT_BAR.failures(measure(self.out[some], want)) == []
        seen = torch.isfinite(lse)
        assert torch.equal(seen, torch.isfinite(self.lse[some]))
        assert ((self.lse[some] - lse)[seen].abs() < 2**-8).all()


@pytest.mark.parametrize(("impl", "cache"), CASES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("T", [1, 33, 40, 72, 80, 144, 300])
def test_tokens_heads_and_caches(impl, cache, heads, T):
    step = Step(T, heads, cache, impl=impl)
    step.change(T + 1)
    step()
    step.check()


@pytest.mark.parametrize(("impl", "cache"), CASES)
@pytest.mark.parametrize(
    ("T", "heads", "page"),
    [(1, 128, 64), (5, 20, 16), (36, 128, 64), (44, 72, 64), (75, 128, 64), (150, 72, 64)],
)
def test_holes_lengths_sinks_and_junk(impl, cache, T, heads, page):
    """-1 and numbers outside the cache anywhere in a row; unused rows are NaN.

    Some tokens see few rows. Their lse would show that the reference rounds values to bf16 and the
    Hopper kernel does not (docs/numerics.md), if scales were no powers of two."""
    step = Step(T, heads, cache, impl=impl, page=page)
    if cache == "fp8_ds_mla":
        scales_to_powers_of_two(step.kv)
    g = torch.Generator("cuda").manual_seed(T)
    num_slots = step.kv.shape[0] * page
    for _ in range(3):
        step.slots.random_(0, num_slots, generator=g)
        hole = torch.rand(T, K, generator=g, device="cuda")
        step.slots[hole < 0.3] = -1
        step.slots[hole > 0.98] = num_slots
        step.slots[:, K - 700 :] = -1
        step.lengths = torch.randint(0, K + 1, (T,), generator=g, device="cuda").int()
        step.lengths[0] = 65
        step.lengths[T // 2] = 0 if T > 1 else 1
        step.sink = torch.randn(heads, generator=g, device="cuda")
        seen = step.slots[step.slots >= 0].long()
        unused = torch.ones(num_slots, dtype=torch.bool, device="cuda")
        unused[seen[seen < num_slots]] = False
        junk = step.kv.view(torch.uint8).view(num_slots, -1)
        kept = junk[unused].clone()
        junk[unused] = 0xFF
        step.out.fill_(torch.nan)
        step()
        step.check()
        junk[unused] = kept


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T", [5, 150])
def test_scales_of_any_size(impl, T):
    """Tiles of rows as large as 2^14 and as small as 2^-28, and of zeros, behind each other; tokens
    that see only small ones."""
    step = Step(T, 128, "fp8_ds_mla", impl=impl)
    scales_to_powers_of_two(step.kv)  # as above
    step.q.mul_(2.0**-9)  # scores of tens: sums in fp32 err by 2^-18 of them
    sizes = [-28, 0, -12, 14, None, 4]
    scales = step.kv[..., 512:528].view(torch.float32)
    for block in range(len(step.kv)):
        size = sizes[block % 6]
        scales[block] = scales[block] * 2.0**size if size is not None else 2.0**-126
        if size is None:
            step.kv[block, :, :512] = 0
    seen = torch.tensor([[0, 0], [0, 4], [1, 2], [2, 5], [4, 2], [0, 5], [1, 5]], device="cuda")
    tile = torch.arange(K, device="cuda") // 64
    kind = seen[torch.arange(T, device="cuda") % 7][:, tile % 2]
    kind[-1] = tile % 6
    g = torch.Generator("cuda").manual_seed(T)
    block = torch.randint(0, len(step.kv) // 6, (T, K), generator=g, device="cuda") * 6 + kind
    step.slots = (block * 64 + torch.randint(0, 64, (T, K), generator=g, device="cuda")).int()
    step()
    step.check(tokens=T)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("cache", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("T", [2, 600])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [3, 570])
def test_what_is_no_number_in_a_query_shows_in_its_row_alone(impl, cache, T, number, column):
    """Of tokens whose slots are split, and that are not; in lse too."""
    step = Step(T, 64, cache, impl=impl)
    if cache == "fp8_ds_mla":
        scales_to_powers_of_two(step.kv)  # as above
    step()
    step.check()
    step.q[1, 2, column] = number
    step()
    assert step.lse.isnan().nonzero().tolist() == [[1, 2]]
    assert torch.equal(step.out.isnan(), step.lse.isnan()[..., None].expand_as(step.out))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("T", [2, 64])
def test_graph_replays_with_other_slots(heads, T, impl):
    step = Step(T, heads, "fp8_ds_mla", impl=impl)
    graph, _ = captured(step)
    for seed in range(1, 4):
        step.change(seed)
        graph.replay()
        step.check()


@pytest.mark.parametrize("impl", IMPLS)
def test_steps_neither_allocate_nor_sync_nor_compile(only_launches, impl):
    step = Step(8, 16, "fp8_ds_mla", impl=impl)
    step()
    with only_launches():
        for _ in range(10):
            step()
    step.check()


@pytest.mark.parametrize(("impl", "cache"), CASES)
def test_the_same_bits_every_time(impl, cache):
    step = Step(40, 16, cache, impl=impl)
    step()
    first, lse = step.out.clone(), step.lse.clone()
    for _ in range(20):
        step.out.fill_(torch.nan)
        step()
        assert torch.equal(step.out, first) and torch.equal(step.lse, lse)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_past_two_to_the_31_elements(impl):
    """int64 addresses: the last rows of a cache of 2.4e9 elements."""
    blocks = 2**16
    kv = torch.zeros(blocks, 64, 576, dtype=torch.bfloat16, device="cuda")
    kv[-1] = 1.0
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(blocks * 64 - 64, blocks * 64, dtype=torch.int32, device="cuda")[None]
    out, _ = mla_sparse_attention(q, kv, slots, scale=SCALE, impl=impl)
    assert torch.equal(out, torch.ones_like(out))
