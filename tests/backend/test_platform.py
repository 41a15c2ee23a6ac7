# SPDX-License-Identifier: Apache-2.0
"""What the CPU platform changes of a configuration, and what it leaves to who chose it."""

import dataclasses
from types import SimpleNamespace

import pytest

from mla_backend import platform, plugin


@pytest.mark.parametrize("named, expected", [(None, "ours"), ("theirs", "theirs")])
def test_a_draft_model_gets_this_backend_unless_another_was_named(named, expected):
    speculative = SimpleNamespace(
        draft_model_config=SimpleNamespace(use_mla=True), attention_backend=named
    )
    config = SimpleNamespace(
        speculative_config=speculative, attention_config=SimpleNamespace(backend="ours")
    )
    platform._select_for_draft(config)
    assert speculative.attention_backend == expected
    speculative.draft_model_config.use_mla, speculative.attention_backend = False, None
    platform._select_for_draft(config)
    assert speculative.attention_backend is None


@pytest.mark.parametrize(
    "chosen, expected",
    [
        (["none"], ["none", "-rotary_embedding"]),
        (["+rotary_embedding"], ["+rotary_embedding"]),
        (["-rotary_embedding"], ["-rotary_embedding"]),
    ],
)
def test_vllms_rotary_operator_is_left_unless_it_was_asked_for(chosen, expected):
    config = SimpleNamespace(compilation_config=SimpleNamespace(custom_ops=chosen))
    platform._avoid_rotary_op(config)
    assert config.compilation_config.custom_ops == expected


def test_all_that_was_asked_for_is_put_back():
    def config(block_size, chunked, prefixes, tokens):
        return SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=block_size,
                user_specified_block_size=True,
                enable_prefix_caching=prefixes,
            ),
            scheduler_config=SimpleNamespace(
                enable_chunked_prefill=chunked, max_num_batched_tokens=tokens
            ),
        )

    mine, theirs = config(128, True, True, 512), config(16, False, False, 4096)
    theirs.cache_config.user_specified_block_size = False
    asked = platform._Asked.read(mine)
    asked.restore(theirs)
    assert theirs == mine
    assert len(dataclasses.fields(asked)) == 5


@pytest.mark.parametrize("ours", [True, False])
def test_processes_wait_without_sched_yield(monkeypatch, ours):
    from vllm import platforms
    from vllm.distributed import utils
    from vllm.platforms.cpu import CpuPlatform

    asleep, yielded = [], []
    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)
    chosen = platform.MlaCpuPlatform() if ours else CpuPlatform()
    monkeypatch.setattr(platforms, "current_platform", chosen)
    plugin.register()
    monkeypatch.setattr(utils.os, "sched_yield", lambda: yielded.append(1))
    monkeypatch.setattr(utils.time, "sleep", asleep.append)
    utils.sched_yield()
    assert (asleep, yielded) == (([0], []) if ours else ([], [1]))
