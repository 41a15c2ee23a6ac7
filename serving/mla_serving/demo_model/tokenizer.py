# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer trained on Python's own manual, the `help()` topics it ships with."""

import json
from pathlib import Path

from mla_serving.demo_model.config import CONTEXT_LENGTH, VOCAB_SIZE

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# Ids follow this order; bos, eos and pad are 0, 1 and 2 in config.json.
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def training_text() -> list[str]:
    """The manual's topics, in order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def write_tokenizer(out_dir: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into `out_dir`."""
    # Comes with vLLM: the commands that need no demo model run without it.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    # Not `save`: a full disk is no OSError there.
    text = tokenizer.to_str(pretty=True)
    (out_dir / "tokenizer.json").write_text(text, encoding="utf-8")

    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    settings = special | {
        "add_bos_token": True,
        "additional_special_tokens": SPECIAL_TOKENS[3:],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out_dir / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
