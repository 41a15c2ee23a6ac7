# SPDX-License-Identifier: Apache-2.0
"""Make a demo checkpoint, or find the one made earlier."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_serving.demo_model.config import family_config
from mla_serving.demo_model.tokenizer import training_text, write_tokenizer

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def make_demo_model(
    family: str,
    out_dir: str | Path,
    *,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint of `family` into `out_dir`: about 30 MB, a few seconds.

    The same bits on every run. Weights are bf16; loading them with dtype float32 is exact, so one
    checkpoint serves both as the model and as its fp32 oracle.

    Args:
        family: a key of FAMILIES.
        out_dir: made if missing; must be empty.
        seed: another seed gives another model.
        overrides: config.json keys to change, e.g. {"num_hidden_layers": 2}.

    Raises:
        ValueError: unknown family or key, or `out_dir` holds files.
        OSError: `out_dir` cannot be written, or its disk is full; names the place.
    """
    config = family_config(family, overrides)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    if any(out_dir.iterdir()):
        raise ValueError(f"out_dir {out_dir} is not empty; give a new or empty directory")

    from safetensors.torch import save  # torch takes seconds to import: not for --help

    from mla_serving.demo_model.weights import make_weights

    try:
        write_tokenizer(out_dir)
        # Not `save_file`: it keeps the file from other users, and a full disk is no OSError.
        weights = save(make_weights(config, seed), metadata={"format": "pt"})
        (out_dir / "model.safetensors").write_bytes(weights)
        _write_json(out_dir / "config.json", config)
        tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(out_dir / "generation_config.json", tokens)
    except BaseException as error:
        for name in _FILES:  # else the next try finds `out_dir` not empty
            (out_dir / name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write, as to a full disk
            error.filename = str(out_dir)
        raise
    return out_dir


def demo_model_path(family: str) -> Path:
    """The checkpoint of `family` in the user's cache directory, made now if it is not there.

    Safe to call from several processes at once. Its directory is named after the code and the text
    that it is made from, so a change of either makes a new one.
    """
    family_config(family)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla-backend"
    target = root / f"demo-{family}-{_stamp()}"
    if _whole(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as scratch:
        made = make_demo_model(family, Path(scratch) / family)
        if target.is_dir() and not _whole(target):  # by a cleaner of caches
            target.rename(Path(scratch) / "rest")
        try:
            made.rename(target)  # whole or not at all
        except OSError:
            if not target.is_dir():  # anything but another process having been first
                raise
    return target


def _whole(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def _stamp() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for text in training_text():
        digest.update(text.encode())
    return digest.hexdigest()[:12]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
