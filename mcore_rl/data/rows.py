"""Columns with checked contents, and rows of supervised and of preference training."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mcore_rl.config.errors import ConfigError

if TYPE_CHECKING:
    from mcore_rl.config.schema import DataConfig, SetsConfig
    from mcore_rl.data.files import Row, RowSource

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Message = dict[str, Any]  # role, content, and other keys that a chat template reads: tool_calls
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of reasoning beside content
IMAGE_MARK = "\ue002"  # a private character: the place of an image in the content of a message
# Columns that published data has, where data.prompt_column or data.answer_column is not set.
PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "label")
_CHAT = "a list of messages with a role and a content of text"
_PARTS = f"{_CHAT}, or of parts of the types text and, with data.images_column, image or image_url"
_IMAGE_TYPES = ("image", "image_url")
_CALLS = (
    "a chat whose calls are objects with a name and with arguments, which are an object or its "
    "JSON text"
)
_TOOLS = "a list of tool schemas, each an object, or that list as JSON text"


@dataclass(frozen=True, slots=True)
class RowColumn:
    """A column of data rows by its name, and the setting that names it, if any."""

    name: str
    setting: str = ""

    def __str__(self) -> str:
        return f"column {self.name!r}" + (f" ({self.setting})" if self.setting else "")

    def get(self, row: Row) -> Any:
        """Return the value in a row; ConfigError if the row has no such column."""
        if self.name not in row.values:
            raise row.build_error(f"has no {self}; it has: {', '.join(row.values)}")
        return row.values[self.name]

    def get_text(self, row: Row) -> str:
        """Return the value in a row; ConfigError if it is no text."""
        value = self.get(row)
        if not isinstance(value, str):
            raise self.build_error(row, value, "text")
        return value

    def build_error(self, row: Row, value: object, allowed: str) -> ConfigError:
        """Build the error for a value that is not allowed."""
        return row.build_error(f"of {self} is {str(value)[:80]!r}; it must be {allowed}")


def choose_column(row: Row, name: str | None, setting: str, names: Sequence[str]) -> RowColumn:
    """Return the column that a setting names or, if it is None, the first of `names` in a row.

    Without any of them it is the first name, whose absence is an error when it is read.
    """
    if name is None:
        name = next((known for known in names if known in row.values), names[0])
    return RowColumn(name, setting)


def choose_prompt_column(row: Row, config: DataConfig | SetsConfig) -> RowColumn:
    """Return the column of prompts, by the columns of the first row of a source."""
    return choose_column(row, config.prompt_column, "data.prompt_column", PROMPT_COLUMNS)


def choose_answer_column(row: Row, config: DataConfig | SetsConfig) -> RowColumn:
    """Return the column of answers, by the columns of the first row of a source."""
    return choose_column(row, config.answer_column, "data.answer_column", ANSWER_COLUMNS)


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """A conversation with the messages to train on."""

    messages: list[Message]
    is_trained: list[bool]  # of each message
    tools: list[dict[str, Any]]  # schemas for the chat template
    images: Sequence[Any] = ()  # of the messages, in their order (StoredImage)


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt and two continuations, of which the first is preferred."""

    prompt: list[Message]
    chosen: list[Message]  # after the prompt; the last message is the assistant's
    rejected: list[Message]
    margin: float | None  # by how much `chosen` is better, if the data has it
    tools: list[dict[str, Any]]  # schemas for the chat template


class TypedRows(Generic[T]):
    """Rows of a source, each checked and parsed to a T when it is read.

    An invalid row is a ConfigError that names source, row, column, value and what is allowed.
    """

    def __init__(self, rows: RowSource | Sequence[Row], parse: Callable[[Row], T]) -> None:
        self._rows = rows
        self._parse = parse

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> T:
        return self._parse(self._rows[row])

    def __iter__(self) -> Iterator[T]:
        return map(self._parse, self._rows)


class Indexed(Protocol[T_co]):
    """Rows of a file by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> T_co: ...


F = TypeVar("F", bound=Indexed[Any])


class ConcatFiles(Generic[F, T]):
    """Rows of several files, one file after the other, by index."""

    def __init__(self, *files: F) -> None:
        self._files = files
        self._ends = list(accumulate(len(file) for file in files))

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each file."""
        return [len(file) for file in self._files]

    @property
    def digests(self) -> list[str]:
        """Digest of each file; "" for rows that are in no file."""
        return [getattr(file, "digest", "") for file in self._files]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> T:
        file, index = self._locate(row)
        item: T = self._files[file][index]
        return item

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the index of the row's file, and the index of the row in it."""
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def read_supervised_rows(
    rows: RowSource | Sequence[Row],
    messages: RowColumn,
    tools: RowColumn | None = None,
    place_images: Callable[[Row, list[Message]], Sequence[Any]] | None = None,
) -> TypedRows[SupervisedRow]:
    """Read conversations, to train on the messages of the assistant.

    `train` of a message, true or false, overrides that. A row without a message to train on is
    refused.

    Args:
        place_images: Writes the images of a row into its messages, and returns them
            (RowImages.place). None: rows have no images.
    """

    def parse(row: Row) -> SupervisedRow:
        chat = read_chat(row, messages, with_images=place_images is not None)
        images = place_images(row, chat) if place_images else ()
        flags = [message.pop("train", message["role"] == "assistant") for message in chat]
        if not all(isinstance(flag, bool) for flag in flags):
            raise messages.build_error(row, flags, "messages whose `train` is true or false")
        if not any(flags):
            raise messages.build_error(row, chat, "a chat with a message to train on")
        return SupervisedRow(chat, flags, read_tool_schemas(row, tools), images)

    return TypedRows(rows, parse)


def read_preference_rows(
    rows: RowSource | Sequence[Row],
    prompt: RowColumn,
    chosen: RowColumn,
    rejected: RowColumn,
    margin: RowColumn | None = None,
    tools: RowColumn | None = None,
) -> TypedRows[PreferenceRow]:
    """Read prompts with a preferred and a rejected continuation, and the margin between them."""

    def parse(row: Row) -> PreferenceRow:
        messages = read_chat(row, prompt, text_role="user")
        answers = [read_chat(row, column, text_role="assistant") for column in (chosen, rejected)]
        for column, answer in zip((chosen, rejected), answers, strict=True):
            if answer[-1]["role"] != "assistant":
                raise column.build_error(
                    row, answer, f"{_CHAT}, of which the last is the assistant's"
                )
        if answers[0] == answers[1]:
            raise rejected.build_error(row, answers[1], f"another answer than {chosen.name!r}")
        return PreferenceRow(
            messages,
            answers[0],
            answers[1],
            _read_margin(row, margin),
            read_tool_schemas(row, tools),
        )

    return TypedRows(rows, parse)


def read_chat(
    row: Row, column: RowColumn, *, text_role: str = "", with_images: bool = False
) -> list[Message]:
    """Read messages with a role and a text as content; content may be null beside `tool_calls`.

    Other null keys of messages and calls are dropped. Arguments keep theirs, except in a table,
    whose objects have the keys of all rows. Arguments that are JSON text are parsed to objects.
    Parts of a content are joined to a text.

    Args:
        text_role: Role of the message that a text is taken for. "": a text is refused.
        with_images: Allow parts of images. They become IMAGE_MARK, and entries of the message's
            `images`: the image in the part, or None for the next one of the row.
    """
    value = column.get(row)
    if text_role and isinstance(value, str) and value.strip():
        return [{"role": text_role, "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        allowed = f"a text, or {_CHAT}" if text_role else _CHAT
        raise column.build_error(row, value, allowed)
    drop = drop_nulls if row.is_table else _drop_null_keys
    messages = [{"content": m.get("content")} | drop(m) for m in value]
    for message in messages:
        if isinstance(message["content"], list):
            if not with_images and any(map(_is_image, message["content"])):
                raise row.build_error(
                    f"of {column} has an image in a message; allowed: text or, of rl, sft and eval "
                    "with a model that reads images, data.images_column=images, even if no column "
                    "has that name"
                )
            try:
                message |= _join_parts(message["content"])
            except (TypeError, KeyError, ValueError) as error:
                raise column.build_error(row, message["content"], _PARTS) from error
        is_text = isinstance(message["content"], str)
        is_call = message["content"] is None and bool(message.get("tool_calls"))
        if not isinstance(message.get("role"), str) or not (is_text or is_call):
            raise column.build_error(row, value, _CHAT)
        if not all(isinstance(message.get(name, ""), str) for name in REASONING):
            raise column.build_error(row, value, f"a chat with text as {' or '.join(REASONING)}")
        if "tool_calls" in message:
            try:
                calls = message["tool_calls"]
                message["tool_calls"] = [_parse_call(call, row, column) for call in calls]
            except ConfigError:
                raise
            except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
                raise column.build_error(row, value, _CALLS) from error
    return messages


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGE_TYPES


def _join_parts(parts: list[Any]) -> Message:
    """Return content and images of a message of parts; raise for other parts."""
    content, images = "", list[Any]()
    for part in parts:
        if part["type"] == "text" and isinstance(part["text"], str):
            content += part["text"]
        elif part["type"] in _IMAGE_TYPES:
            content += IMAGE_MARK
            images.append(part.get("image_url") or part.get("image"))
        else:
            raise ValueError(part["type"])
    return {"content": content} | ({"images": images} if images else {})


def get_function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a call that has its name and arguments."""
    function: dict[str, Any] = call.get("function", call)
    return function


def _parse_call(call: dict[str, Any], row: Row, column: RowColumn) -> dict[str, Any]:
    """Return a call with its arguments as an object; raise if it is no call."""
    call = _drop_null_keys(call)
    function = _drop_null_keys(get_function(call))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = row.parse_json(column.name, arguments)
    if not isinstance(function["name"], str) or not isinstance(arguments, dict):
        raise TypeError
    json.dumps(arguments, allow_nan=False)
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else parsed


def read_tool_schemas(row: Row, column: RowColumn | None) -> list[dict[str, Any]]:
    """Read the tools of a row; none without a column, or if it is null or empty.

    The list, or a schema, may be JSON text: a table column has one type for all rows. A schema
    keeps its null keys, such as a default, unless it is an object of a table.
    """
    value = column.get(row) if column else None
    if column is None or not value:
        return []
    schemas = drop_nulls(value) if row.is_table else value
    try:
        if isinstance(value, str):
            schemas = row.parse_json(column.name, value)
        tools = [row.parse_json(column.name, t) if isinstance(t, str) else t for t in schemas]
    except ConfigError:
        raise
    except (ValueError, TypeError, RecursionError):
        schemas, tools = None, []
    if not isinstance(schemas, list) or not all(isinstance(tool, dict) for tool in tools):
        raise column.build_error(row, value, _TOOLS)
    return tools


def drop_nulls(value: Any) -> Any:
    """Drop null keys from objects, at any depth."""
    if isinstance(value, dict):
        return {key: drop_nulls(entry) for key, entry in value.items() if entry is not None}
    return [drop_nulls(entry) for entry in value] if isinstance(value, list) else value


def _drop_null_keys(value: dict[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in value.items() if entry is not None}


def _read_margin(row: Row, column: RowColumn | None) -> float | None:
    value = column.get(row) if column else None
    if column is None or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise column.build_error(row, value, "a finite number, or null")
    return float(value)
