# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a checkpoint that the plan reads, from a folder or the Hugging Face Hub."""

import json
import os
from pathlib import Path
from typing import Any

from mla_serving.hub import unreachable

# ModelOpt up to 0.29 writes `quantization_config` here, beside config.json.
QUANTISATION_FILE = "hf_quant_config.json"
# Mistral's config, whose keys have other names: vLLM translates them.
_OF_MISTRAL = "params.json"


def read(model: str) -> tuple[dict[str, Any], str]:
    """The config of `model` (a config.json, a directory with one, or a name on the Hub) with the
    quantisation that vLLM would find, and the model's name. A params.json takes its place where
    there is none.

    OSError if there is no such config, ValueError if a file holds no JSON object, or vLLM is
    missing or finds fault with a params.json.
    """
    if not model:  # a shell's "$VARIABLE" that is not set; as a path it would be this directory
        raise FileNotFoundError("--model is empty; expected a path, or a name on the Hub")
    path = Path(model)
    here = path.exists()
    if path.is_dir():
        path = path / "config.json"
        if not path.exists() and path.with_name(_OF_MISTRAL).exists():
            path = path.with_name(_OF_MISTRAL)
        elif not path.exists():
            raise FileNotFoundError(f"{model}: a directory without config.json")
    unanswered = None if here else _why_unanswered(model)
    if not here:
        path = _download(model, unanswered)
    config = _object(path)
    if path.name == _OF_MISTRAL:
        return _translated(config, path), (path.parent.name if here else model) or model
    if config.get("quantization_config") is None and config.get("compression_config") is None:
        file = path.with_name(QUANTISATION_FILE) if here else _also_on_hub(model, unanswered)
        if file is not None and file.exists():
            config["quantization_config"] = _object(file)
    return config, (path.parent.name if here else model) or model


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for a {path.name}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _translated(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """`config` of Mistral's format with the keys of Hugging Face's."""
    try:
        from vllm.transformers_utils.configs.mistral import adapt_config_dict
    except ImportError:
        raise ValueError(
            f"{path} is in Mistral's format, which takes vLLM to read, and that cannot be "
            "imported: install it, or give a config.json in Hugging Face's"
        ) from None
    try:
        translated: dict[str, Any] = adapt_config_dict(config, defaults={}).to_dict()
    except Exception as error:  # assertions and missing keys, too
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: vLLM finds no config in Mistral's format ({what})") from None
    return translated


def _why_unanswered(model: str) -> str | None:
    """Why the Hub will not answer for `model`; FileNotFoundError if that is no name on it."""
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise FileNotFoundError(f"{model}: no such file or directory")
    return unreachable(model, os.environ)


def _from_hub(model: str, file: str, unanswered: str | None) -> Path:
    """unanswered: why the Hub is not asked, only its cache: it would be tried for half a minute."""
    from huggingface_hub import hf_hub_download

    if unanswered is None:
        return Path(hf_hub_download(model, file))
    return Path(hf_hub_download(model, file, local_files_only=True))


def _download(model: str, unanswered: str | None) -> Path:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        try:
            return _from_hub(model, "config.json", unanswered)
        except LocalEntryNotFoundError:  # the Hub does not answer: it would not then either
            raise
        except EntryNotFoundError:
            return _from_hub(model, _OF_MISTRAL, unanswered)
    except Exception as error:  # also of its HTTP client, as for an HF_ENDPOINT without https://
        reason = unanswered or (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(
            f"{model} is no path here, and its config.json did not come from the Hugging Face Hub "
            f"({reason}). Give the path of a config.json"
        ) from None


def _also_on_hub(model: str, unanswered: str | None) -> Path | None:
    """The file of the quantisation. None without one, and where the Hub does not answer, as in
    vLLM: the report says in how many bits the weights were taken."""
    try:
        return _from_hub(model, QUANTISATION_FILE, unanswered)
    except Exception:  # as in `_download`
        return None
