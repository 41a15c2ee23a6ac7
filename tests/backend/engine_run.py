# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine over scenarios, as a process of its own.

    python engine_run.py spec.json result.json

spec: {"engine": keywords of vllm.LLM, "scenarios": {name: [request, ...]}}, where a request is
{"prompt": token ids, "max_tokens": n}, and may have "arrive": engine step at which it is added, and
"temperature" (0), and "adapter", the folder of a LoRA adapter. The result holds, per scenario, each
request's tokens, logprobs and cached prompt tokens, the counters of the first worker before and
after, and what `watch_steps` saw (single-process engines). `ranks`: the counters of every worker at
the end. With "choices" in the spec (a sparse model in eager mode, in this process), `choices` is a
file that torch.load reads: {scenario: one tensor a request}, see choices.py. `preemptions` and
`accepted`, the share of drafts that were, if any were made: of the whole run, if the engine logs
statistics. An engine with runner "pooling" gives each request's `embedding` in place of its tokens.
With "spoil": n in the spec, steps go wrong for a request of n tokens, see spoil.py.
With "reload": {scenario: checkpoint}, the weights are loaded anew, from there, before it.
"""

import json
import sys
from pathlib import Path

import torch
from choices import by_request, watch_choices
from spoil import spoil_steps
from vllm import LLM, PoolingParams, PoolingRequestOutput, SamplingParams
from vllm.lora.request import LoRARequest


def watch_steps():
    """Note whether a request's pages were ever out of order, and query tokens a decode request."""
    from mla_backend.attention.metadata import MlaMetadataBuilder

    seen = {}
    build = MlaMetadataBuilder.build

    def watching_build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        common = common_attn_metadata
        pages = -(-common.seq_lens // self.kv_cache_spec.block_size)
        for row, count in zip(common.block_table_tensor, pages.tolist(), strict=False):
            seen["disordered"] |= bool((row[:count].diff() < 0).any())
        metadata = build(self, common_prefix_len, common, *args, **kwargs)
        if metadata.decode is not None:
            seen["query_lens"].add(int(metadata.num_decode_tokens // metadata.num_decodes))
        return metadata

    MlaMetadataBuilder.build = watching_build
    return seen


def run_scenario(llm, name, requests):
    """Step the engine by hand so that requests join while others run."""
    engine = llm.llm_engine
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].get("arrive", 0))
    done, step = {}, 0
    while waiting or engine.has_unfinished_requests():
        idle = not engine.has_unfinished_requests()
        while waiting and (idle or requests[waiting[0]].get("arrive", 0) <= step):
            idle = False
            i = waiting.pop(0)
            params = parameters(llm, requests[i])
            prompt = {"prompt_token_ids": requests[i]["prompt"]}
            adapter = requests[i].get("adapter")
            lora = LoRARequest(adapter, 1, adapter) if adapter else None
            engine.add_request(f"{name}-{i}", prompt, params, lora_request=lora)
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.rpartition("-")[2])] = output
        step += 1
    return [describe(done[i]) for i in range(len(requests))]


def parameters(llm, request):
    if llm.llm_engine.model_config.runner_type == "pooling":
        return PoolingParams(task="embed")
    return SamplingParams(
        temperature=request.get("temperature", 0),
        max_tokens=request["max_tokens"],
        logprobs=0,
        ignore_eos=True,
    )


def describe(output):
    if isinstance(output, PoolingRequestOutput):
        return {
            "prompt": list(output.prompt_token_ids),
            "tokens": [0],  # as one that was not fed back: choices are those of all of the prompt
            "cached": output.num_cached_tokens,
            "embedding": output.outputs.data.tolist(),
        }
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": tokens,
        "logprobs": [lp[t].logprob for t, lp in zip(tokens, completion.logprobs, strict=True)],
        "cached": output.num_cached_tokens,
    }


def kv_page_bytes(llm):
    """Bytes of one page of one layer, as vLLM sized it."""
    specs = llm.llm_engine.engine_core.collective_rpc("get_kv_cache_spec")[0]
    return next(iter(specs.values())).page_size_bytes


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    in_process = spec.get("in_process", True)
    seen = watch_steps() if in_process and spec.get("ours", True) else {}
    llm = LLM(worker_extension_cls="mla_backend.worker.WorkerExtension", **spec["engine"])
    config = llm.llm_engine.vllm_config
    result = {
        "block_size": config.cache_config.block_size,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "page_bytes": kv_page_bytes(llm) if in_process else None,
        "custom_ops": list(config.compilation_config.custom_ops),
        "second_runner": bool(config.use_v2_model_runner),
        "scenarios": {},
    }
    chosen = watch_choices(llm) if spec.get("choices") else None
    if spec.get("spoil"):
        spoil_steps(spec["spoil"])
    choices, known = {}, []
    for name, requests in spec["scenarios"].items():
        seen |= {"disordered": False, "query_lens": set()}
        if other := (spec.get("reload") or {}).get(name):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        before = llm.collective_rpc("mla_backend_stats")[0]
        outputs = run_scenario(llm, name, requests)
        after = llm.collective_rpc("mla_backend_stats")[0]
        if chosen is not None:
            choices[name] = by_request(chosen, outputs, name, known)
            chosen.clear()
        result["scenarios"][name] = {
            "outputs": outputs,
            "before": before,
            "after": after,
            "disordered": seen["disordered"],
            "query_lens": sorted(seen["query_lens"]),
        }
    result["ranks"] = llm.collective_rpc("mla_backend_stats")
    if chosen is not None:
        result["choices"] = str(Path(sys.argv[2]).with_suffix(".pt"))
        torch.save(choices, result["choices"])
    if llm.llm_engine.log_stats:
        counted = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
        result["preemptions"] = counted["vllm:num_preemptions"]
        if drafted := counted.get("vllm:spec_decode_num_draft_tokens"):
            result["accepted"] = counted["vllm:spec_decode_num_accepted_tokens"] / drafted
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
