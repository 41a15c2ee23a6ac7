# SPDX-License-Identifier: Apache-2.0
"""What `mla_decode` returned, beside the reference."""

import torch

from mla_kernels.decode.reference import mla_decode_reference
from mla_kernels.testing import metrics
from mla_kernels.testing.cases import DecodeCase

LSE_BAR = 2**-8


def assert_decoded(
    case: DecodeCase, out: torch.Tensor, lse: torch.Tensor, *, causal: bool = True
) -> None:
    """AssertionError if they are not the reference's for `case`, within its bars."""
    want, want_lse = mla_decode_reference(*case.args, **case.options, causal=causal)
    failures = metrics.SHORT_BAR.failures(metrics.measure(out, want))
    assert not failures, failures
    seen = torch.isfinite(want_lse)
    assert torch.equal(seen, torch.isfinite(lse))
    assert (lse - want_lse)[seen].abs().max() < LSE_BAR
