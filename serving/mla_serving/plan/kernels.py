# SPDX-License-Identifier: Apache-2.0
"""Which of our kernels computes a model's attention in an engine. The backend settles for one at
start-up, for all steps, also for those in which the other is faster. Neither a GPU nor Triton is
needed.
"""

import torch
from mla_kernels.decode.hopper import support as dense
from mla_kernels.layouts import BLOCK_SIZE
from mla_kernels.sparse.choice import is_few
from mla_kernels.sparse.hopper import support as sparse

from mla_serving.plan.model import MlaModel
from mla_serving.plan.rates import SM_90

_QUANTISED = {"fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}


def chosen(model: MlaModel, heads: int, cache: str, gpu: str) -> str:
    """The "hopper" or the "triton" (portable) kernel: what MLA_BACKEND_IMPL=auto is with no other
    setting, on a kind of GPU that the kernels serve.

    heads  of queries on a GPU
    cache  as `rates.Case` has it
    """
    dtype: torch.dtype = getattr(torch, model.dtype)
    rows = _QUANTISED.get(cache, dtype)
    if model.sparse:
        refusal = sparse.refusal(model.dims, dtype, rows, contiguous=True, aligned=True)
        hopper = refusal is None and not is_few(None, heads, rows)
    else:
        hopper = dense.refusal(model.dims, dtype, rows, BLOCK_SIZE, rescale="pow2") is None
    return "hopper" if hopper and gpu in SM_90 else "triton"
