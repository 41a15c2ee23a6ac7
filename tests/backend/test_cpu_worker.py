# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, mended: seeds under chunked prefill, drafts, pipelines, zeroed blocks,
experts, its end."""

import atexit
import contextlib
import gc
import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.fused_moe.router import (
    fused_topk_bias_router,
    zero_expert_router,
)
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.cpu_worker import CPUModelRunner, CPUWorker

from mla_backend import compat
from mla_backend.cpu_worker import MlaCpuWorker, stages
from mla_backend.cpu_worker.drafting import unshare_lengths
from mla_backend.cpu_worker.generators import keep_generators
from mla_backend.cpu_worker.rejection import expand_batch_to_tokens, reject_padding


class Runner:
    """What vLLM's CPU model runner does with generators; a row is (generator, is a chunk)."""

    def __init__(self, batch):
        self.input_batch = SimpleNamespace(
            generators={row: g for row, (g, _) in enumerate(batch) if g is not None}
        )
        # Rows past the batch keep what an earlier step left there.
        mask = np.array([chunk for _, chunk in batch] + [True] * 3)
        self.discard_request_mask = SimpleNamespace(np=mask)
        self.rows = len(batch)

    def _sample(self, scale):
        generators = self.input_batch.generators
        return [scale * torch.rand(1, generator=g).item() for g in generators.values()]

    def _bookkeeping_sync(self, output, fail=False):
        for row in np.nonzero(self.discard_request_mask.np[: self.rows])[0]:
            generator = self.input_batch.generators.get(int(row))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        if fail:
            raise ValueError("fail")
        return output


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("parent, ends_with", [(object(), [gc.freeze]), (None, [])])
def test_a_worker_process_ends_without_a_search_for_garbage(monkeypatch, parent, ends_with):
    """Not what has no parent: it is a user's own process."""
    registered = []
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(CPUWorker, "init_device", lambda self: 1 / 0)  # goes no further
    with pytest.raises(ZeroDivisionError):
        object.__new__(MlaCpuWorker).init_device()
    assert registered == ends_with


def test_vllm_alone_fails_on_a_chunk_of_a_seeded_request():
    with pytest.raises(RuntimeError, match="does not use offset"):
        Runner([(seeded(1), True)])._bookkeeping_sync(None)


def test_only_kept_draws_move_a_generator():
    whole, chunked = seeded(1), seeded(1)
    runner = Runner([(None, True), (chunked, True), (whole, False)])
    keep_generators(runner)
    generators = dict(runner.input_batch.generators)
    first = runner._bookkeeping_sync(runner._sample(1.0))
    assert first[0] == first[1]  # both drew, one of them in vain
    assert runner.input_batch.generators == generators
    runner.discard_request_mask.np[:] = False
    second = runner._bookkeeping_sync(runner._sample(1.0))
    assert second[0] == first[1]
    third = runner._sample(1.0)
    assert third[0] == second[1] != second[0]


def test_generators_are_back_after_a_failure():
    runner = Runner([(seeded(1), True)])
    keep_generators(runner)
    with pytest.raises(ValueError, match="fail"):
        runner._bookkeeping_sync(None, fail=True)
    assert list(runner.input_batch.generators) == [0]


def test_our_platform_takes_this_worker_only_where_vllm_takes_its_own(monkeypatch):
    from mla_backend import platform

    parallel = SimpleNamespace(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")
    platform._mend_worker(SimpleNamespace(parallel_config=parallel))
    assert parallel.worker_cls == "mla_backend.cpu_worker.MlaCpuWorker"
    parallel.worker_cls = "someone.Else"
    platform._mend_worker(SimpleNamespace(parallel_config=parallel))
    assert parallel.worker_cls == "someone.Else"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_repeated_for_the_tokens_of_a_request(dtype):
    x, ends = torch.tensor([3, 0, 5, 7], dtype=dtype), torch.tensor([2, 5, 5, 6], dtype=torch.int32)
    got = expand_batch_to_tokens(x, ends, 6)
    assert got.dtype == dtype and got.tolist() == [3, 3, 0, 0, 0, 7]
    got = expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1)
    assert got.dtype == dtype and got.tolist() == [3, 3, 1, 1, 1, 7]


def registered_judge(monkeypatch):
    from vllm.triton_utils import dispatcher

    from mla_backend.platform import MlaCpuPlatform

    taken = {}
    monkeypatch.setattr(dispatcher, "register_kernels", taken.update)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    for _ in range(2):
        MlaCpuPlatform.register_triton_kernel_overrides()
    return taken["vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel"]


@pytest.mark.parametrize("row", [0, 1])
def test_padding_is_no_draft(monkeypatch, row):
    """In front of a draft's row is the last token's probability of another request, or what lies in
    front of all of them. Through what vLLM takes for its kernel."""
    for name in ("_rejection_random_sample_kernel_impl", "rejection_random_sample_kernel"):
        if hasattr(cpu_triton_utils, name):
            monkeypatch.setattr(cpu_triton_utils, name, getattr(cpu_triton_utils, name))
    if compat.versions.before((0, 31)):
        reject_padding()
        reject_padding()
        judge = cpu_triton_utils.rejection_random_sample_kernel[(1,)]
    else:
        judge = registered_judge(monkeypatch)
    rows = torch.zeros(3, 8)
    rows[:2, 7], rows[2, 0] = 1.0, 1.0  # which takes token 0, as a draft that is there
    target, B = rows[2 - row :], 1 + row
    drafts, recovered = torch.tensor([7, -1])[1 - row :], torch.tensor([0, 2])[1 - row :]
    out = torch.full((B, 2), -9, dtype=torch.int32)
    ends, bonus = torch.arange(1, B + 1), torch.full((B, 1), 3)
    uniform, greedy = torch.full((B,), 0.5, dtype=torch.float64), torch.zeros(B, dtype=torch.bool)
    judge(
        *(out, ends, drafts, None, target, bonus, recovered, uniform, greedy, 1, 8),
        NO_DRAFT_PROBS=True,
    )
    assert out.tolist() == [[7, 3], [2, -9]][1 - row :]


@pytest.fixture
def mend(monkeypatch):
    """`mend(runner)`: our worker's mends, with a model runner that vLLM's worker has made."""
    for module, name in (
        (rejection_sampler, "expand_batch_to_tokens"),
        (rejection_sampler, "apply_top_k_top_p"),
        (cpu_triton_utils, "_rejection_random_sample_kernel_impl"),
        (fused_topk_bias_router, "vllm_topk_softmax"),
        (zero_expert_router, "zero_experts_compute_triton"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(CPUWorker, "init_device", lambda self: None)
    worker = MlaCpuWorker.__new__(MlaCpuWorker)

    def init_device(runner):
        worker.model_runner = runner
        worker.init_device()

    return init_device


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_with_top_k_may_be_without_drafts(mend, drafts):
    """As the step of a prompt is in an engine that drafts."""
    mend(None)
    sampling = SimpleNamespace(
        all_greedy=False, temperature=torch.ones(1), top_k=torch.tensor([2]), top_p=None
    )
    logits = torch.arange(4.0).repeat(drafts, 1)
    ends = torch.tensor([drafts], dtype=torch.int32)
    limited = rejection_sampler.apply_sampling_constraints(logits, ends, sampling)
    assert limited.tolist() == [[-torch.inf, -torch.inf, 2.0, 3.0]] * drafts


def test_lengths_of_drafts_are_not_those_of_the_host():
    """vLLM adds what it drafts to both."""
    drafter = SpecDecodeBaseProposer.__new__(SpecDecodeBaseProposer)
    drafter.token_arange_np = np.arange(16, dtype=np.int32)
    unshare_lengths(drafter)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([9, 70], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([9, 70], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=6,
        max_query_len=3,
        max_seq_len=70,
        block_table_tensor=torch.zeros(2, 2, dtype=torch.int32),
        slot_mapping=torch.arange(6),
    )
    left, token_indices = drafter.prepare_inputs(step, [[5], [5, 6, 7]], [2, 2])
    assert token_indices.tolist() == [0, 3, 4, 5]
    left.seq_lens += 1
    left.seq_lens_cpu_upper_bound += 1
    assert left.seq_lens.tolist() == [8, 71]


@pytest.mark.parametrize("drafter", [None, SimpleNamespace()])
def test_other_drafters_have_no_lengths(drafter):
    """As without drafts, and those that look the next tokens up."""
    unshare_lengths(drafter)


@pytest.mark.parametrize("first", [True, False])
def test_later_stages_have_buffers_once_the_model_is_loaded(monkeypatch, first):
    """In eager mode vLLM leaves out the dummy step that would make them."""
    monkeypatch.setattr(CPUWorker, "load_model", lambda self: None)
    monkeypatch.setattr(
        stages, "get_pp_group", lambda: SimpleNamespace(is_first_rank=first), raising=False
    )
    model = torch.nn.Module()
    model.make_empty_intermediate_tensors = lambda **sizes: sizes
    worker = MlaCpuWorker.__new__(MlaCpuWorker)
    worker.model_runner = SimpleNamespace(
        intermediate_tensors=None,
        model=model,
        get_model=lambda: model,
        max_num_tokens=256,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        device="cpu",
    )
    worker.load_model()
    made = {"batch_size": 256, "dtype": torch.bfloat16, "device": "cpu"}
    assert worker.model_runner.intermediate_tensors == (None if first else made)


@pytest.mark.parametrize("int8", [False, True])
def test_int8_weights_are_not_loaded_anew(monkeypatch, int8):
    """vLLM's operator was seen to abort the process, or to answer NaN."""
    loaded = []
    monkeypatch.setattr(CPUWorker, "reload_weights", lambda self, path: loaded.append(path))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if int8:
        model[0].scheme = SimpleNamespace(kernel=SimpleNamespace(dnnl_handler=None))
    worker = MlaCpuWorker.__new__(MlaCpuWorker)
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    refused = pytest.raises(ValueError, match=r"int8 weights on a CPU.*Mend: start the engine")
    with refused if int8 else contextlib.nullcontext():
        worker.reload_weights("elsewhere")
    assert loaded == ([] if int8 else ["elsewhere"])


@pytest.mark.parametrize("checkpoint_format", [True, False])
def test_weights_of_wrapped_layers_are_not_loaded_anew(monkeypatch, checkpoint_format):
    """vLLM fails halfway there, with layers on the meta device, and the next step ends the engine.
    Weights under the model's own names are its to load."""
    loaded = []
    monkeypatch.setattr(CPUWorker, "reload_weights", lambda self, **asked: loaded.append(asked))
    model = torch.nn.ModuleDict({"o_proj": torch.nn.Module(), "norm": torch.nn.LayerNorm(2)})
    model["o_proj"].base_layer = torch.nn.Linear(2, 2)
    worker = MlaCpuWorker.__new__(MlaCpuWorker)
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    refused = pytest.raises(ValueError, match=r"--enable-lora.*o_proj \(one of 1\).*Mend: start")
    asked = {} if checkpoint_format else {"is_checkpoint_format": False}
    with refused if checkpoint_format else contextlib.nullcontext():
        worker.reload_weights(**asked)
    assert loaded == ([] if checkpoint_format else [asked])


def hybrid_runner(pages):
    """Of a model with latent attention, 4 blocks of 128 tokens cut into `pages` pages each, beside
    linear attention."""
    runner = CPUModelRunner.__new__(CPUModelRunner)
    spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.float32)
    latent = SimpleNamespace(kv_cache=torch.ones(4 * pages, 128 // pages, 576))
    linear = SimpleNamespace(kv_cache=torch.ones(4, 2, 16))
    layers = {"latent": latent, "linear": linear}
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=["latent", "on another stage"]),
        SimpleNamespace(kv_cache_spec=None, layer_names=["linear"]),
    ]
    runner.kv_cache_config = SimpleNamespace(num_blocks=4, kv_cache_groups=groups)
    return runner, latent.kv_cache.view(4, 128, 576), linear.kv_cache


@pytest.mark.parametrize("pages", [1, 2])
def test_new_blocks_are_zeroed_and_no_others(mend, pages):
    """vLLM alone takes block numbers for those of pages, and zeroes other requests' rows."""
    runner, latent, linear = hybrid_runner(pages)
    mend(runner)
    runner._zero_block_ids([1, 3])
    assert latent.sum(dim=(1, 2)).tolist() == [128 * 576, 0, 128 * 576, 0]
    assert (linear == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_of_longcat(mend, dtype, renormalize):
    """6 experts, of which the last two pass tokens on, as vLLM's own router asks for them."""
    mend(None)
    g = torch.Generator().manual_seed(0)
    hidden, logits = torch.randn(5, 40, generator=g).to(dtype), torch.randn(5, 6, generator=g)
    bias = torch.tensor([0.0, -1.0, 0.0, 0.0, 0.3, 0.3])
    router = zero_expert_router.ZeroExpertRouter.__new__(zero_expert_router.ZeroExpertRouter)
    router.e_score_correction_bias = torch.nn.Parameter(bias, requires_grad=False)
    router.top_k, router.renormalize, router.scoring_func = 3, renormalize, "softmax"
    router.routed_scaling_factor, router.num_logical_experts = 6.0, 4
    router.zero_expert_type, router._zero_expert_output = "identity", None
    weights, experts = router._compute_routing(hidden, logits, None)
    passed = router.zero_expert_output
    assert passed.dtype == dtype and experts.dtype == torch.int32
    seen = 0
    for t in range(5):
        scores = logits[t].softmax(0)
        chosen = sorted(range(6), key=lambda e: -(scores[e] + bias[e]))[:3]
        total = scores[chosen].sum() if renormalize else 1
        factors = {e: float(6 * scores[e] / total) for e in chosen}
        computed = {e: w for e, w in factors.items() if e < 4}
        got = zip(experts[t].tolist(), weights[t].tolist(), strict=True)
        assert {e: w for e, w in got if w} == pytest.approx(computed)
        want = hidden[t].float() * sum(w for e, w in factors.items() if e >= 4)
        torch.testing.assert_close(passed[t].float(), want, atol=1e-5, rtol=2**-7)
        seen += len(computed)
    assert 0 < seen < 15
