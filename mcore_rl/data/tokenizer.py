"""Tokenizers of checkpoints: loading, and checks that they fit their model."""

from __future__ import annotations

import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.config.checks import check_model_exists
from mcore_rl.config.errors import ConfigError, describe_error
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.schema import ModelConfig
from mcore_rl.data.template_limits import limit_chat_templates
from mcore_rl.observability.process import exempt_imports_from_gc

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Without any of these transformers makes an empty tokenizer from the model type.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_AUTO = "transformers.models.auto.auto_factory"


def load_tokenizer(
    path: str | Path, chat_date: str = ModelConfig.chat_date, *, needs_template: bool = True
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder (model.path) from local files only.

    Its chat template writes `chat_date` (model.chat_date) as today's date.

    Args:
        needs_template: False allows a base model without a chat template.

    Raises:
        ConfigError: the folder has no tokenizer, or it lacks an end-of-sequence token or a chat
            template that it needs.
    """
    tokenizer = read_tokenizer(path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of model.path={str(path)!r} has no eos_token; it needs one"
        )
    if needs_template and not tokenizer.chat_template:
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
    tokenizer.apply_chat_template = partial(
        tokenizer.apply_chat_template, strftime_now=day.strftime, date_string=f"{day:%d %b %Y}"
    )


def has_tokenizer(path: str | Path) -> bool:
    """Return whether the folder contains the vocabulary of a tokenizer."""
    return any(Path(path, name).is_file() for name in _FILES)


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load any tokenizer, also of a base model; ConfigError if the folder has none."""
    transformers = import_transformers()
    check_model_exists("model.path", path)
    if not Path(path).is_dir():
        raise ConfigError(f"model.path={str(path)!r} is not a folder")
    if not has_tokenizer(path):
        raise ConfigError(
            f"model.path={str(path)!r} has no tokenizer; it needs one of: {', '.join(_FILES)}"
        )
    limit_chat_templates()
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # damaged files raise anything, also panics of Rust
        raise ConfigError(
            f"model.path={str(path)!r} has a tokenizer that does not load: "
            f"{describe_error(error, 300)}; "
            "allowed: the files of a Hugging Face tokenizer"
        ) from error
    return tokenizer


def read_stop_ids(path: str | Path, setting: str = "model.path") -> tuple[int, ...]:
    """Read the tokens at which a server ends a response, besides the tokenizer's eos_token.

    As vLLM does (config/model.py:1812), from eos_token_id of generation_config.json or, without
    that file, of config.json or its text_config.

    Raises:
        ConfigError: it is neither a token id, a list of them, nor null.
    """
    for name in ("generation_config.json", "config.json"):
        if (file := Path(path, name)).is_file():
            break
    else:
        return ()
    config = read_json_object(file)
    value, inner = config.get("eos_token_id"), config.get("text_config")
    if value is None and file.name == "config.json" and isinstance(inner, dict):
        value = inner.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(
            f"{setting}={str(path)!r}: {file.name} has eos_token_id={value!r}; allowed: a token "
            "id, a list of them, or null"
        )
    return tuple(ids)


def check_tokenizer_matches(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has ids without a row in the model's embedding."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if highest >= vocab_size:
        raise ConfigError(
            f"the tokenizer has token ids up to {highest} ({token!r}), the model has "
            f"vocab_size={vocab_size}; allowed: ids below vocab_size. "
            f"The tokenizer and config.json of model.path are not of the same model"
        )


def import_transformers() -> Any:
    """Import transformers for tokenizers and configs, without generation; return the package.

    auto_factory.py:41 (transformers 5.19) imports all of generation, with torch's compiler and
    distributed tensors, for a mixin of remote-code models: 1.5 of 3.5 CPU seconds. Here the mixin
    is imported when it is used.
    """
    with exempt_imports_from_gc():  # slow to import
        import transformers

        if _AUTO not in sys.modules:
            _import_without_generation()
    return transformers


def _import_without_generation() -> None:
    from transformers import generation

    generation.GenerationMixin = type("GenerationMixin", (), {})
    try:
        from transformers.models.auto import auto_factory
    finally:
        del generation.GenerationMixin  # the next import gets the real one
    upstream = auto_factory.add_generation_mixin_to_remote_model

    def add_generation_mixin_to_remote_model(model_class: Any) -> Any:
        auto_factory.GenerationMixin = generation.GenerationMixin
        return upstream(model_class)

    auto_factory.add_generation_mixin_to_remote_model = add_generation_mixin_to_remote_model
