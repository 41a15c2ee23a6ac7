# SPDX-License-Identifier: Apache-2.0
"""What a vLLM engine holds of a model, as a process of its own.

    python engine_bytes.py FOLDER DRAFTS

Prints JSON: bytes of the `weights`, of the draft model's too, and of one `token` in the cache.
Weights that vLLM would pack for a CPU are left as they are on a GPU.
"""

import json
import sys

from vllm import LLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

MADE = ("cos_sin_cache", "topk_indices")  # tables and buffers, which no checkpoint has


def main():
    folder, drafts = sys.argv[1], int(sys.argv[2])
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = lambda *_: None
    drafter = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    llm = LLM(
        folder,
        attention_backend="CUSTOM",
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        num_gpu_blocks_override=16,
        speculative_config=drafter,
    )
    core = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    models = [runner.get_model(), *([runner.drafter.model] if drafts else [])]
    storages = {}  # views of another tensor count once, as does what the models share
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not any(word in name for word in MADE):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    caches = core.collective_rpc("get_kv_cache_spec")[0].values()
    token = sum(cache.page_size_bytes / cache.block_size for cache in caches)
    print(json.dumps({"weights": sum(storages.values()), "token": token}))


if __name__ == "__main__":
    main()
