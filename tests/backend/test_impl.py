# SPDX-License-Identifier: Apache-2.0
"""One layer's calls, as vLLM makes them, against attention written out in fp64.

Steps are built by vLLM's own metadata classes over shuffled pages; everything unused is NaN.
"""

import types

import pytest
import torch

H, NOPE, ROPE, V, BLOCK = 4, 16, 64, 24, 64
SCALE = (NOPE + ROPE) ** -0.5


@pytest.fixture(scope="module")
def vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


class KvBProj(torch.nn.Module):
    """Stands in for vLLM's linear layer: calling it gives (output, bias)."""

    def __init__(self, rank, dtype):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        weight = torch.randn(rank, H * (NOPE + V), generator=g) * rank**-0.5
        self.matrix = weight.to(dtype)
        self.quant_method = None

    def forward(self, x):
        return x @ self.matrix, None


def make_impl(rank, dtype, kv_cache_dtype="auto"):
    """The layer's implementation, made as vLLM does: with the model's dtype as torch's default."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mla_backend.attention.impl import MlaImpl

    dims = {
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": V,
        "kv_b_proj": KvBProj(rank, dtype),
    }
    with set_default_torch_dtype(dtype):
        return MlaImpl(
            H, rank + ROPE, SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None, **dims
        )


def make_builder(impl):
    """The builder without vLLM's constructor, which wants a loaded model."""
    from mla_backend.attention.extends import ExtendRows
    from mla_backend.attention.metadata import MlaMetadataBuilder
    from mla_backend.attention.step_plans import StepPlans

    builder = object.__new__(MlaMetadataBuilder)
    builder._most_s_q, builder._longest_piece, builder._on_cpu = 8, 1, True
    builder._plans = StepPlans(impl.decode_kernel, H, 16, 4096, torch.device("cpu"), 64)
    builder._rows = ExtendRows(64, 8, torch.device("cpu"))
    return builder


def build_decode(
    impl, table, seq_lens, query_lens, longest_piece=1, tokens=None, on_cpu=True, one_each=None
):
    """A step's decode metadata, as vLLM asks for it; tokens: with those that pad it; one_each: what
    vLLM says of the step, where a request may have had more tokens."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    builder = make_builder(impl)
    builder._longest_piece, builder._on_cpu = longest_piece, on_cpu
    one_each = max(query_lens) == 1 if one_each is None else one_each
    builder._one_token_each = one_each
    return builder._build_decode(
        block_table_tensor=table,
        seq_lens_device=seq_lens,
        max_seq_len=int(seq_lens.max()),
        query_start_loc_cpu=None if one_each else starts,  # nobody looks
        query_start_loc_device=starts,
        num_decode_tokens=sum(query_lens) if tokens is None else tokens,
        dcp_tot_seq_lens_device=None,
    )


def check_decode(out, lse, q, written, query_lens, dequantise, tolerance):
    """Every new token against the keys up to its own, in fp64."""
    token = 0
    for rows, new in zip(written, query_lens, strict=True):
        rows = dequantise(rows).to(q.dtype).double()
        for j in range(new):
            kv = rows[: len(rows) - new + 1 + j]
            scores = q[token].double() @ kv.T * SCALE
            expected = scores.softmax(-1) @ kv[:, : out.shape[-1]]
            assert relative_error(out[token], expected) < tolerance
            assert (lse[token] - scores.logsumexp(-1)).abs().max() < tolerance
            token += 1
    assert token == len(out)


def make_cache(lengths, rank, impl, kv_cache_dtype, dtype, k_scale):
    """Pages written through the layer; (cache, block_table, seq_lens, rows as written)."""
    g = torch.Generator().manual_seed(0)
    pages = [-(-n // BLOCK) for n in lengths]
    order = torch.randperm(sum(pages) + 4, generator=g)
    table = torch.full((len(lengths), max(pages) + 1), 2**30, dtype=torch.int32)
    shape = (len(order), BLOCK, rank + ROPE)
    if kv_cache_dtype == "fp8_ds_mla":
        cache = torch.full((*shape[:2], 656), 0x7F, dtype=torch.uint8)
    elif kv_cache_dtype == "fp8":
        cache = torch.full(shape, 0x7F, dtype=torch.uint8)  # NaN in e4m3
    else:
        cache = torch.full(shape, float("nan"), dtype=dtype)
    written = []
    for r, n in enumerate(lengths):
        table[r, : pages[r]] = order[sum(pages[:r]) : sum(pages[: r + 1])]
        rows = torch.randn(n, rank + ROPE, generator=g).to(dtype)
        position = torch.arange(n)
        slots = table[r, position // BLOCK].long() * BLOCK + position % BLOCK
        padded = torch.cat([slots, torch.tensor([-1])])  # a slot of -1 is not written
        more = torch.cat([rows, torch.full((1, rank + ROPE), 7.0, dtype=dtype)])
        impl.do_kv_cache_update(
            more[:, :rank], more[:, None, rank:], cache, padded, kv_cache_dtype, k_scale
        )
        written.append(rows)
    return cache, table, torch.tensor(lengths, dtype=torch.int32), written


def dequantised(rows, kv_cache_dtype, rank, k_scale):
    """What a cache of this kind keeps of `rows`."""
    rows = rows.float()
    if kv_cache_dtype == "fp8":
        return (rows / k_scale).to(torch.float8_e4m3fn).float() * k_scale
    if kv_cache_dtype == "fp8_ds_mla":
        groups = rows[:, :rank].unflatten(1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        latent = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)
        return torch.cat([latent, rows[:, rank:].bfloat16().float()], 1)
    return rows


CASES = [
    (512, torch.float32, "auto", 1e-5),
    (256, torch.float32, "auto", 1e-5),
    (512, torch.bfloat16, "auto", 6e-3),
    (512, torch.float16, "auto", 2e-3),
    (512, torch.bfloat16, "fp8", 8e-3),
    (256, torch.bfloat16, "fp8", 8e-3),
    (512, torch.bfloat16, "fp8_ds_mla", 8e-3),
    (512, torch.float32, "fp8", 1e-5),
]


def relative_error(a, b):
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("rank, dtype, kv_cache_dtype, tolerance", CASES)
@pytest.mark.parametrize("s_q", [1, 2, 8])
def test_decode(vllm_config, rank, dtype, kv_cache_dtype, tolerance, s_q):
    impl = make_impl(rank, dtype, kv_cache_dtype)
    k_scale = torch.tensor(0.5)
    lengths = [8, 64, 65, 200, 127]
    cache, table, seq_lens, written = make_cache(
        lengths, rank, impl, kv_cache_dtype, dtype, k_scale
    )
    if kv_cache_dtype == "fp8":
        cache = cache.view(torch.float8_e4m3fn)  # as vLLM does before forward_mqa
    query_lens = [s_q] * len(lengths)
    run_decode(
        impl, cache, table, seq_lens, written, query_lens, kv_cache_dtype, tolerance, k_scale
    )


def run_decode(
    impl,
    cache,
    table,
    seq_lens,
    written,
    query_lens,
    kv_cache_dtype,
    tolerance,
    k_scale,
    longest_piece=1,
):
    """One layer's decode of a step, checked; its metadata."""
    rank, dtype, T = impl.kv_lora_rank, written[0].dtype, sum(query_lens)
    decode = build_decode(impl, table, seq_lens, query_lens, longest_piece)
    q = torch.randn(T, H, rank + ROPE, generator=torch.Generator().manual_seed(2)).to(dtype)
    metadata = types.SimpleNamespace(decode=decode)
    layer = types.SimpleNamespace(_k_scale=k_scale)
    out, lse = impl.forward_mqa(q.split([rank, ROPE], -1), cache, metadata, layer)
    assert out.shape == (T, H, rank) and lse.shape == (T, H)

    def dequantise(rows):
        return dequantised(rows, kv_cache_dtype, rank, k_scale)

    check_decode(out, lse, q, written, query_lens, dequantise, tolerance)
    return decode


@pytest.mark.parametrize("kv_cache_dtype, tolerance", [("auto", 1e-5), ("fp8", 1e-5)])
@pytest.mark.parametrize(
    "query_lens, longest_piece, launches",
    [
        ([1, 1, 1, 1, 9], 1, [13]),  # a prompt's end behind decode tokens: rows alike
        ([1, 1, 7, 30, 2], 1, [41]),
        ([4, 4, 4, 1, 20], 1, [12, 21]),  # drafted requests stay together
        ([4, 1, 4, 4, 4], 1, [4, 13]),
        ([20, 5, 1, 3, 9], 1, [38]),
        ([8, 8, 8, 8, 8], 1, [40]),  # nothing to flatten
        ([9, 9, 9, 9, 9], 1, [45]),  # alike, but longer than a request may be
        ([1, 1, 1, 1, 9], 4, [5, 8]),  # the ninth as another decode token
        ([1, 1, 7, 30, 2], 8, [2, 7, 6, 24, 2]),
        ([4, 4, 4, 1, 20], 4, [12, 1, 20]),
        ([20, 5, 1, 3, 9], 8, [4, 16, 5, 1, 3, 1, 8]),
        ([5, 13, 8, 9, 16], 8, [5, 5, 16, 1, 24]),
    ],
)
def test_decode_of_mixed_lengths(
    vllm_config, query_lens, longest_piece, launches, kv_cache_dtype, tolerance
):
    impl = make_impl(512, torch.float32, kv_cache_dtype)
    k_scale = torch.tensor(0.5)
    cache, table, seq_lens, written = make_cache(
        [70, 64, 65, 200, 127], 512, impl, kv_cache_dtype, torch.float32, k_scale
    )
    if kv_cache_dtype == "fp8":
        cache = cache.view(torch.float8_e4m3fn)
    decode = run_decode(
        impl,
        cache,
        table,
        seq_lens,
        written,
        query_lens,
        kv_cache_dtype,
        tolerance,
        k_scale,
        longest_piece,
    )
    tokens = []
    while decode is not None:
        tokens.append(decode.tokens)
        decode = decode.rest
    assert tokens == launches


@pytest.mark.parametrize(
    "query_lens, pieces",
    [
        ([4, 4, 8], [(2, 4), (1, 2), (2, 3)]),  # two launches of 4 tokens would share a plan
        ([3, 3, 8], [(2, 3), (2, 4)]),
        ([1, 1, 8], [(2, 1), (2, 4)]),
        ([4, 8, 3, 8], [(1, 4), (19, 1)]),
    ],
)
def test_launches_of_a_gpu_have_a_plan_each(vllm_config, query_lens, pieces):
    impl = make_impl(512, torch.float32)
    table = torch.zeros(len(query_lens), 4, dtype=torch.int32)
    lengths = torch.full((len(query_lens),), 100, dtype=torch.int32)
    launch = build_decode(impl, table, lengths, query_lens, longest_piece=4, on_cpu=False)
    found = []
    while launch is not None:
        number = len(launch.seq_lens)
        found.append((number, launch.tokens // number))
        assert (launch.plan.num_requests, launch.plan.s_q) == found[-1]
        launch = launch.rest
    assert found == pieces


@pytest.mark.parametrize(
    "query_lens, tokens", [([1, 1, 0, 0], 4), ([2, 2, 0], 6), ([1, 0], 2), ([0, 0], 2), ([0, 0], 8)]
)
@pytest.mark.parametrize("one_each", [None, False])
def test_requests_that_pad_a_graph(vllm_config, query_lens, tokens, one_each):
    """They have no new token, and the step as many tokens as if they had: one launch. So it is
    where vLLM knows of the most new tokens of a request only that they are at most so many."""
    impl = make_impl(512, torch.float32)
    cache, table, seq_lens, written = make_cache([70, 200], 512, impl, "auto", torch.float32, None)
    new = [n for n in query_lens if n]
    tables = torch.full((len(query_lens), table.shape[1]), 2**30, dtype=torch.int32)
    tables[: len(new)] = table[: len(new)]
    lengths = torch.zeros(len(query_lens), dtype=torch.int32)
    lengths[: len(new)] = seq_lens[: len(new)]
    decode = build_decode(impl, tables, lengths, query_lens, tokens=tokens, one_each=one_each)
    assert decode.rest is None and decode.tokens == tokens
    q = torch.randn(tokens, H, 576, generator=torch.Generator().manual_seed(2))
    metadata, layer = types.SimpleNamespace(decode=decode), types.SimpleNamespace(_k_scale=None)
    out, lse = impl.forward_mqa(q.split([512, ROPE], -1), cache, metadata, layer)
    real = sum(new)
    check_decode(out[:real], lse[:real], q, written[: len(new)], new, lambda rows: rows, 1e-5)
    assert (out[real:] == 0).all() and (lse[real:] == -torch.inf).all()


@pytest.mark.parametrize("q_scale", [1.0, 0.03])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2, 2], [1, 1, 9], [2, 2, 9]])
def test_decode_of_fp8_queries(vllm_config, monkeypatch, q_scale, query_lens):
    """As vLLM quantises them for a layer that takes them; a prompt's end among them too."""
    from vllm.model_executor.layers.attention.mla_attention import _DecodeConcatQuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    monkeypatch.setenv("MLA_BACKEND_FP8_QUERY", "1")
    impl = make_impl(512, torch.bfloat16, "fp8")  # a CPU computes it, though none is offered it
    assert impl.supports_quant_query_input
    k_scale, q_scale = torch.tensor(0.5), torch.tensor(q_scale)
    cache, table, seq_lens, written = make_cache(
        [70, 64, 200], 512, impl, "fp8", torch.bfloat16, k_scale
    )
    decode = build_decode(impl, table, seq_lens, query_lens)
    assert (decode.rest is None) == (query_lens != [2, 2, 9])
    T = sum(query_lens)
    q = torch.randn(T, H, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    quantise = _DecodeConcatQuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
    codes = quantise.forward_native(*q.split([512, ROPE], -1), q_scale)
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    layer = types.SimpleNamespace(_k_scale=k_scale, _q_scale=q_scale)
    metadata = types.SimpleNamespace(decode=decode)
    out, lse = impl.forward_mqa(codes, cache.view(torch.float8_e4m3fn), metadata, layer)
    assert out.shape == (T, H, 512) and out.dtype == torch.bfloat16

    def dequantise(rows):
        return dequantised(rows, "fp8", 512, k_scale)

    values = codes.float() * q_scale
    check_decode(out, lse, values, written, query_lens, dequantise, 2.0**-8)
    monkeypatch.setenv("MLA_BACKEND_FP8_QUERY", "0")
    assert not make_impl(512, torch.bfloat16, "fp8").supports_quant_query_input


@pytest.mark.parametrize("rank, dtype, kv_cache_dtype, tolerance", CASES)
def test_prefill(vllm_config, rank, dtype, kv_cache_dtype, tolerance):
    from mla_backend.attention.prefill import plan_prefill

    impl = make_impl(rank, dtype, kv_cache_dtype)
    k_scale = torch.tensor(0.5)
    lengths, new = [8, 64, 200, 130], [8, 1, 72, 130]
    cache, table, seq_lens, written = make_cache(
        lengths, rank, impl, kv_cache_dtype, dtype, k_scale
    )
    if kv_cache_dtype == "fp8":
        cache = cache.view(torch.float8_e4m3fn)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    tiles = plan_prefill(table, starts, seq_lens, block_size=BLOCK)
    T = int(starts[-1])
    q = torch.randn(T, H, NOPE + ROPE, generator=torch.Generator().manual_seed(3)).to(dtype)
    output = torch.full((T, H * V), float("nan"), dtype=dtype)
    nothing = torch.full((T, rank), float("nan"))
    metadata = types.SimpleNamespace(prefill_tiles=tiles)
    impl.forward_mha(q, nothing, nothing, cache, metadata, k_scale, output)
    for r, (n, m) in enumerate(zip(lengths, new, strict=True)):
        rows = dequantised(written[r], kv_cache_dtype, rank, k_scale).to(dtype).double()
        kv = (rows[:, :rank] @ impl.kv_b_proj.matrix.double()).view(n, H, NOPE + V)
        qr = q[starts[r] : starts[r + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", qr[..., :NOPE], kv[..., :NOPE])
        scores = (scores + torch.einsum("qhd,kd->hqk", qr[..., NOPE:], rows[:, rank:])) * SCALE
        hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, kv[..., NOPE:]).flatten(1)
        assert relative_error(output[starts[r] : starts[r + 1]], expected) < tolerance


def test_no_cache_yet(vllm_config):
    """vLLM profiles memory before there is a cache."""
    impl = make_impl(512, torch.float32)
    rows = torch.zeros(1, 576)
    nothing = torch.tensor([])
    impl.do_kv_cache_update(
        rows[:, :512], rows[:, None, 512:], nothing, torch.zeros(1), "auto", None
    )


@pytest.mark.parametrize(
    "position, value, named",
    [(4, [1.0], "alibi_slopes"), (5, 64, "sliding_window"), (7, 30.0, "logits_soft_cap")],
)
def test_features_of_other_attention_are_refused(vllm_config, position, value, named):
    from mla_backend.attention.impl import MlaImpl

    impl = make_impl(512, torch.float32)
    args = [H, 576, SCALE, 1, None, None, "auto", None, "decoder", None]
    args[position] = value
    dims = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kwargs = {name: getattr(impl, name) for name in dims}
    with pytest.raises(ValueError, match=named):
        MlaImpl(*args, **kwargs, qk_head_dim=NOPE + ROPE, kv_b_proj=impl.kv_b_proj)


def test_sinks_that_vllm_leaves_out_are_refused(vllm_config, monkeypatch):
    """HYV4 has layers without an indexer, too."""
    model = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(learnable_sink=True))
    monkeypatch.setattr(vllm_config, "model_config", model)
    with pytest.raises(ValueError, match=r"learnable attention sinks.*Mend"):
        make_impl(512, torch.float32)


def test_implementation_that_cannot_run_here_is_refused_at_start(vllm_config, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_IMPL", "hopper")
    with pytest.raises(ValueError, match="hopper"):
        make_impl(512, torch.float32)


def test_plan_is_made_once_for_a_shape(vllm_config):
    plans = make_builder(make_impl(512, torch.float32))._plans
    plan = plans.for_step(torch.tensor([3, 4], dtype=torch.int32), 1)
    assert plans.for_step(torch.tensor([5, 6], dtype=torch.int32), 1) is plan
    assert plans.for_step(torch.tensor([5, 6, 7], dtype=torch.int32), 1) is not plan
    assert plans.for_step(torch.tensor([5, 6], dtype=torch.int32), 2) is not plan


def test_absorbed_weights_are_laid_out_once_on_a_cpu(vllm_config):
    """vLLM hands over permuted views; torch on a CPU would copy them for every product."""
    impl = make_impl(512, torch.bfloat16)
    lengths = [70]
    cache, table, seq_lens, _ = make_cache(lengths, 512, impl, "auto", torch.bfloat16, None)
    decode = build_decode(impl, table, seq_lens, [1])
    w = torch.randn(512, H, NOPE + V).split([NOPE, V], dim=-1)
    layer = types.SimpleNamespace(
        _k_scale=None,
        W_UK_T=torch.nn.Parameter(w[0].permute(1, 2, 0), requires_grad=False),
        W_UV=torch.nn.Parameter(w[1].transpose(0, 1), requires_grad=False),
    )
    parameter, views = layer.W_UK_T, (layer.W_UK_T.clone(), layer.W_UV.clone())
    storage = []
    for _ in range(2):
        metadata = types.SimpleNamespace(decode=decode)
        impl.forward_mqa(torch.zeros(1, H, 576, dtype=torch.bfloat16), cache, metadata, layer)
        storage.append(layer.W_UK_T.data_ptr())
    assert layer.W_UK_T is parameter  # a reload of the weights still finds it
    assert layer.W_UK_T.is_contiguous() and layer.W_UV.is_contiguous()
    assert storage[0] == storage[1]
    assert torch.equal(layer.W_UK_T, views[0]) and torch.equal(layer.W_UV, views[1])
