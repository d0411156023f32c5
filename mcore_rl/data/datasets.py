"""Rows of data as token ids: prompts to answer, and pairs to imitate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.chat_template import ChatTemplate, ChatTemplateError
from mcore_rl.data.digest import Digest
from mcore_rl.data.files import Row, RowSource, open_rows
from mcore_rl.data.rows import Column, FilesInOrder, Message, chat, tool_schemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 1000  # rows that are tokenised together


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One question, as the policy will read it."""

    prompt_ids: list[int]
    fields: dict[str, Any]  # "answer" and the file's other columns, for the reward
    messages: list[Message] = field(default_factory=list)  # what the prompt was made of


class PromptDataset(FilesInOrder["Sequence[PromptRow] | FilePrompts", PromptRow]):
    """Prompts of files."""

    def take(self, rows: Sequence[int]) -> list[PromptRow]:
        """Several, whose texts are tokenised together."""
        found: dict[int, PromptRow] = {}
        of_files: dict[int, dict[int, int]] = {}
        for row in rows:
            file, number = self._place(row)
            of_files.setdefault(file, {})[row] = number
        for file, numbers in of_files.items():
            source = self._files[file]
            if isinstance(source, FilePrompts):
                taken = source.take([*numbers.values()])
            else:
                taken = [source[number] for number in numbers.values()]
            found |= dict(zip(numbers, taken, strict=True))
        return [found[row] for row in rows]

    def row_number(self, row: int) -> int:
        """Where a prompt is in its files, counted one after the other with what was left out."""
        file, prompt = self._place(row)
        before = sum(
            f.num_rows if isinstance(f, FilePrompts) else len(f) for f in self._files[:file]
        )
        found = self._files[file]
        return before + (found.row_number(prompt) if isinstance(found, FilePrompts) else prompt)


class FilePrompts:
    """The prompts of a source, read and tokenised when they are asked for.

    A first pass over all rows checks them, finds the prompts that are too long, and computes
    `digest` of all columns.
    """

    def __init__(
        self,
        rows: RowSource,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        check_chat: Callable[[list[Message]], object] | None = None,
        check_answer: Callable[[Any], object] | None = None,
    ) -> None:
        """The checks raise ConfigError for a chat, and ValueError for an answer, of no use."""
        self._rows, self._check_chat, self._check_answer = rows, check_chat, check_answer
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self._prompt = Column(config.prompt_column, "data.prompt_column")
        self._answer = Column(config.answer_column, "data.answer_column")
        self._tools = _tools_column(config.tools_column)
        digest = Digest()
        lengths = self._checked_lengths(digest)
        self.digest = digest.hexdigest()
        is_short = lengths <= config.max_prompt_tokens
        self.num_dropped = int((~is_short).sum())
        self._kept: npt.NDArray[np.int64] | None = None  # None: all of them
        if self.num_dropped:
            if config.long_prompts == "refuse" or not is_short.any():
                raise self._too_long(lengths, config)
            self._kept = np.flatnonzero(is_short)

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else len(self._kept)

    @property
    def num_rows(self) -> int:
        """Those of the source, with the ones that are left out."""
        return len(self._rows)

    def row_number(self, prompt: int) -> int:
        """The row of the source that a prompt is from."""
        return prompt if self._kept is None else int(self._kept[prompt])

    def __getitem__(self, prompt: int) -> PromptRow:
        return self.take([prompt])[0]

    def take(self, prompts: Sequence[int]) -> list[PromptRow]:
        rows = [self._rows[self.row_number(prompt)] for prompt in prompts]
        chats = [chat(row, self._prompt) for row in rows]
        ids = _encode(list(map(self._text, rows, chats)), self._tokenizer)
        return list(map(self._prompt_row, rows, ids, chats))

    def _prompt_row(self, row: Row, ids: list[int], messages: list[Message]) -> PromptRow:
        fields = {n: value for n, value in row.values.items() if n != self._prompt.name}
        return PromptRow(ids, {**fields, "answer": self._answer.of(row)}, messages)

    def _text(self, row: Row, messages: list[Message]) -> str:
        return _prompt_text(row, messages, self._tools, self._template)

    def _checked_lengths(self, digest: Digest) -> npt.NDArray[np.int32]:
        """The tokens of each row's prompt; ConfigError for the first row that is not valid."""
        lengths = [np.empty(0, np.int32)]
        for rows in _chunks(self._rows):
            chats = [chat(row, self._prompt) for row in rows]
            texts = list(map(self._text, rows, chats))
            for row, messages in zip(rows, chats, strict=True):
                self._check_row(row, messages)
                digest.add(row.values)
            lengths.append(np.array([len(i) for i in _encode(texts, self._tokenizer)], np.int32))
        return np.concatenate(lengths)

    def _check_row(self, row: Row, messages: list[Message]) -> None:
        answer = self._answer.of(row)
        if answer is None or answer != answer:  # what pandas writes for a missing number
            raise row.refusal(f"has no answer in {self._answer}: it is {answer}")
        try:
            if self._check_chat is not None:
                self._check_chat(messages)
        except ConfigError as error:
            raise row.refusal(f"of {self._prompt} cannot be used: {error}") from error
        try:
            if self._check_answer is not None:
                self._check_answer(answer)
        except ValueError as error:
            raise row.refusal(f"has an answer that no response can earn: {error}") from error

    def _too_long(self, lengths: npt.NDArray[np.int32], config: DataConfig) -> ConfigError:
        longest, limit = int(lengths.argmax()), f"data.max_prompt_tokens={config.max_prompt_tokens}"
        source = f"{self._rows.source}:"
        told = f"the prompt of row {longest} has {lengths[longest]} tokens; allowed: up to {limit}"
        if self.num_dropped == len(lengths):
            return ConfigError(f"{source} no row is short enough: {told}")
        return ConfigError(
            f"{source} {told}, or data.long_prompts=drop, which leaves out {self.num_dropped} of "
            f"{len(lengths)} rows"
        )


def load_prompts(
    path: str | Path,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    setting: str = "data.train_file",
    check_chat: Callable[[list[Message]], object] | None = None,
    check_answer: Callable[[Any], object] | None = None,
) -> FilePrompts:
    """Chats of a source (`open_rows`) through the tokenizer's chat template, ready for a response.

    `setting` is the key that named `path`. Raises ConfigError, naming it, when the source is
    missing, cannot be read or is empty, or a row lacks a column or an answer or is no chat. Prompts
    over max_prompt_tokens raise it, or are left out, as data.long_prompts says. So do a chat on
    which `check_chat` raises it, and an answer on which `check_answer` raises ValueError.
    """
    return FilePrompts(open_rows(path, setting), config, tokenizer, check_chat, check_answer)


def load_supervised(
    path: str | Path,
    prompt_column: str,
    response_column: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools_column: str = "",
    setting: str = "warm_start.train_file",
) -> Batch:
    """Chats and the responses to imitate, with the end-of-sequence token appended to each response.

    Returns the jagged columns prompt_ids, response_ids and response_mask (all ones), in memory.
    Raises ConfigError as `load_prompts` does.
    """
    prompt = Column(prompt_column, "data.prompt_column")
    response = Column(response_column, "warm_start.response_column")
    tools = _tools_column(tools_column)
    template, prompts = ChatTemplate(tokenizer), list[list[int]]()
    responses: list[list[int]] = []
    for rows in _chunks(open_rows(path, setting)):
        texts = [_prompt_text(row, chat(row, prompt), tools, template) for row in rows]
        answers = [response.text(row) for row in rows]
        prompts += _encode(texts, tokenizer)
        responses += [[*ids, tokenizer.eos_token_id] for ids in _encode(answers, tokenizer)]
    response_ids = Jagged.of(responses, np.int64)
    return Batch(
        {
            "prompt_ids": Jagged.of(prompts, np.int64),
            "response_ids": response_ids,
            "response_mask": response_ids.with_values(np.ones(len(response_ids.values), np.int8)),
        }
    )


def _num_rows(file: Sequence[PromptRow] | FilePrompts) -> int:
    return file.num_rows if isinstance(file, FilePrompts) else len(file)


def _tools_column(name: str) -> Column | None:
    return Column(name, "data.tools_column") if name else None


def _chunks(rows: RowSource) -> Iterator[list[Row]]:
    left = iter(rows)
    while chunk := list(islice(left, _AT_ONCE)):
        yield chunk


def _prompt_text(
    row: Row, messages: list[Message], tools: Column | None, template: ChatTemplate
) -> str:
    """The chat of a row as the template writes it, up to where the response begins."""
    try:
        return template.write(messages, tool_schemas(row, tools), add_generation_prompt=True)[0]
    except ChatTemplateError as error:
        raise row.refusal(str(error)) from error


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text; the chat template has already written every special token."""
    different = list(dict.fromkeys(texts))  # questions and short answers come many times
    encoded = tokenizer(different, add_special_tokens=False, return_attention_mask=False)
    ids: dict[str, list[int]] = dict(zip(different, encoded["input_ids"], strict=True))
    return [ids[text] for text in texts]
