# SPDX-License-Identifier: Apache-2.0
"""What the indexers of a running engine choose: recorded in its process, a tensor a request.

Of vLLM's own sparse backends too. All layers write to one buffer, so it is read after every call of
an indexer; a replayed CUDA graph makes no calls, so the engine must be in eager mode.
"""

import inspect
import re

import numpy as np
import torch


def watch_choices(llm):
    """{request id: {layer: [(positions [n], chosen positions [n, index_topk] int16), ...]}}, filled
    as the engine runs. -1 is no token. llm: in this process, in eager mode.

    The buffer holds positions in the request: vLLM's backends turn them into slots of the cache
    behind the indexer, in another tensor (`triton_convert_req_index_to_global_index`).
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.models.deepseek_v2 import Indexer

    from mla_backend.attention.sparse.metadata import SparseMetadata

    core = llm.llm_engine.engine_core.engine_core
    runner, chosen = core.model_executor.driver_worker.worker.model_runner, {}
    for part in ("input_batch", "query_start_loc"):
        if not hasattr(runner, part):
            raise RuntimeError(f"{type(runner)} has no {part}, which says whose a step's rows are")
    models = [runner.get_model()]
    if hasattr(runner, "drafter"):
        models.append(runner.drafter.model)
    indexers = [m for model in models for m in model.modules() if isinstance(m, Indexer)]
    if not indexers:
        raise RuntimeError(f"no {Indexer} in {type(models[0])}: choices cannot be recorded here")

    def note(indexer, args, kwargs, _):
        steps = get_forward_context().attn_metadata
        if not isinstance(steps, dict):  # a dummy step
            return
        arguments = inspect.signature(indexer.forward).bind(*args, **kwargs).arguments
        positions = arguments["positions"].to("cpu", copy=True)  # of a buffer that is used again
        counts = rows_of_requests(runner, len(positions))
        buffer = indexer.topk_indices_buffer[: len(positions)].to(torch.int16).cpu()
        step = steps.get(indexer.k_cache.prefix.replace("indexer.k_cache", "attn"))
        prefill = getattr(step, "prefill", None)
        # Those rows read all that they see. Ours has no other prompts; 0.26 does not say of which.
        ours = isinstance(step, SparseMetadata) and prefill is not None
        if ours or getattr(prefill, "use_dense_mha", False):
            every, last = torch.arange(buffer.shape[1]), step.num_decode_tokens
            seen = every <= positions[last:, None]
            buffer[last:] = torch.where(seen, every, -1).to(torch.int16)
        layer = int(indexer.k_cache.prefix.split(".")[2])
        rows = zip(positions.split(counts), buffer.split(counts), strict=True)
        for name, of_request in zip(runner.input_batch.req_ids, rows, strict=True):
            chosen.setdefault(name, {}).setdefault(layer, []).append(of_request)

    for indexer in indexers:
        indexer.register_forward_hook(note, with_kwargs=True)
    return chosen


def rows_of_requests(runner, T):
    """How many of a step's T rows each request of the batch has, in its order."""
    requests = runner.input_batch.num_reqs
    counts = np.diff(runner.query_start_loc.np[: requests + 1]).tolist()
    if sum(counts) == T:
        return counts
    if T != requests:  # drafts after the first are one row a request
        raise RuntimeError(f"an indexer was given {T} rows in a step of {counts}: padded?")
    return [1] * requests


def by_request(chosen, outputs, name, known):
    """`chosen` in a scenario: [layers, tokens - 1, index_topk] int16 for each of its outputs.

    The last token is not fed back, so nothing is chosen for it. Tokens of a refused draft were
    overwritten by those that took their place. Rows of a cached prefix are in `known`, which holds
    (tokens, rows) of the requests before, and takes up those of this scenario.
    """
    if not chosen:
        raise RuntimeError("no indexer was called as a module: another vLLM, or compiled?")
    found = []
    for i, output in enumerate(outputs):
        tokens = output["prompt"] + output["tokens"]
        (request,) = (r for r in chosen if re.fullmatch(rf"{name}-{i}(-\w+)?", r))
        layers = [chosen[request][layer] for layer in sorted(chosen[request])]
        shape = len(layers), len(tokens) - 1, layers[0][0][1].shape[1]
        rows, cached = torch.full(shape, -1, dtype=torch.int16), output["cached"]
        if cached:
            before = next(r for t, r in known if t[:cached] == tokens[:cached])
            rows[:, :cached] = before[:, :cached]
        for of_layer, calls in zip(rows, layers, strict=True):
            for positions, buffer in calls:
                fed = positions < len(of_layer)
                of_layer[positions[fed]] = buffer[fed]
        known.append((tokens, rows))
        found.append(rows)
    return found
