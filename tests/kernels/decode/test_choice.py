# SPDX-License-Identifier: Apache-2.0
"""Which kernel a GPU gets, asked without one."""

import pytest
import torch
from mla_kernels import dispatch
from mla_kernels.arch import get_arch
from mla_kernels.decode import api, choice
from mla_kernels.decode.triton.many_rows.launcher import takes_many_rows
from mla_kernels.layouts import MlaDims
from mla_kernels.testing.cases import decode_case

GPU = torch.device("cuda:0")


@pytest.mark.parametrize(("sm", "impl"), [(90, "hopper"), (80, "triton"), (100, "triton")])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_by_architecture(gpu, sm, impl, cache):
    gpu(sm)
    assert choice.choose_decode_impl("auto", GPU, kv_cache_dtype=cache).impl == impl


@pytest.mark.parametrize(
    "arguments",
    [
        {"dims": MlaDims(256, 32)},
        {"dims": MlaDims(512, 32)},
        {"dtype": torch.float16, "kv_cache_dtype": torch.float16},
        {"dtype": torch.float16, "kv_cache_dtype": torch.float8_e4m3fn},
        {"dtype": torch.float16, "kv_cache_dtype": torch.uint8},
        {"kv_cache_dtype": torch.float16},
        {"block_size": 16},
        {"rescale": "flash"},
        {"rescale": "amla", "kv_cache_dtype": torch.float8_e4m3fn},
        {"rescale": "amla", "kv_cache_dtype": torch.uint8},
        {"contiguous": False},
    ],
)
def test_what_goes_to_the_portable_kernel_of_an_sm_90(gpu, arguments):
    gpu(90)
    assert choice.choose_decode_impl("auto", GPU, **arguments).impl == "triton"
    with pytest.raises(ValueError, match="impl='hopper' of mla_decode cannot run here: it"):
        choice.choose_decode_impl("hopper", GPU, **arguments)


@pytest.mark.parametrize("s_q", [1, 2])
def test_a_request_alone_is_judged_as_in_a_batch(monkeypatch, s_q):
    """A slice of heads that are padded: alone torch calls it contiguous."""
    q = torch.zeros(4, s_q, 72, 576).bfloat16()[:, :, :64]
    case = decode_case([70, 3, 9, 1], s_q=s_q, num_heads=64)
    assert q[2:3].is_contiguous() is (s_q == 1)
    judged = []
    monkeypatch.setattr(
        api,
        "choose_decode_impl",
        lambda *_, contiguous, **__: judged.append(contiguous) or dispatch.Choice("torch", ""),
    )
    whole = case.q
    for some in (q, q[2:3], whole, whole[2:3]):
        B = len(some)
        api.mla_decode(some, case.kv_cache, case.block_table[:B], case.seq_lens[:B], scale=0.04)
        few = takes_many_rows(some, case.kv_cache, MlaDims(), get_arch(90), "pow2")
        assert few is judged[-1]
    assert judged == [False, False, True, True]


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.float32, "kv_cache_dtype": torch.float32}, "q in bfloat16 or float16"),
        ({"dims": MlaDims(128, 16)}, r"\(kv_lora_rank, rope dim\) in .*got \(128, 16\)"),
    ],
)
def test_what_no_kernel_takes_is_refused_on_a_gpu(gpu, impl, arguments, message):
    gpu(80)
    with pytest.raises(ValueError, match=message):
        choice.choose_decode_impl(impl, GPU, **arguments)
    assert choice.choose_decode_impl("torch", GPU, **arguments).impl == "torch"


def test_the_hopper_kernel_needs_triton_too(gpu, monkeypatch):
    gpu(90)
    monkeypatch.setattr(dispatch, "triton_refusal", lambda device: "triton is not installed")
    found = choice.choose_decode_impl("auto", GPU)
    assert found.impl == "torch" and "hopper: triton is not installed" in found.reason
    with pytest.raises(ValueError, match="cannot run here: triton is not installed"):
        choice.choose_decode_impl("hopper", GPU)


@pytest.mark.parametrize(
    ("rows", "tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (1024, 64)]
)
@pytest.mark.parametrize("kv_format", ["fp8", "fp8_ds_mla"])
def test_query_rows_of_an_fp8_program(rows, tile, kv_format):
    pytest.importorskip("triton")
    from mla_kernels.decode.hopper.fp8.configs import choose_config

    assert choose_config(rows, kv_format)["N"] == tile


def test_a_bf16_cache_takes_amla_on_an_sm_90(gpu):
    gpu(90)
    assert choice.choose_decode_impl("hopper", GPU, rescale="amla").impl == "hopper"


@pytest.mark.parametrize("strided", [None, "q", "kv_cache", "start"])
def test_views_are_told_from_dense_tensors(strided, monkeypatch):
    seen = {}

    def choose(impl, device, **known):
        seen.update(known)
        return dispatch.Choice("torch", "a test's")

    monkeypatch.setattr(api, "choose_decode_impl", choose)
    case = decode_case([5, 70])
    q, kv_cache, block_table, seq_lens = case.args
    if strided == "q":
        q = q.repeat(1, 1, 2, 1)[:, :, :16]
    elif strided == "kv_cache":
        kv_cache = kv_cache.repeat(1, 2, 1)[:, :64]
    elif strided == "start":
        q = torch.nn.functional.pad(q.flatten(), (1, 0))[1:].view(q.shape)
    api.check_arguments(
        q, kv_cache, block_table, seq_lens, 0.1, 512, None, None, "pow2", "auto",
        None, None, None, False,
    )  # fmt: skip
    assert seen["contiguous"] == (strided is None)
