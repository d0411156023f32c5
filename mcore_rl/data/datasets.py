"""Tokenised data: prompts to answer, and prompts with responses to imitate."""

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
from mcore_rl.data.batch import Batch, Jagged, pack_images
from mcore_rl.data.chat_template import ChatTemplate, ChatTemplateError
from mcore_rl.data.files import Digest, Row, RowSource, open_rows
from mcore_rl.data.image_files import ImageError, StoredImage
from mcore_rl.data.images import IMAGE, RowImages
from mcore_rl.data.rows import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    ConcatFiles,
    Message,
    RowColumn,
    choose_answer_column,
    choose_prompt_column,
    read_chat,
    read_tool_schemas,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_ROWS = 1000  # rows tokenised together
_IMAGE_CHUNK_ROWS = 16  # the same of rows with images, whose files are in memory meanwhile
_IMAGE_COLUMNS = ("images", "image")  # of published data


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt as the policy reads it."""

    prompt_ids: list[int]  # with all tokens of its images
    fields: dict[str, Any]  # "answer", if there is one, and other columns of the file
    messages: list[Message] = field(default_factory=list)  # the prompt as a chat
    images: tuple[str, ...] = ()  # digests in the ImageStore, in the order of the prompt


class PromptDataset(ConcatFiles["Sequence[PromptRow] | FilePrompts", PromptRow]):
    """Prompts of one or more files."""

    def take(self, rows: Sequence[int]) -> list[PromptRow]:
        """Return prompts; those of a file are tokenised together."""
        prompts: dict[int, PromptRow] = {}
        rows_by_file: dict[int, dict[int, int]] = {}
        for row in rows:
            file, index = self._locate(row)
            rows_by_file.setdefault(file, {})[row] = index
        for file, indices in rows_by_file.items():
            source = self._files[file]
            if isinstance(source, FilePrompts):
                taken = source.take([*indices.values()])
            else:
                taken = [source[index] for index in indices.values()]
            prompts |= dict(zip(indices, taken, strict=True))
        return [prompts[row] for row in rows]

    def get_row_number(self, row: int) -> int:
        """Return the row of a prompt in the concatenated files, with dropped rows counted."""
        file, prompt = self._locate(row)
        num_before = sum(
            f.num_rows if isinstance(f, FilePrompts) else len(f) for f in self._files[:file]
        )
        source = self._files[file]
        return num_before + (
            source.get_row_number(prompt) if isinstance(source, FilePrompts) else prompt
        )


class FilePrompts:
    """Prompts of a source, read and tokenised on access.

    A first pass over all rows checks them, finds prompts that are too long, and computes `digest`
    of all columns.
    """

    def __init__(
        self,
        rows: RowSource,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        check_chat: Callable[[list[Message]], object] | None = None,
        check_answer: Callable[[Any], object] | None = None,
        images: RowImages | None = None,
        num_checked: int | None = None,
    ) -> None:
        """Check all rows; check_chat raises ConfigError, check_answer ValueError.

        Rows need an answer if there is a check of it or a setting that names its column.

        Args:
            num_checked: Rows to check, of a source whose other rows are like the first. None: all.
        """
        self._rows, self._check_chat, self._check_answer = rows, check_chat, check_answer
        self._images = images
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self.prompt_column = choose_prompt_column(rows[0], config)
        self.answer_column: RowColumn | None = choose_answer_column(rows[0], config)
        is_needed = check_answer is not None or config.answer_column is not None
        if not is_needed and self.answer_column.name not in rows[0].values:
            self.answer_column = None
        self._is_set = config.prompt_column is not None, config.answer_column is not None
        self._unread_images = "" if images else self._find_unread_images(rows[0])
        self._tools = _build_tools_column(config.tools_column)
        digest = Digest()
        lengths = self._check_rows(digest, num_checked)
        self.digest = digest.hexdigest()
        is_short = lengths <= config.prompt_limit
        self.num_dropped = int((~is_short).sum())
        self._prompt_rows: npt.NDArray[np.int64] | None = None  # None: all rows
        if self.num_dropped:
            if config.long_prompts == "refuse" or not is_short.any():
                raise self._build_length_error(lengths, config)
            self._prompt_rows = np.flatnonzero(is_short)

    def __len__(self) -> int:
        return len(self._rows) if self._prompt_rows is None else len(self._prompt_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the source, including dropped ones."""
        return len(self._rows)

    def describe_columns(self) -> Iterator[str]:
        """Yield a line for each column that was chosen by name, as no setting names it."""
        columns = self.prompt_column, self.answer_column
        for column, is_set in zip(columns, self._is_set, strict=True):
            if column and not is_set and column.name not in (PROMPT_COLUMNS[0], ANSWER_COLUMNS[0]):
                source, setting = self._rows.source, column.setting
                yield f"{source}: column {column.name!r} is read, as {setting} is not set"
        if name := self._unread_images:
            yield (
                f"{self._rows.source}: prompts are text alone: column {name!r} is not read, as "
                f"data.images_column is not set"
            )

    def _find_unread_images(self, row: Row) -> str:
        """Return the column of images that no setting names, if there is one.

        Raises:
            ConfigError: The prompt has places for them.
        """
        name = next((name for name in _IMAGE_COLUMNS if row.values.get(name)), "")
        if name and IMAGE in str(row.values.get(self.prompt_column.name)):
            raise row.build_error(
                f"has {IMAGE} in its prompt and images in column {name!r}, which is not read; "
                f"allowed: data.images_column={name}, or rows without that column"
            )
        return name

    def get_row_number(self, prompt: int) -> int:
        """Return the row of the source that a prompt is from."""
        return prompt if self._prompt_rows is None else int(self._prompt_rows[prompt])

    def __getitem__(self, prompt: int) -> PromptRow:
        return self.take([prompt])[0]

    def take(self, prompts: Sequence[int]) -> list[PromptRow]:
        """Return prompts, tokenised together."""
        rows = [self._rows[self.get_row_number(prompt)] for prompt in prompts]
        chats, images = read_chats(rows, self.prompt_column, self._images)
        ids = _encode_prompts(list(map(self._render, rows, chats)), self._tokenizer)
        ids = expand_images(rows, ids, images, self._images)
        return list(map(self._build_row, rows, ids, chats, images))

    def _build_row(
        self, row: Row, ids: list[int], messages: list[Message], images: list[StoredImage]
    ) -> PromptRow:
        dropped = {self.prompt_column.name, *([self._images.column.name] if self._images else [])}
        fields = {n: value for n, value in row.values.items() if n not in dropped}
        if self.answer_column is not None:
            fields["answer"] = self.answer_column.get(row)
        return PromptRow(ids, fields, messages, store_images(row, images, self._images))

    def _render(self, row: Row, messages: list[Message]) -> str:
        return _render_prompt(row, self.prompt_column, messages, self._tools, self._template)

    def _check_rows(self, digest: Digest, num_checked: int | None) -> npt.NDArray[np.int32]:
        """Return the number of prompt tokens of each row; ConfigError for the first invalid row.

        Rows that are not checked have the lengths of those that are.
        """
        lengths, num_images, names = [np.empty(0, np.int32)], 0, set[str]()
        for rows in _iterate_chunks(self._rows, self._images, num_checked):
            chats, images = read_chats(rows, self.prompt_column, self._images)
            texts = list(map(self._render, rows, chats))
            for row, messages in zip(rows, chats, strict=True):
                self._check_row(row, messages)
                digest.add(row.values)
            ids = _encode_prompts(texts, self._tokenizer)
            ids = expand_images(rows, ids, images, self._images)
            lengths.append(np.array(list(map(len, ids)), np.int32))
            num_images += sum(map(len, images))
            names.update(*(row.values for row in rows))
        if self._images is not None:
            self._images.check_column(self._rows.source, num_images, names)
        return np.resize(np.concatenate(lengths), len(self._rows))

    def _check_row(self, row: Row, messages: list[Message]) -> None:
        answer = None if self.answer_column is None else self.answer_column.get(row)
        # NaN is what pandas writes for a missing number.
        if self.answer_column is not None and (answer is None or answer != answer):
            raise row.build_error(f"has no answer in {self.answer_column}: it is {answer}")
        try:
            if self._check_chat is not None:
                self._check_chat(messages)
        except ConfigError as error:
            raise row.build_error(f"of {self.prompt_column} cannot be used: {error}") from error
        try:
            if self._check_answer is not None:
                self._check_answer(answer)
        except ValueError as error:
            raise row.build_error(f"has an answer that no response can earn: {error}") from error

    def _build_length_error(
        self, lengths: npt.NDArray[np.int32], config: DataConfig
    ) -> ConfigError:
        longest, limit = int(lengths.argmax()), f"data.max_prompt_tokens={config.prompt_limit}"
        source = f"{self._rows.source}:"
        length = (
            f"the prompt of row {longest} has {lengths[longest]} tokens; allowed: up to {limit}"
        )
        if self.num_dropped == len(lengths):
            return ConfigError(f"{source} no row is short enough: {length}")
        return ConfigError(
            f"{source} {length}, or data.long_prompts=drop, which leaves out {self.num_dropped} of "
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
    images: RowImages | None = None,
    num_checked: int | None = None,
) -> FilePrompts:
    """Load chats or texts of a source (`open_rows`) as prompts, by the tokenizer's chat template.

    A text is a message of the user or, without a chat template, the prompt as it is.

    Args:
        path: File, folder or import path.
        config: Names of columns; prompts over max_prompt_tokens are refused or dropped, by
            data.long_prompts.
        tokenizer: Tokenizer, of a base model also without a chat template.
        setting: Key that named `path`, for errors.
        check_chat: Raises ConfigError for a chat that cannot be used.
        check_answer: Raises ValueError for an answer that cannot be used.
        images: Reader of the rows' images, for a model that takes images.
        num_checked: See `FilePrompts`.

    Raises:
        ConfigError: the source is missing, unreadable or empty, or a row lacks a column or an
            answer, is no chat, is too long, or fails a check.
    """
    rows = open_rows(path, setting)
    return FilePrompts(rows, config, tokenizer, check_chat, check_answer, images, num_checked)


def load_supervised(
    path: str | Path,
    config: DataConfig,
    response_column: str,
    tokenizer: PreTrainedTokenizerBase,
    images: RowImages | None = None,
    num_rows: int | None = None,
) -> Batch:
    """Load chats and responses to imitate, of all rows or the first `num_rows`.

    Each response ends with the end-of-sequence token.
    Returns the jagged columns prompt_ids, response_ids and response_mask (all ones), in memory, and
    images if there are any.
    Raises ConfigError as `load_prompts` does.
    """
    source = open_rows(path, "warm_start.train_file")
    prompt = choose_prompt_column(source[0], config)
    response = RowColumn(response_column, "warm_start.response_column")
    tools = _build_tools_column(config.tools_column)
    template, prompts = ChatTemplate(tokenizer), list[list[int]]()
    responses: list[list[int]] = []
    digests: list[tuple[str, ...]] = []
    for rows in _iterate_chunks(source, images, num_rows):
        chats, files = read_chats(rows, prompt, images)
        pairs = zip(rows, chats, strict=True)
        texts = [_render_prompt(row, prompt, chat, tools, template) for row, chat in pairs]
        answers = [response.get_text(row) for row in rows]
        prompts += expand_images(rows, _encode_prompts(texts, tokenizer), files, images)
        digests += [store_images(*pair, images) for pair in zip(rows, files, strict=True)]
        responses += [[*ids, tokenizer.eos_token_id] for ids in _encode(answers, tokenizer)]
    response_ids = Jagged.pack(responses, np.int64)
    return Batch(
        {
            "prompt_ids": Jagged.pack(prompts, np.int64),
            "response_ids": response_ids,
            "response_mask": response_ids.with_values(np.ones(len(response_ids.values), np.int8)),
            **pack_images(digests),
        }
    )


def read_chats(
    rows: Sequence[Row], column: RowColumn, images: RowImages | None
) -> tuple[list[list[Message]], list[list[StoredImage]]]:
    """Read the prompts of rows as chats, and the images of each, in the order of the chat."""
    with_images = images is not None
    chats = [read_chat(row, column, text_role="user", with_images=with_images) for row in rows]
    if images is None:
        return chats, [[] for _ in rows]
    return chats, [images.place(row, chat) for row, chat in zip(rows, chats, strict=True)]


def expand_images(
    rows: Sequence[Row],
    ids: list[list[int]],
    images: Sequence[Sequence[StoredImage]],
    reader: RowImages | None,
) -> list[list[int]]:
    """Return token ids with all tokens of their images; ConfigError names the row of a mismatch."""
    if reader is None:
        return ids
    expanded = []
    for row, tokens, placed in zip(rows, ids, images, strict=True):
        try:
            expanded.append(reader.tokens.expand(tokens, [image.size for image in placed]))
        except ImageError as error:
            raise row.build_error(str(error)) from error
    return expanded


def store_images(
    row: Row, images: Sequence[StoredImage], reader: RowImages | None
) -> tuple[str, ...]:
    """Store the images of a row; return their digests. ConfigError names a damaged one's row."""
    if reader is None:
        return ()
    try:
        return tuple(map(reader.store.add, images))
    except ImageError as error:
        raise row.build_error(f"has an image that {error}") from error


def _build_tools_column(name: str) -> RowColumn | None:
    return RowColumn(name, "data.tools_column") if name else None


def _iterate_chunks(
    rows: RowSource, images: RowImages | None, num_rows: int | None = None
) -> Iterator[list[Row]]:
    remaining, num = islice(rows, num_rows), _CHUNK_ROWS if images is None else _IMAGE_CHUNK_ROWS
    while chunk := list(islice(remaining, num)):
        yield chunk


def _render_prompt(
    row: Row,
    prompt: RowColumn,
    messages: list[Message],
    tools: RowColumn | None,
    template: ChatTemplate,
) -> str:
    """Render the chat of a row up to where the response begins."""
    schemas = read_tool_schemas(row, tools)
    is_text = isinstance(prompt.get(row), str)
    if is_text and not schemas and not template.tokenizer.chat_template:  # a base model
        return str(messages[0]["content"])
    try:
        return template.write(messages, schemas, add_generation_prompt=True)[0]
    except ChatTemplateError as error:
        raise row.build_error(str(error)) from error


def _encode_prompts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Encode prompts: a chat template has written all special tokens already, as BOS.

    Without a template they are added as vLLM's completions and TRL do, except a last EOS.
    """
    if tokenizer.chat_template:
        return _encode(texts, tokenizer)
    ids = _encode(texts, tokenizer, add_special_tokens=True)
    return [row[:-1] if row[-1] == tokenizer.eos_token_id else row for row in ids]


def _encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = False
) -> list[list[int]]:
    different = list(dict.fromkeys(texts))  # questions and short answers repeat
    encoded = tokenizer(
        different, add_special_tokens=add_special_tokens, return_attention_mask=False
    )
    ids: dict[str, list[int]] = dict(zip(different, encoded["input_ids"], strict=True))
    return [ids[text] for text in texts]
