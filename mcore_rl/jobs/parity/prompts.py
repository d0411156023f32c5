"""The token sequences that engines are compared on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.tokenizer import read_tokenizer

_LENGTHS = (3, 7, 12, 21, 34, 55)  # tokens, of the prompts that are drawn
_SEED = 0

Tokenize = Callable[[str], list[int]]


def drawn_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Token ids drawn from the vocabulary: the same for every model of its size.

    No prompt has more than `longest` tokens.
    """
    random = np.random.default_rng(_SEED)
    lengths = [min(length, longest) for length in _LENGTHS]
    return [random.integers(0, vocab_size, length).tolist() for length in lengths]


def prompts_from_file(path: str, model: str, vocab_size: int, longest: int) -> list[list[int]]:
    """Prompts as token ids: a text a line or, where the first line begins with "{", JSON lines.

    A JSON line has "prompt" (a text) or "prompt_ids". Texts are tokenised by the tokenizer of the
    folder `model`. Empty lines are skipped.

    Raises:
        ConfigError: the file, one of its lines or the tokenizer does not do.
    """
    lines = [(n, line) for n, line in enumerate(_read(path), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path} holds no prompt; it needs at least one line")
    as_json = lines[0][1].lstrip().startswith("{")
    tokenizer: Any = None

    def tokenize(text: str) -> list[int]:
        nonlocal tokenizer
        tokenizer = tokenizer or read_tokenizer(model)
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    found = []
    for number, line in lines:
        where = f"--prompts {path}, line {number}"
        ids = _ids_of_json(line, where, tokenize) if as_json else tokenize(line)
        check_ids(ids, vocab_size, longest, where)
        found.append(ids)
    return found


def check_ids(ids: list[int], vocab_size: int, longest: int, where: str) -> None:
    """Raises ConfigError unless there is a token, not too many, and each is of the vocabulary."""
    if not ids:
        raise ConfigError(f"{where}: the prompt has no tokens; it needs at least one")
    if len(ids) > longest:
        raise ConfigError(
            f"{where}: the prompt has {len(ids)} tokens; allowed: up to {longest}, what "
            "max_position_embeddings of config.json leaves for it"
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: token id {token} is not of the vocabulary; allowed: 0 to "
                f"{vocab_size - 1}"
            )


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read as UTF-8 text: {error}") from error


def _ids_of_json(line: str, where: str, tokenize: Tokenize) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    named = [name for name in ("prompt", "prompt_ids") if isinstance(entry, dict) and name in entry]
    if len(named) != 1:
        raise ConfigError(f'{where} needs an object with one of "prompt" and "prompt_ids"')
    value = entry[named[0]]
    if named[0] == "prompt":
        if not isinstance(value, str):
            raise ConfigError(f'{where}: "prompt" is {value!r}; allowed: a text')
        return tokenize(value)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ConfigError(f'{where}: "prompt_ids" is no list of integers')
    return value
