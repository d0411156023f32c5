"""Loading a tokenizer and refusing one that does not fit its model."""

from __future__ import annotations

from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config.checks import check_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.schema import ModelConfig
from mcore_rl.data.lean_transformers import import_transformers
from mcore_rl.data.template_limits import limit_chat_templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Without one of them transformers makes a tokenizer without words, by the model's type alone.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(
    path: str | Path, chat_date: str = ModelConfig.chat_date
) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint folder `path` (model.path); reads local files only.

    Its chat template writes `chat_date` (model.chat_date) as today's date.

    Raises ConfigError when the folder has none, or it lacks an end-of-sequence token or a chat
    template: prompts are chats and responses end.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of model.path={str(path)!r} has no eos_token; it needs one"
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of model.path={str(path)!r} has no chat template; it needs one, "
            f"in chat_template.jinja or tokenizer_config.json"
        )
    set_chat_date(tokenizer, chat_date)
    return tokenizer


def set_chat_date(tokenizer: PreTrainedTokenizerBase, chat_date: str) -> None:
    """Make the chat template write a date, YYYY-MM-DD, as today's.

    Templates ask transformers' `strftime_now` for it, or read `date_string` (Llama-3's).
    """
    day = date.fromisoformat(chat_date)
    tokenizer.apply_chat_template = partial(  # type: ignore[method-assign]
        tokenizer.apply_chat_template, strftime_now=day.strftime, date_string=f"{day:%d %b %Y}"
    )


def has_tokenizer(path: str | Path) -> bool:
    """Whether the folder contains a tokenizer's words."""
    return any(Path(path, name).is_file() for name in _FILES)


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Any tokenizer, of a base model too. Raises ConfigError when the folder has none."""
    transformers = import_transformers()
    check_exists("model.path", path)
    if not Path(path).is_dir():
        raise ConfigError(f"model.path={str(path)!r} is not a folder")
    if not has_tokenizer(path):
        raise ConfigError(
            f"model.path={str(path)!r} has no tokenizer; it needs one of: {', '.join(_FILES)}"
        )
    limit_chat_templates()
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # other files raise anything, panics of Rust too
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"model.path={str(path)!r} has a tokenizer that does not load: {reason[:300]}; "
            "allowed: the files of a Hugging Face tokenizer"
        ) from error
    return tokenizer


def stop_ids_of(path: str | Path, setting: str = "model.path") -> tuple[int, ...]:
    """Return the tokens at which a server ends a response, beside the tokenizer's eos_token.

    These are the eos_token_id of generation_config.json or, where there is no such file, of
    config.json, as vLLM reads them (config/model.py:1812).

    Raises:
        ConfigError: it is neither a token id, a list of them, nor null.
    """
    for name in ("generation_config.json", "config.json"):
        if (file := Path(path, name)).is_file():
            break
    else:
        return ()
    given = read_json_object(file).get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(
            f"{setting}={str(path)!r}: {file.name} has eos_token_id={given!r}; allowed: a token "
            "id, a list of them, or null"
        )
    return tuple(ids)


def check_tokenizer_matches(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """ConfigError when the tokenizer can give ids that the model's embedding has no row for."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if highest >= vocab_size:
        raise ConfigError(
            f"the tokenizer has token ids up to {highest} ({token!r}), the model has "
            f"vocab_size={vocab_size}; allowed: ids below vocab_size. "
            f"The tokenizer and config.json of model.path are not of the same model"
        )
