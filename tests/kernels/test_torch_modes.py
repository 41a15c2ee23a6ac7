# SPDX-License-Identifier: Apache-2.0
"""What a caller has set in torch changes nothing of what the ops compute in torch."""

import threading
from contextlib import contextmanager

import pytest
import torch
from mla_kernels import (
    exact_topk,
    indexer_scores,
    mla_decode,
    mla_sparse_attention,
    plan_mla_decode,
    torch_modes,
    write_kv_cache,
)
from mla_kernels.decode import torch_scratch
from mla_kernels.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_kernels.indexer import rows
from mla_kernels.indexer.torch_impl import e4m3_to_f32
from mla_kernels.layer import MlaLayerConfig, MlaLayerWeights
from mla_kernels.query import api as query_api
from mla_kernels.testing.cases import decode_case
from mla_kernels.testing.indexer_case import make_indexer_case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RESCALES = ["pow2", "amla", "flash"]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def another_default_device():
    """The device of new tensors that are told none, for which any other than a CPU will do."""
    return torch.device("meta")


@contextmanager
def products_in_bf16():
    """Where the CPU multiplies bf16; with AVX-512 alone products are then in fp32 still, but added
    in another order."""
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


MODES = [autocast, another_default_device, products_in_bf16]


def check(call, mode):
    want = call()
    vars(torch_scratch._BUFFERS).clear()  # which would hide where new memory lies
    with mode():
        got = call()
    after = call()
    for x, *others in zip(want, got, after, strict=True):
        assert all(y.dtype == x.dtype and torch.equal(y, x) for y in others)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rescale", RESCALES)
def test_decode(rescale, dtype, mode):
    case = decode_case([300, 3, 0, 129], s_q=2, dtype=dtype)
    check(lambda: mla_decode(*case.args, **case.options, rescale=rescale), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_in_parts(mode):
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    case = decode_case([5000], s_q=1, num_heads=4)
    try:
        check(lambda: mla_decode(*case.args, **case.options, rescale="flash"), mode)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rescale", ["pow2", "flash"])
def test_sparse_attention(rescale, dtype, mode):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 576, generator=g).to(dtype)
    kv_cache = torch.randn(4, 64, 576, generator=g).to(dtype)
    slots = torch.randint(-1, 256, (3, 70), generator=g, dtype=torch.int32)
    call = {"scale": 0.05, "rescale": rescale}
    check(lambda: mla_sparse_attention(q, kv_cache, slots, **call), mode)


@pytest.mark.parametrize(
    "how",
    [{"impl": "reference"}, *({"impl": "torch", "rescale": rescale} for rescale in RESCALES)],
    ids=str,
)
def test_nothing_is_differentiated_forwards(how):
    """Nor backwards: part of a tangent, as of what is not copied first, would be wrong."""
    case = decode_case([300, 3], dtype=torch.float32)
    q, kv_cache, *rest = case.args
    want = mla_decode(*case.args, **case.options, **how)
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, torch.ones_like(x)) for x in (q, kv_cache)]
        got = mla_decode(*dual, *rest, **case.options, **how)
        assert all(forward_ad.unpack_dual(x).tangent is None for x in got)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("mode", MODES)
def test_indexer(monkeypatch, mode):
    monkeypatch.setattr(rows, "triton_refusal", lambda _: "in torch")
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


def check_compiled(call):
    want = call()
    vars(torch_scratch._BUFFERS).clear()
    torch.compiler.reset()
    try:
        compiled = torch.compile(call, backend="aot_eager")
        for some in (compiled, compiled, call):
            assert all(map(torch.equal, some(), want))
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("rescale", RESCALES)
def test_decode_in_a_compiled_function(rescale):
    case = decode_case([300, 3, 0, 129], s_q=2)
    check_compiled(lambda: mla_decode(*case.args, **case.options, rescale=rescale))


def without_data(call):
    """Fake tensors have shapes alone, so the call fails where it looks at a number."""
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception, match="aten"):
        call()


def functionalised(call):
    torch.func.functionalize(lambda x: x + call()[0].sum().float())(torch.zeros(1))


def differentiated(call):
    torch.func.grad(lambda x: (x * call()[0].sum().float()).sum())(torch.ones(1))


@pytest.mark.parametrize("elsewhere", [without_data, functionalised, differentiated])
def test_kept_memory_is_of_no_mode_that_has_ended(elsewhere):
    case = decode_case([300, 129, 3, 0], s_q=2)

    def call():
        return mla_decode(*case.args, **case.options)

    want = call()
    vars(torch_scratch._BUFFERS).clear()
    elsewhere(call)
    assert all(map(torch.equal, call(), want))
    kept = [last for _, last in vars(torch_scratch._BUFFERS).values()]
    assert len(kept) == 2 and all(type(x) is torch.Tensor and x.data_ptr() for x in kept)


def test_kernels_in_a_compiled_function(device):
    """Interpreted ones, which nobody traces either; on a GPU the launch and what it remembers."""
    case = decode_case([300, 3, 0, 129], s_q=2, device=device)
    seq_lens = case.args[3]
    plan = plan_mla_decode(seq_lens, num_heads=case.q.shape[2], s_q=2, impl="triton")
    scores = torch.arange(3000.0, device=device).flip(0).repeat(2, 1)

    def call():
        plan.update(seq_lens)
        out, lse = mla_decode(*case.args, **case.options, plan=plan, impl="triton")
        chosen = exact_topk(scores + 1, 5, impl="triton")
        return out, lse, chosen

    check_compiled(call)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rescale", RESCALES)
def test_decode_without_tf32(rescale, dtype, device):
    case = decode_case([300, 3, 0, 129], s_q=2, dtype=dtype, device=device)
    options = case.options | {"rescale": rescale, "impl": "torch"}
    check(lambda: mla_decode(*case.args, **options), products_in_bf16)  # on a GPU in TF32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_joins_tensors(monkeypatch, dtype, mode):
    """fp16 is not autocast's own 16-bit float here, and more than 8 new tokens are attended in
    turns."""
    monkeypatch.setattr(query_api, "triton_refusal", lambda _: "in torch")
    case = decode_case([300, 19], s_q=2, dtype=dtype)
    parts = case.q[..., :512], case.q[..., 512:]
    latent, rope = (part[:, 0, 0].contiguous() for part in parts)
    many = case.q.repeat(1, 5, 1, 1)
    cache = case.kv_cache.unsqueeze(2)

    def call():
        written = torch.zeros_like(case.kv_cache)
        write_kv_cache(latent, rope, written, case.seq_lens, impl="torch")
        rest = case.args[1:]
        metadata, _ = get_mla_metadata()
        return (
            written,
            *mla_decode(parts, *rest, **case.options),
            *flash_mla_with_kvcache(many, cache, *rest[1:], 512, metadata, causal=True),
        )

    check(call, mode)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [None, torch.uint8])
def test_the_definitions(cache_dtype, other):
    """They join tensors too, in fp64 and in the dtype of q."""
    mine = torch.float16 if other == torch.bfloat16 else torch.bfloat16
    case = decode_case([70, 3], s_q=2, dtype=mine, cache_dtype=cache_dtype, junk=1.0)
    slots = (case.block_table[:, :1] * 64 + torch.arange(3)).int()
    sparse = {"scale": 0.05, "kv_lora_rank": 512, "impl": "reference"}
    indexer = make_indexer_case([70, 3], q_fp8=False, k_fp8=False)

    def call():
        return (
            *mla_decode(*case.args, **case.options, impl="reference"),
            *mla_sparse_attention(case.q[:, 0], case.kv_cache, slots, **sparse),
            indexer_scores(*indexer.args, impl="reference"),
        )

    check(call, lambda: torch.autocast("cpu", other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16])
def test_weights_of_a_layer(dtype, other):
    config = MlaLayerConfig(
        dim=8, q_lora_rank=8, kv_lora_rank=256, num_heads=2, nope_dim=8, rope_dim=32, v_dim=8
    )
    sizes = {"q_down": (8, 8), "kv_down": (288, 8), "q_up": (80, 8), "kv_up": (32, 256)}
    given = {name: torch.randn(size).to(dtype) for name, size in (sizes | {"out": (8, 16)}).items()}

    def call():
        made = MlaLayerWeights.from_projections(config, **given)
        return made.down, made.q_up, made.k_up, made.v_up, made.out

    check(call, lambda: torch.autocast("cpu", other))


@contextmanager
def subnormals_are_zero():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_every_fp8_code():
    codes = torch.arange(256, dtype=torch.uint8)[None]
    want = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(e4m3_to_f32(codes), want, rtol=0, atol=0, equal_nan=True)
    numbers = codes[:, codes[0] & 0x7F != 0x7F]
    check(lambda: e4m3_to_f32(numbers).clone().split(1), subnormals_are_zero)


BACKENDS = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}
SETTINGS = {
    "old name": lambda _: torch.set_float32_matmul_precision("high"),
    "new name": lambda matmul: setattr(matmul, "fp32_precision", "tf32"),
    "all products": lambda _: setattr(torch.backends, "fp32_precision", "tf32"),
    "fp32": lambda _: torch.set_float32_matmul_precision("highest"),
    "none": lambda _: None,
}


@pytest.fixture
def unset():
    """No precision is set, before and after."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        for settings in (torch.backends, *BACKENDS.values()):
            settings.fp32_precision = "none"

    reset()
    yield
    reset()


class OnDevice:
    """What stands for a tensor on a device that need not be there."""

    def __init__(self, device):
        self.device = torch.device(device)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("device", BACKENDS)
def test_products_are_in_fp32_and_the_setting_is_put_back(device, setting, unset):
    matmul = BACKENDS[device]
    SETTINGS[setting](matmul)
    before = matmul.fp32_precision

    @torch_modes.without_modes
    def within(x, fails):
        if fails:
            raise ZeroDivisionError
        return matmul.fp32_precision

    assert within(OnDevice(device), False) in ("ieee", "none")
    assert matmul.fp32_precision == before
    with pytest.raises(ZeroDivisionError):
        within(OnDevice(device), True)
    assert matmul.fp32_precision == before
    if setting == "all products":  # so it was not set for these alone
        torch.backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == "ieee"
    elif setting != "new name":
        torch.get_float32_matmul_precision()  # which raises where the names disagree


def test_products_stay_in_fp32_while_another_thread_ends(unset):
    torch.set_float32_matmul_precision("medium")
    begun, both, ended = (threading.Event() for _ in range(3))
    found = []

    @torch_modes.without_modes
    def first(x):
        begun.set()
        assert both.wait(60)

    @torch_modes.without_modes
    def second(x):
        both.set()
        assert ended.wait(60)
        found.append(BACKENDS["cpu"].fp32_precision)

    x = torch.zeros(1)
    threads = [threading.Thread(target=call, args=(x,)) for call in (first, second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[0].join()
    ended.set()
    threads[1].join()
    assert found == ["ieee"]
    assert BACKENDS["cpu"].fp32_precision == "bf16"
    assert torch.get_float32_matmul_precision() == "medium"
