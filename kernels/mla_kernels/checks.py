# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the ops: ValueError naming the value and what is allowed."""

import operator
from collections.abc import Hashable
from numbers import Real

import torch

from mla_kernels.layouts import Fp8DsMlaLayout, MlaDims

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_SIZES = (16, 32, 64, 128)
# Scales that fp32 holds without loss, multiplied by log2(e) too.
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**127
# Of a request, and slots of a token: kernels count both in 32 bits, and launch so many ranges.
MAX_TOKENS, MAX_SLOTS = 2**30, 2**20


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # Tensors and arrays are compared element by element, on a GPU with a wait.
    comparable = isinstance(value, Hashable) and not isinstance(value, torch.Tensor)
    if not comparable or value not in allowed:
        raise ValueError(f"Expected {name} in {list(allowed)}, got {value!r}")


def check_flags(**flags: object) -> None:
    """Switches: a tensor's value would have to be read from the device."""
    for name, value in flags.items():
        check_choice(name, value, (True, False))


def check_type(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise ValueError(f"Expected {name} of type {wanted.__name__}, got {type(value).__name__}")


def check_range(name: str, value: int, low: int, high: int) -> None:
    try:
        fits = not isinstance(value, (bool, torch.Tensor)) and low <= operator.index(value) <= high
    except TypeError:  # no integer
        fits = False
    if not fits:
        raise ValueError(f"Expected {name} in {low}..{high}, got {value!r}")


def check_scale(scale: float, name: str = "softmax scale") -> None:
    """A softmax scale: a number of the host, as reading one back would wait for the device."""
    _check_positive(name, scale)


def _check_positive(name: str, value: object) -> None:
    try:
        # By float: NumPy's 16-bit numbers round these bounds to 0 and inf.
        fits = isinstance(value, Real) and MIN_SCALE <= float(value) <= MAX_SCALE
    except OverflowError:  # an integer that no float reaches
        fits = False
    if isinstance(value, bool) or not fits:
        raise ValueError(
            f"Expected a finite {name} above 0, got {value!r} (allowed: 2^-126 to 2^127)"
        )


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"Expected {name} to be a tensor, got {type(x).__name__}")
    # Its address is 0 and kernels would go there; on a CPU torch looks inside, or says why not.
    if hasattr(type(x), "__tensor_flatten__") and x.device.type != "cpu":
        raise ValueError(
            f"Expected {name} to be a tensor with memory of its own, got {type(x).__name__}, which "
            "wraps others: pass the one inside (of a DTensor: to_local())"
        )


def check_dtype(name: str, x: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    check_tensor(name, x)
    if x.dtype not in allowed:
        raise ValueError(f"Expected {name}.dtype in {list(allowed)}, got {x.dtype}")


def check_shape(name: str, x: torch.Tensor, shape: tuple[int | str, ...]) -> None:
    """`shape` holds integers, NumPy's too, that must match and names of free dimensions."""
    check_tensor(name, x)
    ok = x.dim() == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(x.shape, shape, strict=True)
    )
    if not ok:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"Expected {name} of shape [{wanted}], got {list(x.shape)}")


def check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"Expected {name} on {device}, like the others, got {x.device}")


def check_last_contiguous(name: str, x: torch.Tensor) -> None:
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"Expected {name} with a contiguous last dimension, got strides {x.stride()}"
        )


def check_contiguous(name: str, x: torch.Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"Expected a contiguous {name}, got strides {x.stride()}")


def check_distinct(name: str, x: torch.Tensor) -> None:
    """No element at another's place: of what is written to both only one would be left."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach and x.numel():
            raise ValueError(
                f"Expected {name} without overlapping rows, got shape {list(x.shape)} and strides "
                f"{x.stride()}"
            )
        reach += stride * (size - 1)


def check_output(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A tensor to write rows into, any distance apart."""
    check_written(name, x)
    check_shape(name, x, shape)
    check_dtype(name, x, (dtype,))
    check_device(name, x, device)
    check_last_contiguous(name, x)
    check_distinct(name, x)


def check_written(name: str, x: torch.Tensor) -> None:
    """Autograd forbids it halfway through otherwise."""
    if x.requires_grad:
        raise ValueError(f"Expected {name} without requires_grad, as it is written to, got True")


def check_workspace(x: torch.Tensor, device: torch.device) -> None:
    """Bytes that kernels see as words of 4."""
    check_shape("workspace", x, ("bytes",))
    check_dtype("workspace", x, (torch.uint8,))
    check_device("workspace", x, device)
    check_contiguous("workspace", x)
    if x.data_ptr() % 4:
        raise ValueError(
            f"Expected workspace at an address of a multiple of 4 bytes, got {x.data_ptr():#x}"
        )


def check_aligned(name: str, x: torch.Tensor, *dims: int) -> None:
    """Address and strides in multiples of 4 bytes: kernels read fp32 scales among the bytes."""
    strides = [x.stride(dim) * x.element_size() for dim in dims]
    if any(n % 4 for n in (x.data_ptr(), *strides)):
        raise ValueError(
            f"Expected {name} at an address and with strides of multiples of 4 bytes, got "
            f"{x.data_ptr():#x} and {strides}"
        )


def check_kv_cache(
    kv_cache: torch.Tensor, dims: MlaDims, kv_scale: object, name: str = "kv_cache"
) -> None:
    """A paged cache of one of the layouts in layouts.py, for rows of `dims`. `name` is what the
    caller calls it."""
    check_dtype(name, kv_cache, (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.uint8))
    width = dims.head_dim
    if kv_cache.dtype == torch.uint8:
        if dims.kv_lora_rank % Fp8DsMlaLayout.group_size:
            raise ValueError(
                f"Expected kv_lora_rank to be a multiple of {Fp8DsMlaLayout.group_size} for "
                f"fp8_ds_mla rows, got {dims.kv_lora_rank}"
            )
        if dims.rope_dim % 2:  # rows are of words of 4 bytes
            raise ValueError(f"Expected an even rope dim for fp8_ds_mla rows, got {dims.rope_dim}")
        width = Fp8DsMlaLayout(dims).row_bytes
    check_shape(name, kv_cache, ("num_blocks", "block_size", width))
    check_choice(f"block size ({name}.shape[1])", kv_cache.shape[1], BLOCK_SIZES)
    check_last_contiguous(name, kv_cache)
    if kv_cache.dtype == torch.uint8:
        check_aligned(name, kv_cache, 0, 1)
    if kv_cache.dtype == torch.float8_e4m3fn:
        if kv_scale is None:
            raise ValueError("Expected kv_scale for a float8_e4m3fn cache, got None")
        check_fp8_scale("kv_scale", kv_scale, name, kv_cache.device)
    elif kv_scale is not None:
        raise ValueError(f"Expected kv_scale=None for a {kv_cache.dtype} cache, got {kv_scale!r}")


def check_fp8_scale(name: str, scale: object, of: str, device: torch.device) -> None:
    """The scale of fp8 codes, those of argument `of`. The value of one on a GPU is not read."""
    value = scale
    if isinstance(scale, torch.Tensor):
        check_dtype(name, scale, (torch.float32,))
        if scale.numel() != 1:
            raise ValueError(f"Expected {name} with 1 element, got {list(scale.shape)}")
        if scale.device != device:
            raise ValueError(f"Expected {name} on {device}, like {of}, got {scale.device}")
        value = scale.item() if device.type == "cpu" else 1.0
    _check_positive(name, value)


def check_contents(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    name: str = "seq_lens",
) -> None:
    """Lengths within the table and used table entries within the cache. Reads the device. `name` is
    what the caller calls the lengths."""
    lens = seq_lens.tolist()
    capacity = block_table.shape[1] * block_size
    for i, n in enumerate(lens):
        if not 0 <= n <= capacity:
            raise ValueError(
                f"Expected {name}[{i}] in 0..{capacity} ({block_table.shape[1]} blocks of "
                f"{block_size} in its block table row), got {n}"
            )
    column = torch.arange(block_table.shape[1], device=block_table.device)
    used = column[None] * block_size < seq_lens[:, None]
    bad = used & ((block_table < 0) | (block_table >= num_blocks))
    if bool(bad.any()):
        i, j = bad.nonzero()[0].tolist()
        raise ValueError(
            f"Expected block_table entries in 0..{num_blocks - 1}, got {int(block_table[i, j])} "
            f"in row {i}, column {j} ({name}[{i}] = {lens[i]})"
        )


def check_rows_near(kv_cache: torch.Tensor) -> None:
    """Kernels count the bytes from the first row of a block to the others in 32 bits."""
    _, block_size, width = kv_cache.shape
    reach = (block_size - 1) * kv_cache.stride(1) + width
    if reach * kv_cache.element_size() >= 2**31:
        raise ValueError(
            "Expected kv_cache with all rows of a block within 2^31 bytes of each other, got "
            f"strides {kv_cache.stride()}"
        )


def pages_near(kv_cache: torch.Tensor) -> bool:
    """Whether blocks start less than 2^32 bytes apart: kernels for few rows count 2-byte units from
    one to the next in 32 bits. Not how far a block is from the cache's start, which is 64."""
    return kv_cache.stride(0) * kv_cache.element_size() < 2**32


def is_for_tma(x: torch.Tensor) -> bool:
    """Contiguous, from a multiple of 16 bytes on, and so would be more of its first dimension:
    torch calls one of them contiguous wherever the next one would be, and the kernel may not depend
    on how many there are."""
    return x.is_contiguous() and x.stride(0) == x.shape[1:].numel() and x.data_ptr() % 16 == 0


def rows_aligned(kv_cache: torch.Tensor) -> bool:
    """Whether every row of a cache starts at a multiple of 16 bytes."""
    size = kv_cache.element_size()
    starts = (kv_cache.stride(0) * size, kv_cache.stride(1) * size, kv_cache.data_ptr())
    return all(start % 16 == 0 for start in starts)
