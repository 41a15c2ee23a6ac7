# SPDX-License-Identifier: Apache-2.0
"""The sparse attention benchmark's cases, their data on the GPU, and what they cost at least."""

from dataclasses import dataclass

import torch
from dense_cases import LATENT, PAGE, ROPE, ROW_BYTES, SCALE, WIDTH, least_us
from gpu import DEVICE
from mla_kernels.sparse.reference import mla_sparse_attention_reference

K = 2048
GROUP = 128
RUN = 16  # neighbouring slots in a row, with order "runs"
KV_SCALES = {"fp8": 0.1}
# What padding costs: slots a token has, and how many of them name a row.
PADDINGS = {
    "": (K, K),
    "half_tail": (K, K // 2),  # a trailing -1 in half of them
    "half_scattered": (K, K // 2),  # -1 at random places
    "half_alone": (K // 2, K // 2),  # what the two above would take if -1 cost nothing
    "lengths128": (K, 128),  # by `lengths`; slots behind it name rows that nothing may read
    "128_alone": (128, 128),
}


@dataclass(frozen=True)
class Shape:
    """One case. Decode: each request has `context` cached tokens of its own and s_q new ones;
    prefill: s_q tokens of one request, `context` cached. order: of a token's slots, "random",
    "ascending", or "runs" of neighbours at random places. padding: one of PADDINGS."""

    batch: int
    heads: int
    s_q: int = 1
    context: int = 32768
    cache: str = "fp8_ds_mla"
    prefill: bool = False
    order: str = "random"
    padding: str = ""

    @property
    def name(self) -> str:
        kind = "prefill" if self.prefill else f"b{self.batch}"
        name = f"{kind}_h{self.heads}_q{self.s_q}_{self.context // 1024}k_{self.cache}"
        name = name if self.order == "random" else f"{name}_{self.order}"
        return f"{name}_{self.padding}" if self.padding else name

    @property
    def op(self) -> str:
        return "prefill" if self.prefill else "decode"

    @property
    def tokens(self) -> int:
        return self.batch * self.s_q

    @property
    def slots(self) -> int:
        """Slots of a token."""
        return PADDINGS[self.padding][0]

    @property
    def rows(self) -> int:
        """Rows that a token's slots name."""
        return PADDINGS[self.padding][1]

    @property
    def flops(self) -> int:
        """Two matrix products over the rows of every token, for each head."""
        return 2 * self.tokens * self.heads * self.rows * (WIDTH + LATENT)

    @property
    def bytes(self) -> int:
        """The rows that are read, slots, q and out. A row that several new tokens of a request name
        counts once: they choose at random, so each leaves out the same share of those before it."""
        unread = (1 - self.rows / self.context) ** self.s_q
        rows = round(self.batch * self.context * (1 - unread))
        per_token = 4 * self.slots + 2 * self.heads * (WIDTH + LATENT)
        return rows * ROW_BYTES[self.cache] + self.tokens * per_token

    def floor_us(self, roofs: dict[str, float]) -> float:
        return least_us(self.flops, self.bytes, roofs)


SHAPES = [
    *(Shape(b, 128) for b in (1, 8, 32, 64, 128, 256)),
    Shape(128, 128, s_q=2),
    Shape(128, 128, context=8192),
    Shape(1, 128, context=2**20),
    Shape(128, 64),
    *(Shape(b, h) for h in (32, 16, 8) for b in (1, 32, 128)),
    Shape(128, 16, s_q=2),
    *(Shape(b, h, cache="bf16") for h in (128, 16) for b in (1, 32, 128)),
    # Those that leave SMs without work, or without as much as others.
    *(Shape(b, 128, cache=cache) for cache in ("fp8_ds_mla", "bf16") for b in (40, 72, 96, 144)),
    *(Shape(288, 16, cache=cache) for cache in ("fp8_ds_mla", "bf16")),
    *(Shape(b, h, cache="fp8") for b, h in ((128, 128), (128, 16), (32, 16), (1, 16))),
    *(Shape(128, h, order=order) for h in (128, 16) for order in ("ascending", "runs")),
    *(
        Shape(128, h, cache=cache, padding=padding)
        for h, cache in ((128, "fp8_ds_mla"), (16, "fp8_ds_mla"), (128, "bf16"))
        for padding in PADDINGS
        if padding
    ),
    *(Shape(1, h, 4096, n, "bf16", True) for h, n in ((128, 8192), (128, 32768), (16, 32768))),
]


@dataclass
class Batch:
    """A shape's tensors: q [T, H, 576], kv_cache [blocks, 64, row], slots [T, slots] int32.
    lengths: [T] int32, where they and not -1 end a row. kv_scale: of an fp8 cache."""

    shape: Shape
    q: torch.Tensor
    kv_cache: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor | None = None

    @property
    def kv_scale(self) -> float | None:
        return KV_SCALES.get(self.shape.cache)


def make_batch(shape: Shape, seed: int = 0) -> Batch:
    """q ~ N(0, 1/9), cache ~ N(0, 1/100), no slot of a token twice.

    The group scales of fp8_ds_mla are powers of two: FlashMLA rounds them to bf16.
    """
    torch.manual_seed(seed)
    own = shape.context if shape.prefill else -(-shape.context // PAGE) * PAGE
    requests = 1 if shape.prefill else shape.batch
    rows = requests * own
    if shape.cache == "bf16":
        cache = torch.randn(rows, WIDTH, dtype=torch.bfloat16, device=DEVICE).div_(10)
    elif shape.cache == "fp8":
        cache = torch.empty(rows, WIDTH, dtype=torch.float8_e4m3fn, device=DEVICE)
        for part in cache.split(2**20):
            part.copy_(torch.randn(len(part), WIDTH, device=DEVICE))
    else:
        cache = torch.empty(rows, ROW_BYTES[shape.cache], dtype=torch.uint8, device=DEVICE)
        for part in cache.split(2**20):
            codes = torch.randn(len(part), LATENT, device=DEVICE).to(torch.float8_e4m3fn)
            part[:, :LATENT] = codes.view(torch.uint8)
            exponents = torch.randint(-4, -2, (len(part), LATENT // GROUP), device=DEVICE)
            part[:, LATENT : LATENT + 16] = torch.exp2(exponents.float()).view(torch.uint8)
            rope = torch.randn(len(part), ROPE, dtype=torch.bfloat16, device=DEVICE).div_(10)
            part[:, LATENT + 16 :] = rope.view(torch.uint8)
    slots = torch.empty(shape.tokens, shape.slots, dtype=torch.int32, device=DEVICE)
    for t in range(shape.tokens):
        first = 0 if shape.prefill else t // shape.s_q * own
        slots[t] = padded(choose_slots(shape) + first, shape)
    lengths = None
    if shape.padding == "lengths128":
        lengths = torch.full((shape.tokens,), shape.rows, dtype=torch.int32, device=DEVICE)
    q = torch.randn(shape.tokens, shape.heads, WIDTH, device=DEVICE).div_(3).bfloat16()
    return Batch(shape, q, cache.view(-1, PAGE, cache.shape[1]), slots, lengths)


def choose_slots(shape: Shape) -> torch.Tensor:
    """[K]: places in the context of a request."""
    if shape.order == "runs":
        starts = torch.randperm(shape.context // RUN, device=DEVICE)[: K // RUN] * RUN
        return (starts[:, None] + torch.arange(RUN, device=DEVICE)).flatten()
    places = torch.randperm(shape.context, device=DEVICE)[:K]
    return places.sort().values if shape.order == "ascending" else places


def padded(slots: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A token's K slots as the case's padding leaves them."""
    if shape.padding == "half_tail":
        slots[shape.rows :] = -1
    elif shape.padding == "half_scattered":
        slots[torch.randperm(K, device=DEVICE)[shape.rows :]] = -1
    return slots[: shape.slots]


def golden(batch: Batch, tokens: list[int]) -> torch.Tensor:
    """The definition in fp64, of some tokens."""
    out, _ = mla_sparse_attention_reference(
        batch.q[tokens],
        batch.kv_cache,
        batch.slots[tokens],
        scale=SCALE,
        kv_lora_rank=LATENT,
        kv_scale=batch.kv_scale,
        lengths=None if batch.lengths is None else batch.lengths[tokens],
        sink=None,
    )
    return out
