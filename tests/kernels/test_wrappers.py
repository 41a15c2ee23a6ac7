# SPDX-License-Identifier: Apache-2.0
"""Tensors that wrap others have the address 0, which a kernel would read or write: on a GPU that
ends every later call of the process. On a CPU they are torch's matter."""

import pytest
import torch
from mla_kernels import (
    exact_topk,
    indexer_lengths,
    mla_decode,
    mla_sparse_attention,
    plan_mla_decode,
    positions_to_slots,
    write_kv_cache,
)


class Wrapper(torch.Tensor):
    """As DTensor is one."""

    @staticmethod
    def __new__(cls, inside):
        x = inside
        options = {"strides": x.stride(), "dtype": x.dtype, "device": x.device}
        wrapper = torch.Tensor._make_wrapper_subclass(cls, x.shape, **options)
        wrapper.inside = x
        return wrapper

    def __tensor_flatten__(self):
        return ["inside"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} came after the checks")


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")  # on no CPU


def ints(*shape):
    return tensor(*shape, dtype=torch.int32)


def results(*rows):
    return {"out": tensor(*rows, 512), "lse": tensor(*rows, dtype=torch.float32)}


DENSE = {"q": tensor(2, 1, 4, 576), "kv_cache": tensor(9, 64, 576)}
DENSE |= {"block_table": ints(2, 3), "seq_lens": ints(2), **results(2, 1, 4)}
SPARSE = {"q": tensor(2, 4, 576), "kv_cache": tensor(9, 64, 576), "slots": ints(2, 7)}
SPARSE |= {"lengths": ints(2), "sink": tensor(4, dtype=torch.float32), **results(2, 4)}
ROWS = {"kv_c": tensor(3, 512), "k_pe": tensor(3, 64)}
ROWS |= {"kv_cache": tensor(9, 64, 576), "slot_mapping": ints(3)}
CALLS = [
    (mla_decode, DENSE, {"scale": 0.1}),
    (mla_sparse_attention, SPARSE, {"scale": 0.1}),
    (write_kv_cache, ROWS, {}),
    (plan_mla_decode, {"seq_lens": ints(2)}, {"num_heads": 4, "s_q": 1}),
    (exact_topk, {"scores": tensor(2, 9, dtype=torch.float32), "lengths": ints(2)}, {"k": 3}),
    (positions_to_slots, {"positions": ints(2, 3), "block_table": ints(2, 3)}, {}),
    (indexer_lengths, {"seq_lens": ints(2), "positions": ints(2)}, {"T": 2}),
]


@pytest.mark.parametrize(("function", "tensors", "options"), CALLS)
def test_wrappers_are_refused_by_name(function, tensors, options):
    function(**tensors, **options)
    for name, x in tensors.items():
        with pytest.raises(ValueError, match=f"{name} to be .* got Wrapper, which wraps others"):
            function(**tensors | {name: Wrapper(x)}, **options)
