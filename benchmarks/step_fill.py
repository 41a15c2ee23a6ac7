# SPDX-License-Identifier: Apache-2.0
"""What vLLM's DecodeBenchConnector lacks: random contents for caches of bytes, and requests that
are prefilled."""

from typing import Any

import torch

PAGE = 64
CODES = {132: 128, 576: 576, 656: 512}  # of a token: indexer keys, fp8 rows, fp8_ds_mla rows
SCALE = 2.0**-6
PREFILLED = "prefilled-"  # begins the name of a request whose cache the model writes


def random_codes(*shape: int, device: torch.device) -> torch.Tensor:
    """e4m3 of both signs, below 2 in size."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device) & 0xBF


def random_pages(count: int, width: int, device: torch.device) -> torch.Tensor:
    """[count, 64, width] bytes: indexer pages (width 132), rows of fp8 alone (576) or fp8_ds_mla
    rows (656)."""
    if width not in CODES:
        raise ValueError(f"Expected a cache of {sorted(CODES)} bytes a token, got {width}")
    codes = random_codes(count, PAGE, CODES[width], device=device)
    if width == 576:
        return codes
    if width == 132:  # the scales of a page stand after all its codes
        scales = torch.full((count, PAGE), SCALE, device=device)
        page = torch.cat([codes.flatten(1), scales.view(torch.uint8)], 1)
        return page.view(count, PAGE, width)
    scales = torch.full((count, PAGE, 4), SCALE, device=device)
    rope = (torch.randn(count, PAGE, 64, device=device) / 10).bfloat16()
    return torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)], -1)


def fill_bytes_too() -> None:
    """Let the connector fill caches of bytes."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as module

    worker: Any = module.DecodeBenchConnectorWorker
    stock = worker._fill_block_tensor

    def fill(self: Any, kv_cache: torch.Tensor, block_ids: list[int], *more: Any) -> None:
        if kv_cache.dtype != torch.uint8:
            stock(self, kv_cache, block_ids, *more)
            return
        blocks = [block for block in block_ids if block < len(kv_cache)]
        pages = random_pages(len(blocks), kv_cache.shape[-1], kv_cache.device)
        pages = pages.view(len(blocks), *kv_cache.shape[1:])
        kv_cache[torch.tensor(blocks, device=kv_cache.device)] = pages

    worker._fill_block_tensor = fill


def leave_prefilled() -> None:
    """Let the connector leave the requests named PREFILLED alone."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as module

    scheduler: Any = module.DecodeBenchConnectorScheduler
    stock = scheduler.get_num_new_matched_tokens

    def matched(self: Any, request: Any, *more: Any) -> tuple[int, bool]:
        if request.request_id.startswith(PREFILLED):
            return 0, False
        tokens: tuple[int, bool] = stock(self, request, *more)
        return tokens

    scheduler.get_num_new_matched_tokens = matched
