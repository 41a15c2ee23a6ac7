# SPDX-License-Identifier: Apache-2.0
"""The plan of a decode step: how the cache of a batch is shared out over the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mla_kernels import checks
from mla_kernels.decode.choice import choose_decode_impl
from mla_kernels.decode.rescale import RESCALES
from mla_kernels.layouts import BLOCK_SIZE, MlaDims
from mla_kernels.torch_modes import untraced
from mla_kernels.triton_common.record import Recordings, kind

if TYPE_CHECKING:
    from mla_kernels.decode.plan.launcher import DevicePlan

MAX_S_Q = 8
MAX_HEADS = 128
QUERY_DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn)
_CACHE_DTYPES = (*checks.FLOAT_DTYPES, torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True)
class MlaDecodePlan:
    """What the layers of one step share. `device_plan` is None where no kernel needs one (CPU);
    `recordings` are of the calls of `mla_decode` that were given this plan, `updates` of its own.
    """

    num_requests: int
    s_q: int
    num_heads: int
    kv_lora_rank: int
    deterministic: bool
    device: torch.device
    device_plan: DevicePlan | None = None
    recordings: Recordings = field(
        default_factory=Recordings, init=False, repr=False, compare=False
    )
    updates: Recordings = field(default_factory=Recordings, init=False, repr=False, compare=False)

    @untraced
    def update(self, seq_lens: torch.Tensor) -> None:
        """Plan for new lengths [num_requests] int32 in place: one small kernel, no allocation, no
        sync. May be captured in a CUDA graph, or run before the replay of one that uses the plan.
        ValueError for lengths of another batch size, dtype or device.
        """
        device_plan, key = self.device_plan, None
        if device_plan is not None:
            key = kind(seq_lens)
            replay = self.updates.find(key)
            if replay is not None:
                replay((seq_lens, *device_plan.updated))
                return
        checks.check_shape("seq_lens", seq_lens, (self.num_requests,))
        checks.check_dtype("seq_lens", seq_lens, (torch.int32,))
        checks.check_last_contiguous("seq_lens", seq_lens)
        checks.check_device("seq_lens", seq_lens, self.device)
        if device_plan is not None:
            operands = seq_lens, *device_plan.updated
            launch = functools.partial(device_plan.update, seq_lens)
            self.updates.record(key, operands, launch)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the plan holds, what it was lent included."""
        return sum(self.workspace.values())

    @property
    def workspace(self) -> dict[int, int]:
        """{address: bytes} of the device memory that the plan holds. Plans that share some have
        the same addresses."""
        if self.device_plan is None:
            return {}
        held = vars(self.device_plan).values()
        return {x.data_ptr(): x.nbytes for x in held if isinstance(x, torch.Tensor)}

    def narrow(self, num_requests: int) -> MlaDecodePlan:
        """A plan for fewer requests in the same buffers, to be updated before use. Only the one
        updated last is valid: engines keep one plan for their largest batch and narrow it.
        """
        checks.check_range("num_requests", num_requests, 1, self.num_requests)
        device_plan = self.device_plan
        if device_plan is not None:
            requests = device_plan.requests[:num_requests]
            device_plan = replace(device_plan, requests=requests)
        return replace(self, num_requests=num_requests, device_plan=device_plan)

    def check_fits(
        self,
        num_requests: int,
        s_q: int,
        num_heads: int,
        kv_lora_rank: int,
        deterministic: bool,
        device: torch.device,
    ) -> None:
        """ValueError if the plan was made for a batch of another shape, in the other mode or on
        another device."""
        if self.device != device:
            raise ValueError(f"Expected a plan made on {device}, got one made on {self.device}")
        made_for = (self.num_requests, self.s_q, self.num_heads)
        if made_for != (num_requests, s_q, num_heads):
            raise ValueError(
                f"Expected a plan for (requests, s_q, heads) = {(num_requests, s_q, num_heads)}, "
                f"got one for {made_for}"
            )
        if self.kv_lora_rank != kv_lora_rank:  # partial results would not fit the workspace
            raise ValueError(
                f"Expected a plan with kv_lora_rank={kv_lora_rank}, got {self.kv_lora_rank}"
            )
        if self.deterministic != deterministic:
            raise ValueError(
                f"Expected a plan with deterministic={deterministic}, got {self.deterministic}"
            )


@untraced
def plan_mla_decode(
    seq_lens: torch.Tensor,
    *,
    num_heads: int,
    s_q: int,
    kv_lora_rank: int = 512,
    deterministic: bool = False,
    max_seq_len: int | None = None,
    impl: str = "auto",
    rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: torch.dtype = torch.bfloat16,
    block_size: int = BLOCK_SIZE,
    rescale: str = "pow2",
    lender: MlaDecodePlan | None = None,
) -> MlaDecodePlan:
    """Plan the decode of a batch from seq_lens [B] int32, on its device, without a host sync.

    Build it once, `update` it once a step and pass it to every layer's `mla_decode(plan=...)`. It
    owns the workspace for partial results, so that a step with a plan allocates nothing, and calls
    with one plan may not run at once (on two streams).

    seq_lens        [B] int32, tokens in the cache, the s_q new ones included; B may be 0
    num_heads, s_q  of the q to come: 1..128 heads, 1..8 new tokens a request
    max_seq_len     bounds that workspace in deterministic mode, in tokens; longer requests are
                    right, but not bit for bit what they are with room for more
    lender          a plan whose memory for partial results is used, if that is enough; the two must
                    never be in use at the same time

    The others are those of the `mla_decode` that the plan is for: they decide which kernel will run
    and so into how many parts the device is cut. A plan serves the other kernels too, less evenly.
    ValueError for arguments that do not fit.
    """
    checks.check_shape("seq_lens", seq_lens, ("B",))
    checks.check_dtype("seq_lens", seq_lens, (torch.int32,))
    checks.check_last_contiguous("seq_lens", seq_lens)
    checks.check_range("num_heads", num_heads, 1, MAX_HEADS)
    checks.check_range("s_q", s_q, 1, MAX_S_Q)
    checks.check_range("kv_lora_rank", kv_lora_rank, 1, 2**15)
    checks.check_range("rope_dim", rope_dim, 1, 2**15)
    if max_seq_len is not None:
        checks.check_range("max_seq_len", max_seq_len, 0, 2**31 - 1)
        max_seq_len = int(max_seq_len)  # NumPy's integers are none to Triton
    checks.check_flags(deterministic=deterministic)
    checks.check_choice("dtype", dtype, QUERY_DTYPES)
    checks.check_choice("kv_cache_dtype", kv_cache_dtype, _CACHE_DTYPES)
    checks.check_choice("block_size", block_size, checks.BLOCK_SIZES)
    checks.check_choice("rescale", rescale, RESCALES)
    if lender is not None and not isinstance(lender, MlaDecodePlan):
        raise ValueError(f"Expected lender from plan_mla_decode, got {type(lender).__name__}")
    if lender is not None and lender.device != seq_lens.device:
        raise ValueError(f"Expected a lender on {seq_lens.device}, got one on {lender.device}")
    num_heads, s_q, kv_lora_rank = int(num_heads), int(s_q), int(kv_lora_rank)
    deterministic = bool(deterministic)
    device_plan = None
    choice = choose_decode_impl(
        impl,
        seq_lens.device,
        dims=MlaDims(kv_lora_rank, rope_dim),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        rescale=rescale,
    )
    if choice.impl in ("hopper", "triton"):
        from mla_kernels.decode.plan.launcher import build_plan

        if choice.impl == "hopper":
            from mla_kernels.decode.hopper.parts import parts_and_spare
        else:
            from mla_kernels.decode.triton.parts import parts_and_spare
        rows = num_heads * s_q
        parts, spare = parts_and_spare(rows, seq_lens.device, kv_cache_dtype, dtype)
        device_plan = build_plan(
            seq_lens,
            num_heads=num_heads,
            s_q=s_q,
            kv_lora_rank=kv_lora_rank,
            deterministic=deterministic,
            max_seq_len=max_seq_len,
            num_parts=parts,
            spare=spare,
            lender=lender.device_plan if lender else None,
        )
    B = seq_lens.shape[0]
    return MlaDecodePlan(
        B, s_q, num_heads, kv_lora_rank, deterministic, seq_lens.device, device_plan
    )
