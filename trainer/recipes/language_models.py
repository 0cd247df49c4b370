"""Loads language models from a folder, with clear errors for invalid ones."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import masking_utils

from halfstep.recipe import ConfigError, data_path

#: Files that may determine the tokens: all except weights.
TOKENIZER_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
LISTED = 3  # names of weights in a message


def load_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer. Raises ConfigError if it has none."""
    _check_folder(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError(_no_tokenizer(folder, str(error).partition("\n")[0])) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # empty, because files are missing
        raise ConfigError(_no_tokenizer(folder, "its vocabulary is empty"))
    return tokenizer


def tokenizer_mark(folder: Path) -> str:
    """Return a text that identifies a folder's tokenizer: hashes of its files, and versions."""
    files = [file for file in folder.iterdir() if file.suffix in TOKENIZER_FILES]
    marks = [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    versions = [f"{name} {version(name)}" for name in ("transformers", "tokenizers")]
    return "\n".join([*versions, *sorted(marks)])


def load_model(folder: Path) -> Any:
    """Return a folder's model in fp32. Raises ConfigError unless its weights match it."""
    _check_folder(folder)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,  # autocast casts where it is safe
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"recipe.model is {str(folder)!r}: no language model can be loaded from it: "
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from error
    wrong = [
        f"{len(names)} {what} ({_some(names)})"
        for what, names in (
            ("weights are missing", info["missing_keys"]),
            ("have a shape that differs from config.json", info["mismatched_keys"]),
            ("are unknown to it", info["unexpected_keys"]),
        )
        if names
    ]
    if wrong:
        raise ConfigError(
            f"recipe.model is {str(folder)!r}: its weights do not fit its config.json, a "
            f"{type(model).__name__}: {', '.join(wrong)}"
        )
    return model


def with_lora(model: Any, *, rank: int, alpha: float, dropout: float, modules: str) -> object:
    """Return a model with frozen weights and trainable LoRA matrices.

    modules: "all-linear", or suffixes of names, comma-separated.  Raises ConfigError if none match.
    """
    import peft  # takes seconds

    names = [name.strip() for name in modules.split(",") if name.strip()]
    lora = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, lora)
    except ValueError as error:
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        raise ConfigError(
            f"recipe.lora_modules is {modules!r}: {str(error).partition(chr(10))[0]}; its linear "
            f"layers are {', '.join(sorted(linear))}"
        ) from error


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Disable a check of transformers for packed sequences, which synchronizes the device.

    Without an attention mask, which would rule out the fastest kernels, transformers checks whether
    rows contain packed sequences, and the host waits for the result in every step. Here each row is
    one sequence.
    """
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _not_packed
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


def _not_packed(position_ids: object) -> None:
    """Return None: the row is not packed."""


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"recipe.model is {str(folder)!r}: there is no config.json on this worker; name a "
            "folder written by transformers' save_pretrained"
        )
    for file in folder.iterdir():
        data_path(file, "recipe.model")  # a link may lead anywhere


def _no_tokenizer(folder: Path, why: str) -> str:
    return (
        f"recipe.model is {str(folder)!r}: no tokenizer can be loaded from it, such as "
        f"tokenizer.json: {why}"
    )


def _some(names: Iterable[object]) -> str:
    listed = sorted(str(name[0]) if isinstance(name, tuple) else str(name) for name in names)
    return ", ".join(listed[:LISTED]) + (", …" if len(listed) > LISTED else "")
