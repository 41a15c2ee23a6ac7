# SPDX-License-Identifier: Apache-2.0
"""The engines that the GPU tests start: keywords of vllm.LLM, environment and scenarios of each."""

import random

import torch
from checkpoint import LONG

from mla_backend import compat

VLLM = compat.parse_version(compat.installed_vllm_version() or "")
# Since then the second model runner is the default, and V3.2's indexer is a function.
SECOND_RUNNER = FUSED_INDEXER = VLLM is not None and VLLM >= (0, 29)
# With drafts a block's hash covers the token behind it, on which its draft layer's rows depend.
HASHED_LOOKAHEAD = VLLM is not None and VLLM >= (0, 33)
VOCAB = 2048
DRAFTS = 3
END = "end"  # how the scenarios of `with_ends` begin
DRAWINGS = 4  # of random tokens, see wide_scenarios
# Stock backends of vLLM that run on sm_90.
STOCK = ("FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")

GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
}
# Prompts above 512 tokens are prefilled in chunks. Engines share the GPU: each has a small cache.
ENGINE = {
    "attention_backend": "CUSTOM",
    "dtype": "bfloat16",
    "block_size": 64,
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 2**30,
    "compilation_config": GRAPHS,
    "seed": 0,
}
EAGER = {"enforce_eager": True, "compilation_config": {}}
# As without --block-size: vLLM asks the backend.
ANY_BLOCK_SIZE = {"block_size": None}
COMPILED = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}}
# Graphs that end where attention begins as they are captured, for which nothing is compiled: vLLM's
# own choice for some models, from 0.29 on with V3.2 among them, in a file of its own.
BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
BREAKABLE_GRAPHS = GRAPHS | {"cudagraph_mode": "FULL_AND_PIECEWISE"}
ASKS_FOR_BREAKABLE = not SECOND_RUNNER
# Graphs of what lies between attention layers, for decode steps too; vLLM's own choice, COMPILED,
# has these for mixed steps only.
PIECEWISE = {"compilation_config": COMPILED["compilation_config"] | {"cudagraph_mode": "PIECEWISE"}}
# What an engine must be for choices.py: in one process, with the model runner that it knows.
RECORDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS}}
# vLLM chooses the draft layer's backend by itself, unless it is named.
OUR_MTP = {"speculative_config": MTP["speculative_config"] | {"attention_backend": "CUSTOM"}}
# With drafts, 1 + DRAFTS tokens a request: whole batches of 1 to 32 requests.
MTP_GRAPHS = GRAPHS | {"cudagraph_capture_sizes": [4, 8, 16, 32, 64, 128]}
# A draft model of its own, which is the model itself: conftest.py names it. The second model runner
# of most releases takes none.
DRAFT_MODEL = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
LONG_ENGINE = {"max_model_len": LONG + 64, "max_num_batched_tokens": 32768}
# Of 128 heads: a token's activations are eight times as large.
LONG_SPARSE_ENGINE = LONG_ENGINE | {"max_num_batched_tokens": 8192}
# Ways to share two GPUs, and what they are compared with. NVLink multicast, which not every host
# allows its guests, is left alone.
RANKS = {
    "tp 2": {"tensor_parallel_size": 2},
    "dcp 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}
# The ranks take turns with two tokens each, not with one.
PAIRS = {"cp_kv_cache_interleave_size": 2}
RANKS_STOCK = PROFILES_STOCK = "FLASH_ATTN_MLA"
# Heads of one of four and of sixteen tensor-parallel ranks of DeepSeek-V3.
FEWER_HEADS, FEWER_STOCK = (32, 8), "FLASH_ATTN_MLA"
SPARSE_STOCK = "FLASHMLA_SPARSE"
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}


def tokens(rng, count):
    return [0, *(rng.randrange(3, VOCAB) for _ in range(count - 1))]


def parity_scenarios(longest=2500, seed=0):
    """plain: prompts around page boundaries and longer than a prefill chunk, together.
    prefix: prompts that repeat the first 1024 tokens of one in `plain`."""
    rng = random.Random(seed)
    lengths = (1, 2, 63, 64, 65, 127, 300, 511, 600, 1023, 1500, longest)
    plain = [{"prompt": tokens(rng, n), "max_tokens": 96} for n in lengths]
    shared = plain[-1]["prompt"][:1024]
    prefix = [{"prompt": shared + tokens(rng, n), "max_tokens": 96} for n in (1, 70, 700, 63)]
    return {"plain": plain, "prefix": prefix}


def wide_scenarios(longest=2500):
    """parity_scenarios, and `more`: the same with other random tokens, for the distances alone. Of
    16 requests the 99th percentile, the 15th largest, moves by 3 to 7 % as they are drawn anew, of
    four times as many by half. Last, so that what the other scenarios count and find cached is as
    without it."""
    first, *others = (parity_scenarios(longest, seed) for seed in range(DRAWINGS))
    requests = [r for drawing in others for part in drawing.values() for r in part]
    # The only prompt of one token is [0], which `plain` has.
    return first | {"more": [r for r in requests if len(r["prompt"]) > 1]}


def with_ends(scenarios):
    """And prompts of which all but 2 to 32 tokens are cached, each alone in its step: few enough
    for a graph, with padding where none has as many."""
    rng, shared = random.Random(4), scenarios["prefix"][0]["prompt"][:1024]
    alone = ({"prompt": shared + tokens(rng, n), "max_tokens": 32} for n in (2, 3, 7, 17, 31, 32))
    return scenarios | {f"{END} of {len(r['prompt']) - 1024}": [r] for r in alone}


def sparse_scenarios():
    """Of parity_scenarios, the requests that see more tokens than the model "v3.2" reads."""
    return {
        name: [r | {"max_tokens": 192} for r in requests if len(r["prompt"]) > 500]
        for name, requests in parity_scenarios().items()
    }


def churn():
    """Requests of mixed lengths that join and leave. Every other one is there from the start, so
    that they crowd however many steps the engine is ahead of who adds the rest."""
    rng = random.Random(1)
    return [
        {
            "prompt": tokens(rng, rng.choice((1, 30, 65, 400, 900))),
            "max_tokens": rng.randrange(16, 200),
            "arrive": rng.randrange(0, 60) * (i % 2),
        }
        for i in range(24)
    ]


def alone_and_together():
    """The first request by itself, then among others."""
    requests = parity_scenarios()["plain"]
    return {"alone": [requests[7]], "together": [requests[7], *requests]}


def long_prompt():
    return {"long": [{"prompt": tokens(random.Random(2), LONG), "max_tokens": 24}]}


def long_prompts():
    """And three that end otherwise."""
    first, rng = long_prompt(), random.Random(3)
    shared = first["long"][0]["prompt"][:-1000]
    return first | {
        "ends": [{"prompt": shared + tokens(rng, 900), "max_tokens": 24} for _ in range(3)]
    }


def add_other_runner(add, short, crowd):
    """Engines whose steps the model runner prepares that this vLLM does not take by itself."""
    env = {"VLLM_USE_V2_MODEL_RUNNER": "0" if SECOND_RUNNER else "1"}
    checked = env | {"MLA_BACKEND_CHECK": "1"}
    mtp = MTP | {"compilation_config": MTP_GRAPHS}
    add("other runner", env=env)
    add("other runner compiled", env=env, **COMPILED)
    add("other runner mtp", env=checked, **mtp)
    add("other runner small cache", env=checked, num_gpu_blocks_override=40, **crowd)
    add("CUSTOM v3.2 all other runner mtp", "v3.2 all", env, short, **mtp)
    add("CUSTOM v3.2 other runner small cache", "v3.2 all", checked, num_gpu_blocks_override=40,
        **crowd)  # fmt: skip
    asleep = {"before": short["plain"], "after": short["plain"]}
    add("other runner sleep", env=env, scenarios=asleep, enable_sleep_mode=True,
        enable_prefix_caching=False)  # fmt: skip
    if torch.cuda.device_count() > 1:
        dcp = RANKS["dcp 2"] | {"disable_custom_all_reduce": True}
        add("CUSTOM dcp 2 other runner", 128, env | NO_MULTICAST, **dcp)
        add("CUSTOM dcp 2 other runner mtp", 128, checked | NO_MULTICAST,
            compilation_config=MTP_GRAPHS, **OUR_MTP, **dcp)  # fmt: skip
        add("CUSTOM v3.2 all dcp 2 other runner mtp", "v3.2 all", checked | NO_MULTICAST, short,
            compilation_config=MTP_GRAPHS, **OUR_MTP, **dcp)  # fmt: skip


def add_draft_models(add):
    """With DRAFTS tokens, whole batches of which the draft's first step has one more each; and with
    twice as many, where ends of prompts are not absorbed, too."""
    add("CUSTOM v2", "v2")
    for name, backend, count, env in (
        ("draft model", "CUSTOM", DRAFTS, {"MLA_BACKEND_CHECK": "1"}),
        ("draft model 6", "CUSTOM", 2 * DRAFTS, {"MLA_BACKEND_EXTEND_TOKENS": "0"}),
        ("FLASH_ATTN_MLA draft model", "FLASH_ATTN_MLA", DRAFTS, {}),
    ):
        drafts = {
            "method": "draft_model",
            "num_speculative_tokens": count,
            "attention_backend": backend,
        }
        sizes = [requests * (1 + count) for requests in (1, 2, 4, 8, 16, 32)]
        graphs = GRAPHS | {"cudagraph_capture_sizes": sizes}
        add(name, "v2", DRAFT_MODEL | env, compilation_config=graphs, speculative_config=drafts,
            attention_backend=backend, disable_log_stats=False)  # fmt: skip


def all_engines():
    """{name: (heads, keywords of vllm.LLM, environment, scenarios)}"""
    parity = parity_scenarios()
    engines = {}

    def add(name, heads=16, env=None, scenarios=parity, **engine):
        engines[name] = (heads, {**ENGINE, **engine}, env or {}, scenarios)

    for heads in (16, 128):
        for backend in ("CUSTOM", *STOCK):
            add(f"{backend} {heads}", heads, attention_backend=backend)
    for heads in FEWER_HEADS:
        for backend in ("CUSTOM", FEWER_STOCK):
            add(f"{backend} {heads}", heads, attention_backend=backend)
    wide = wide_scenarios()
    for backend in ("CUSTOM", PROFILES_STOCK):
        add(f"{backend} experts", "experts", scenarios=wide, attention_backend=backend)
    for backend in ("CUSTOM", "FLASHMLA", "TRITON_MLA"):
        add(f"{backend} fp8", scenarios=wide, attention_backend=backend, kv_cache_dtype="fp8")
    add("CUSTOM fp8_ds_mla", scenarios=wide, kv_cache_dtype="fp8_ds_mla")
    add("CUSTOM fp8_ds_mla 128", 128, scenarios=wide, kv_cache_dtype="fp8_ds_mla")
    fp8_query = {"env": {"MLA_BACKEND_FP8_QUERY": "1"}, "scenarios": wide, "kv_cache_dtype": "fp8"}
    add("CUSTOM fp8 query", **fp8_query)
    add("CUSTOM fp8 query 128", 128, **fp8_query)
    add("FLASHMLA fp8 128", 128, scenarios=wide, attention_backend="FLASHMLA", kv_cache_dtype="fp8")
    add("CUSTOM fp8 query mtp", **fp8_query, compilation_config=MTP_GRAPHS, **MTP)
    add("CUSTOM fp8 query compiled", **fp8_query, **COMPILED)
    for backend in ("CUSTOM", "FLASHMLA_SPARSE"):
        add(f"{backend} v3.2", "v3.2", attention_backend=backend)
        if not FUSED_INDEXER:
            add(f"{backend} v3.2 choices", "v3.2", RECORDED, sparse_scenarios(),
                attention_backend=backend, **EAGER)  # fmt: skip
    add("CUSTOM v3.2 eager", "v3.2", **EAGER, **ANY_BLOCK_SIZE)
    add("CUSTOM v3.2 compiled", "v3.2", **COMPILED)
    add("CUSTOM v3.2 fp8_ds_mla", "v3.2", kv_cache_dtype="fp8_ds_mla")
    add("CUSTOM v3.2 exact indexer", "v3.2", {"MLA_BACKEND_FP8_INDEXER": "0"})
    mtp = {"compilation_config": MTP_GRAPHS, **OUR_MTP}
    add("CUSTOM v3.2 mtp", "v3.2", **mtp)
    short = wide_scenarios(1900)  # all of whose tokens "v3.2 all" and "v3.2 few" read
    for backend in ("CUSTOM", "FLASHMLA_SPARSE"):
        add(f"{backend} v3.2 all", "v3.2 all", scenarios=short, attention_backend=backend)
        add(f"{backend} v3.2 few", "v3.2 few", scenarios=short, attention_backend=backend,
            kv_cache_dtype="fp8_ds_mla")  # fmt: skip
    add("FLASH_ATTN_MLA_SPARSE v3.2 all", "v3.2 all", scenarios=short,
        attention_backend="FLASH_ATTN_MLA_SPARSE")  # fmt: skip
    padded = {"MLA_BACKEND_IMPL": "hopper", "MLA_BACKEND_CHECK": "1"}
    add("CUSTOM v3.2 few hopper", "v3.2 few", padded, short, kv_cache_dtype="fp8_ds_mla")
    add("CUSTOM v3.2 all mtp", "v3.2 all", scenarios=short, **mtp)
    absorbed = {"MLA_BACKEND_EXPAND_PROMPTS": "0"}
    for more, options in (("", {}), (" mtp", mtp)):
        add(f"CUSTOM v3.2 all absorbed{more}", "v3.2 all", absorbed, short, **options)
    for kernel, env in (("", {}), (" hopper", padded)):
        add(f"CUSTOM v3.2 few{kernel} absorbed", "v3.2 few", env | absorbed, short,
            kv_cache_dtype="fp8_ds_mla")  # fmt: skip
    add("eager", **EAGER, **ANY_BLOCK_SIZE)
    add("compiled", scenarios=with_ends(parity), **COMPILED)
    add("piecewise", **PIECEWISE)
    add("portable kernel", env={"MLA_BACKEND_IMPL": "triton"})
    add("mtp", compilation_config=MTP_GRAPHS, **MTP)
    add("our mtp", **mtp)
    add("FLASHMLA mtp", attention_backend="FLASHMLA", compilation_config=MTP_GRAPHS, **MTP)
    add_draft_models(add)
    checked = {"MLA_BACKEND_CHECK": "1"}
    add("mtp 128", 128, checked, compilation_config=MTP_GRAPHS, **MTP)
    crowd = {"scenarios": {"churn": churn()}, "max_model_len": 1152, "disable_log_stats": False}
    add("roomy cache", **crowd)
    add("small cache", env=checked, num_gpu_blocks_override=40, **crowd)
    add("CUSTOM v3.2 roomy cache", "v3.2 all", **crowd)
    add("CUSTOM v3.2 small cache", "v3.2 all", checked, num_gpu_blocks_override=40, **crowd)
    add_other_runner(add, short, crowd)
    if ASKS_FOR_BREAKABLE:
        other = BREAKABLE | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        for name, env in (("breakable", BREAKABLE), ("other runner breakable", other)):
            add(name, env=env, scenarios=with_ends(parity), compilation_config=BREAKABLE_GRAPHS)
            add(f"CUSTOM v3.2 all {name}", "v3.2 all", env, with_ends(short),
                compilation_config=BREAKABLE_GRAPHS)  # fmt: skip
    for name, heads in (("batch-invariant", 16), ("CUSTOM v3.2 batch-invariant", "v3.2")):
        add(
            name,
            heads,
            env={"VLLM_BATCH_INVARIANT": "1"},
            scenarios=alone_and_together(),
            max_num_batched_tokens=16384,  # no prompt is cut: a cut is another order of additions
            enable_prefix_caching=False,
        )
    asleep = {"before": parity["plain"], "after": parity["plain"]}
    for name, env in (("sleep", {}), ("sleep without weights", {"SLEEP_LEVEL": "2"})):
        add(name, env=env, scenarios=asleep, enable_sleep_mode=True, enable_prefix_caching=False)
    add("sleep, portable kernel", env={"MLA_BACKEND_IMPL": "triton"}, scenarios=asleep,
        enable_sleep_mode=True, enable_prefix_caching=False)  # fmt: skip
    asleep = {"before": short["plain"], "after": short["plain"]}
    add("CUSTOM v3.2 sleep", "v3.2 all", scenarios=asleep, enable_sleep_mode=True,
        enable_prefix_caching=False)  # fmt: skip
    for backend in ("CUSTOM", "FLASHMLA"):
        add(f"{backend} long", "long", scenarios=long_prompt(), attention_backend=backend,
            **LONG_ENGINE)  # fmt: skip
    for backend in ("CUSTOM", SPARSE_STOCK):
        add(f"{backend} v3.2 long", "v3.2 long", scenarios=long_prompts(),
            attention_backend=backend, **LONG_SPARSE_ENGINE)  # fmt: skip
    if torch.cuda.device_count() > 1:
        for name, ranks in RANKS.items():
            ranks = ranks | {"disable_custom_all_reduce": True}
            for backend in ("CUSTOM", RANKS_STOCK):
                add(f"{backend} {name}", 128, NO_MULTICAST, attention_backend=backend, **ranks)
        for backend in ("CUSTOM", SPARSE_STOCK):
            add(f"{backend} v3.2 all tp 2", "v3.2 all", NO_MULTICAST, short,
                attention_backend=backend, disable_custom_all_reduce=True,
                **RANKS["tp 2"])  # fmt: skip
        # "v3.2 all" reads all of `short`, "v3.2" an index_topk that is smaller than the context.
        for name, scenarios in (("v3.2 all", short), ("v3.2", parity)):
            add(f"CUSTOM {name} dcp 2", name, NO_MULTICAST, scenarios,
                disable_custom_all_reduce=True, **RANKS["dcp 2"])  # fmt: skip
        add("CUSTOM tp 2 mtp", 128, NO_MULTICAST, compilation_config=MTP_GRAPHS,
            disable_custom_all_reduce=True, **MTP, **RANKS["tp 2"])  # fmt: skip
        for name, dealt in (("dcp 2 mtp", {}), ("dcp 2 pairs mtp", PAIRS)):
            options = {"disable_custom_all_reduce": True, **mtp, **RANKS["dcp 2"], **dealt}
            add(f"CUSTOM {name}", 128, checked | NO_MULTICAST, **options)
            add(f"CUSTOM v3.2 all {name}", "v3.2 all", checked | NO_MULTICAST, short, **options)
    return engines
