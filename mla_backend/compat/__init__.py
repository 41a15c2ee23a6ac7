# SPDX-License-Identifier: Apache-2.0
"""Every difference between the vLLM versions this plugin serves, and every place where vLLM is
changed or asked what it does not offer. Nowhere else may a version matter, but for where the server
finds vLLM's names (`mla_serving.server.vllm_api`).

Callers write `compat.name`, so that one sees where a version matters; the modules here ask
`versions`, where a test that pretends another version patches it. Import-light: vLLM is imported
inside functions only, because the platform entry point runs while `vllm.platforms` is still
resolving.

| module | function | for vLLM | what it makes up for |
|---|---|---|---|
| versions | | all | the range served; `before` is how the others ask for a version |
| selection | register_attention_backend | all | CUSTOM is the only name before 0.32 |
| | select_class_by_layer | all | one name stands for one class |
| ray | share_settings_with_ray | all | Ray's workers lack the server's environment |
| kv_cache | layer_compact_layouts | 0.29 on | layouts go by name, not by stride order |
| | block_table_width | all | backends are not told it before the first step |
| | (sparse) | 0.26 | under context parallelism the first runner's is as without |
| | forgets_lengths_of_ranks | to 0.29 | dummy steps of the second model runner have none |
| | deals_within_64 | to 0.28 | the second model runner deals tokens within kernel blocks |
| ranks | all_gather_into | all | a group's all_gather makes new memory for each result |
| prompts | register_cpu_prefill_backend | to 0.28 | a CPU is given FLASH_ATTN's class |
| | mla_prefill_backend | 0.29 on | an error says that there is none |
| | expanding_lacks | to 0.28 | layers of another model give all tokens to `forward_mqa` |
| | outputs_of_chunked_context | to 0.27 | of chunks they keep and merge more |
| | expanded_prompts | 0.26 | the layer asks for lengths, not for `use_dense_mha` |
| | chunked_context | to 0.27 | it asks for the number of prompts |
| | wants_fp8_prompts | 0.32, 0.33 | layers of Kimi-Linear, with an fp8 cache |
| step_metadata | skip_chunked_context_metadata | to 0.27 | on CPU they want pinned memory |
| | merge_every_context | to 0.27 | leading prompts alone are merged with their context |
| | tokens_added_to_drafts | all | first steps of draft models and of P-EAGLE are longer |
| | bound_lengths | all | a drafter's new token is missing in the host's lengths |
| | without_padding | 0.28, 0.29 | steps of several MTP modules are padded without a request |
| | (breakable CUDA graphs) | 0.26 | and other steps with requests that have no token |
| | deal_draft_slots | all | the first model runner's drafters know of no shared cache |
| | request_ids | all | metadata builders are told no names |
| | is_dummy_step | all | nor whether a step is made up |
| weights | keep_kv_b_weight | to 0.28 | on CPU `kv_b_proj.weight` is freed after packing |
| | (int8) | all | and None without AMX tiles |
| | LatentsKeepTheirDtype | all | contexts become int8, or int32, as a weight is kept |
| | split_kv_b_exactly | all | ones are rounded to a scale of activations |
| amd | on_amd_gpu, fp8_is_fnuz | all | its capabilities look like NVIDIA's |
| adapters | check_adapters | all | LoRA changes layers that an attention backend never calls |
| waiting | wait_without_yielding | all | on CPU its processes can starve all others |
| indexer | replace_indexer | all | its class takes no other kernels; on CPU none quantises |
| | (below sm_89) | to 0.28 | the fused kernel of its queries does not compile |
| | indexer_needs_fp8_type | 0.29 on | nor can one do without it: refused |
| | route_fused_indexer | 0.29 on (*) | on CUDA a function in the model's file, not an op |
| | (on sm_100) | 0.33 | its keys' scales are four bytes of ue8m0: refused |
| | build_indexers_without_deepgemm | all | its op asks for DeepGEMM while it is built |
| | split_graph_at | all | piecewise CUDA graphs split at vLLM's own op only |

(*) Before that in the model that `model_class_overrides` choose.

These need no code, as the methods concerned serve both forms:

| what differs | 0.26 | since | what then |
|---|---|---|---|
| `validate_configuration`'s keywords | fewer | 0.28 to 0.30 | + use_dcp, use_rswa, ... |
| model runner on a GPU | the first, for most models | 0.29 | the second |
| metadata of drafts in the second model runner | built for each | 0.28 | or brought up to date |
| top-k buffer of DeepSeek-V3.2's draft on CUDA | its own | 0.30 | the model's, given late |
| `get_supported_kernel_block_sizes` | () | 0.31 | (kv_cache_spec=None) |
| metadata builder's `_build_decode` | no max_query_len | 0.31 | max_query_len |
| block size on CPU | chosen before the layers | 0.33 | and again, by their classes |
| `do_kv_cache_update` | 6 arguments | 0.33 | + skip_scale |
"""

from mla_backend.compat.adapters import check_adapters
from mla_backend.compat.amd import fp8_is_fnuz, on_amd_gpu
from mla_backend.compat.indexer import (
    build_indexers_without_deepgemm,
    indexer_needs_fp8_type,
    replace_indexer,
    route_fused_indexer,
    split_graph_at,
)
from mla_backend.compat.kv_cache import (
    block_table_width,
    deals_within_64,
    forgets_lengths_of_ranks,
    layer_compact_layouts,
)
from mla_backend.compat.prompts import (
    chunked_context,
    expanded_prompts,
    expanding_lacks,
    mla_prefill_backend,
    outputs_of_chunked_context,
    register_cpu_prefill_backend,
    wants_fp8_prompts,
)
from mla_backend.compat.ranks import all_gather_into
from mla_backend.compat.ray import share_settings_with_ray
from mla_backend.compat.selection import register_attention_backend, select_class_by_layer
from mla_backend.compat.step_metadata import (
    bound_lengths,
    deal_draft_slots,
    is_dummy_step,
    merge_every_context,
    request_ids,
    skip_chunked_context_metadata,
    tokens_added_to_drafts,
    without_padding,
)
from mla_backend.compat.versions import (
    NEWEST,
    OLDEST,
    RANGE_TEXT,
    VllmVersionStatus,
    installed_vllm_version,
    parse_version,
    require_supported_vllm,
    vllm_version_status,
)
from mla_backend.compat.waiting import wait_without_yielding
from mla_backend.compat.weights import (
    LatentsKeepTheirDtype,
    keep_kv_b_weight,
    split_kv_b_exactly,
)

__all__ = [
    "NEWEST",
    "OLDEST",
    "RANGE_TEXT",
    "LatentsKeepTheirDtype",
    "VllmVersionStatus",
    "all_gather_into",
    "block_table_width",
    "bound_lengths",
    "build_indexers_without_deepgemm",
    "check_adapters",
    "chunked_context",
    "deal_draft_slots",
    "deals_within_64",
    "expanded_prompts",
    "expanding_lacks",
    "forgets_lengths_of_ranks",
    "fp8_is_fnuz",
    "indexer_needs_fp8_type",
    "installed_vllm_version",
    "is_dummy_step",
    "keep_kv_b_weight",
    "layer_compact_layouts",
    "merge_every_context",
    "mla_prefill_backend",
    "on_amd_gpu",
    "outputs_of_chunked_context",
    "parse_version",
    "register_attention_backend",
    "register_cpu_prefill_backend",
    "replace_indexer",
    "request_ids",
    "require_supported_vllm",
    "route_fused_indexer",
    "select_class_by_layer",
    "share_settings_with_ray",
    "skip_chunked_context_metadata",
    "split_graph_at",
    "split_kv_b_exactly",
    "tokens_added_to_drafts",
    "vllm_version_status",
    "wait_without_yielding",
    "wants_fp8_prompts",
    "without_padding",
]
