# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own that times decode steps on demand.

    python benchmarks/step_worker.py '{"engine": {"attention_backend": "CUSTOM", ...}}'

Imports vLLM and says so, then reads one line of JSON at a time and answers with one:

    {"do": "build"}                                 the engine, in this process
    {"do": "say"}                                   its answers to the prompts of serve_gate.py
    {"do": "start", "batch": 8, "context": 4096}    requests of so many tokens
    {"do": "time", "steps": 100, "seconds": 0.5}    their steps, at most so many or so long
    {"do": "profile"}                               what the GPU does in them
    {"do": "stop"}

What vLLM prints goes to stderr. vLLM's DecodeBenchConnector fills the cache blocks of a new request
(each request has its own blocks) with random values instead of a prefill, so every step that is
timed decodes one token of each request. The prompts of the gate are prefilled.
"""

import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from serve_gate import LIKELY, TOKENS, Answer, prompts
from step_fill import PREFILLED, fill_bytes_too, leave_prefilled
from telling import TELLING, register_weights

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

# Kernels that are attention over the cache; each backend's plan and merge included.
ATTENTION = re.compile(
    r"mla_decode_kernel|hopper_(decode|fp8|fp8_query)_kernel|few_(rows|heads)|many_rows|merge_kernel|plan_kernel|"
    r"flash_fwd|FlashAttn|prepare_varlen|get_mla_metadata|_fwd_grouped_kernel|_fwd_kernel_stage|"
    # DeepSeek-V3.2: of both, the indexer too.
    r"sparse|token_rows|scores_kernel|mqa_logits|topk|select_kernel|group_max|clear_state|smxx|combine|"
    r"positions_to_slots|convert_req_index|indexer",
    re.IGNORECASE,
)
# Kernels of experts and of sampling, whose names have some of these words.
OTHERS = re.compile(r"moe|topk_topp|topk_log_softmax|combine_sampled", re.IGNORECASE)
WARM_STEPS = 3
PROFILED_STEPS = 6
FILL = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.1},
}
Row = dict[str, Any]


def make_engine(options: Row) -> Any:
    """vLLM with our plugin registered, whether or not it is installed."""
    from vllm import LLM

    from mla_backend.plugin import register

    register()
    register_weights(deep=True)
    fill_bytes_too()
    leave_prefilled()
    return LLM(
        skip_tokenizer_init=True,
        load_format=TELLING,
        enable_prefix_caching=False,
        kv_transfer_config=FILL,
        **options,
    )


def answers(engine: Any) -> list[Answer]:
    """Greedy answers to the prompts of the gate, as serve_gate.ask returns them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=LIKELY,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    names = [f"{PREFILLED}{i}" for i in range(len(prompts()))]
    for name, prompt in zip(names, prompts(), strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    found: dict[str, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.num_cached_tokens:
                raise RuntimeError(f"{output.num_cached_tokens} tokens of a prompt were filled in")
            (said,) = output.outputs
            found[output.request_id] = [
                {str(token): top[token].logprob} | {str(t): one.logprob for t, one in top.items()}
                for token, top in zip(said.token_ids, said.logprobs, strict=True)
            ]
    return [found[name] for name in names]


class Steps:
    """Decode steps of a fixed set of requests."""

    def __init__(self, llm: Any, batch: int, context: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.engine = llm.llm_engine
        self.batch = batch
        room = self.engine.vllm_config.model_config.max_model_len - context
        params = SamplingParams(
            temperature=0,
            max_tokens=room,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.ids = [f"b{batch}-c{context}-{i}" for i in range(batch)]
        prompt = [5 + i % 1000 for i in range(context)]
        for name in self.ids:
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def run(self, count: int) -> list[float]:
        """Seconds between the ends of `count` steps in which every request got a token."""
        ends: list[float] = []
        while len(ends) <= count:
            outputs = self.engine.step()
            if len(outputs) == self.batch:
                ends.append(time.perf_counter())
            elif ends and outputs:
                raise RuntimeError(f"a step with {len(outputs)} of {self.batch} requests")
        return [after - before for before, after in itertools.pairwise(ends)]

    def stop(self) -> None:
        self.engine.abort_request(self.ids)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def time_steps(steps: Steps, count: int, seconds: float) -> Row:
    """Milliseconds of up to `count` steps: as many as fit into `seconds`, no fewer than 6."""
    warm = steps.run(WARM_STEPS)
    count = max(6, min(count, int(seconds / statistics.median(warm))))
    return {"ms": [1e3 * step for step in steps.run(count)]}


def profile(steps: Steps) -> Row:
    """Milliseconds in which the GPU works in a step, and in which attention alone keeps it busy;
    {} without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        steps.run(PROFILED_STEPS)
        synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    # `run` needs one step more than the intervals that it returns.
    return kernel_times(kernels, PROFILED_STEPS + 1)


def kernel_times(kernels: list[tuple[str, float, float]], steps: int) -> Row:
    """Of (name, start, end in microseconds) of the kernels of `steps` steps.

    Kernels overlap where one is launched before the one that it waits for has ended, so durations
    do not add up: attention is the busy time that the other kernels leave.
    """
    if not kernels:
        return {}
    busy = covered([(start, end) for _, start, end in kernels])
    others = covered([(start, end) for name, start, end in kernels if not is_attention(name)])
    times: dict[str, float] = {}
    for name, start, end in kernels:
        times[name] = times.get(name, 0.0) + end - start
    top = sorted(times.items(), key=lambda item: -item[1])[:10]
    return {
        "gpu_ms": busy / steps / 1e3,
        "attention_ms": (busy - others) / steps / 1e3,
        "attention_share": (busy - others) / busy,
        "top_kernels_us": {name[:80]: round(us / steps, 2) for name, us in top},
    }


def is_attention(kernel: str) -> bool:
    return bool(ATTENTION.search(kernel)) and not OTHERS.search(kernel)


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_gib() -> float | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_reserved() / 2**30


class Worker:
    """Answers the commands."""

    def __init__(self, options: Row) -> None:
        self.options = options
        self.llm: Any = None
        self.steps: Steps | None = None

    def answer(self, command: Row) -> Row:
        """With nothing left on the GPU: an asynchronous engine's last step would still be running
        when the next engine's turn begins."""
        try:
            return self._do(command)
        finally:
            synchronize()

    def _do(self, command: Row) -> Row:
        if command["do"] == "build":
            self.llm = make_engine(self.options)
            return {"blocks": self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}
        if command["do"] == "say":
            return {"answers": answers(self.llm.llm_engine)}
        if command["do"] == "start":
            self.steps = Steps(self.llm, command["batch"], command["context"])
            self.steps.run(WARM_STEPS)
            return {}
        assert self.steps is not None, "no requests were started"
        if command["do"] == "time":
            return time_steps(self.steps, command["steps"], command["seconds"])
        if command["do"] == "profile":
            return profile(self.steps) | {"memory_gib": memory_gib()}
        self.steps.stop()
        self.steps = None
        return {}


def serve(make_worker: Callable[[Row], Any]) -> None:
    """Answer the commands on stdin, one line each, until it ends."""
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout

    def say(row: Row) -> None:
        print(json.dumps(row), file=answers, flush=True)

    import vllm.v1.engine.llm_engine  # noqa: F401, before anything is timed

    worker = make_worker(spec["engine"])
    say({"imported": True})
    for line in sys.stdin:
        try:
            say(worker.answer(json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    serve(Worker)
