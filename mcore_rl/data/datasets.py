"""Parquet files as token ids: prompts to answer, and pairs to imitate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.checks import exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig
from mcore_rl.data.batch import Batch, Jagged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One question, as the policy will read it."""

    prompt_ids: list[int]
    fields: dict[str, Any]  # "answer" and the file's other columns, for the reward


class PromptDataset:
    """Prompts by row number."""

    def __init__(self, prompts: Sequence[PromptRow]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, row: int) -> PromptRow:
        return self._prompts[row]


def load_prompts(
    path: str | Path,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    setting: str = "data.train_file",
) -> PromptDataset:
    """Chats of a parquet file through the tokenizer's chat template, ready for a response.

    `setting` is the key that named `path`. Raises ConfigError, naming it, when the file is missing,
    is no parquet, is empty, lacks a column or an answer or has a prompt over max_prompt_tokens.
    """
    table = _read(path, setting)
    _require_column(table, config.prompt_column, "data.prompt_column", path, setting)
    _require_column(table, config.answer_column, "data.answer_column", path, setting)
    prompts = _prompt_ids(table, config.prompt_column, tokenizer, path, setting)
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    if len(prompts[longest]) > config.max_prompt_tokens:
        raise ConfigError(
            f"{setting}={str(path)!r}: the prompt of row {longest} has {len(prompts[longest])} "
            f"tokens; allowed: up to data.max_prompt_tokens={config.max_prompt_tokens}"
        )
    answers = table.column(config.answer_column).to_pylist()
    for row, answer in enumerate(answers):
        if answer is None or answer != answer:  # what pandas writes for a missing number
            raise ConfigError(
                f"{setting}={str(path)!r}: row {row} has no answer in column "
                f"{config.answer_column!r} (data.answer_column): it is {answer}"
            )
    others = table.drop_columns([config.prompt_column]).to_pylist()
    return PromptDataset(
        [
            PromptRow(ids, {**fields, "answer": answer})
            for ids, fields, answer in zip(prompts, others, answers, strict=True)
        ]
    )


def load_supervised(
    path: str | Path,
    prompt_column: str,
    response_column: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    setting: str = "warm_start.train_file",
) -> Batch:
    """Chats and the responses to imitate, with the end-of-sequence token appended to each response.

    Returns the jagged columns prompt_ids, response_ids and response_mask (all ones). Raises
    ConfigError as `load_prompts` does.
    """
    table = _read(path, setting)
    _require_column(table, prompt_column, "data.prompt_column", path, setting)
    _require_column(table, response_column, "warm_start.response_column", path, setting)
    prompts = _prompt_ids(table, prompt_column, tokenizer, path, setting)
    texts = table.column(response_column).to_pylist()
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(
                f"{setting}={str(path)!r}: row {row} of column {response_column!r} "
                f"(warm_start.response_column) is {str(text)[:80]!r}; it must be text"
            )
    responses = [[*ids, tokenizer.eos_token_id] for ids in _encode(texts, tokenizer)]
    response_ids = Jagged.of(responses, np.int64)
    return Batch(
        {
            "prompt_ids": Jagged.of(prompts, np.int64),
            "response_ids": response_ids,
            "response_mask": response_ids.with_values(np.ones(len(response_ids.values), np.int8)),
        }
    )


def check_parquet(path: str | Path, setting: str) -> None:
    """Raise ConfigError, naming `setting`, when `path` is no parquet file with rows in it."""
    _read(path, setting, columns=[])


def _read(path: str | Path, setting: str, columns: list[str] | None = None) -> pa.Table:
    exists(setting, path)
    if not Path(path).is_file():
        raise ConfigError(f"{setting}={str(path)!r} is not a file; it must be a parquet file")
    try:
        table = pq.read_table(path, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{setting}={str(path)!r} cannot be read as parquet: {error}") from error
    if table.num_rows == 0:
        raise ConfigError(f"{setting}={str(path)!r} has no rows")
    return table


def _require_column(
    table: pa.Table, column: str, column_setting: str, path: str | Path, setting: str
) -> None:
    if column not in table.column_names:
        raise ConfigError(
            f"{setting}={str(path)!r} has no column {column!r} ({column_setting}); "
            f"it has: {', '.join(table.column_names)}"
        )


def _prompt_ids(
    table: pa.Table,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    setting: str,
) -> list[list[int]]:
    chats = table.column(column).to_pylist()
    for row, chat in enumerate(chats):
        if not _is_chat(chat):
            raise ConfigError(
                f"{setting}={str(path)!r}: row {row} of column {column!r} (data.prompt_column) is "
                f"{str(chat)[:80]!r}; it must be a list of messages with a role and a content "
                "of text"
            )
    texts = [_templated(chat, tokenizer, row, path, setting) for row, chat in enumerate(chats)]
    return _encode(texts, tokenizer)


def _templated(
    chat: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    path: str | Path,
    setting: str,
) -> str:
    from jinja2 import TemplateError  # comes with transformers

    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:  # many templates refuse roles, or their order
        raise ConfigError(
            f"{setting}={str(path)!r}: row {row} does not fit the model's chat template: {error}"
        ) from error
    return str(text)


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(m, dict) and all(isinstance(m.get(n), str) for n in ("role", "content"))
            for m in value
        )
    )


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text; the chat template has already written every special token."""
    different = list(dict.fromkeys(texts))  # questions and short answers come many times
    encoded = tokenizer(different, add_special_tokens=False, return_attention_mask=False)
    ids: dict[str, list[int]] = dict(zip(different, encoded["input_ids"], strict=True))
    return [ids[text] for text in texts]
