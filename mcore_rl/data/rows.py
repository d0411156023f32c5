"""Typed rows: what a column has to contain, and rows for supervised and for preference training."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.files import Row, RowSource

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Message = dict[str, Any]  # role, content, and what else a chat template reads, such as tool_calls
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of it beside content
_CHAT = "a list of messages with a role and a content of text"
_CALLS = (
    "a chat whose calls are objects with a name and with arguments, which are an object or its "
    "JSON text"
)
_TOOLS = "a list of tool schemas, each an object, or that list as JSON text"


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its name, and the setting that names it, if one does."""

    name: str
    setting: str = ""

    def __str__(self) -> str:
        return f"column {self.name!r}" + (f" ({self.setting})" if self.setting else "")

    def of(self, row: Row) -> Any:
        """Its value; ConfigError where the row has no such column."""
        if self.name not in row.values:
            raise row.refusal(f"has no {self}; it has: {', '.join(row.values)}")
        return row.values[self.name]

    def text(self, row: Row) -> str:
        value = self.of(row)
        if not isinstance(value, str):
            raise self.refusal(row, value, "text")
        return value

    def refusal(self, row: Row, value: object, allowed: str) -> ConfigError:
        return row.refusal(f"of {self} is {str(value)[:80]!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """A conversation, of which some messages are trained on."""

    messages: list[Message]
    is_trained: list[bool]  # of each message
    tools: list[dict[str, Any]]  # schemas for the chat template


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt and two continuations, of which the first is preferred."""

    prompt: list[Message]
    chosen: list[Message]  # what follows the prompt, the last one by the assistant
    rejected: list[Message]
    margin: float | None  # by how much `chosen` is better, where the data says so
    tools: list[dict[str, Any]]  # schemas for the chat template


class TypedRows(Generic[T]):
    """The rows of a source, each checked and made a T when it is read.

    A row that is not valid is a ConfigError that names source, row, column, value and what is
    allowed.
    """

    def __init__(self, rows: RowSource, parse: Callable[[Row], T]) -> None:
        self._rows = rows
        self._parse = parse

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> T:
        return self._parse(self._rows[row])

    def __iter__(self) -> Iterator[T]:
        return map(self._parse, self._rows)


class Numbered(Protocol[T_co]):
    """A file's rows, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> T_co: ...


F = TypeVar("F", bound=Numbered[Any])


class FilesInOrder(Generic[F, T]):
    """Rows by number: those of the first file, then those of the next."""

    def __init__(self, *files: F) -> None:
        self._files = files
        self._ends = list(accumulate(len(file) for file in files))

    @property
    def sizes(self) -> list[int]:
        """Rows of each file."""
        return [len(file) for file in self._files]

    @property
    def digests(self) -> list[str]:
        """The digest of each file; "" for rows that are in none."""
        return [getattr(file, "digest", "") for file in self._files]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> T:
        file, its_row = self._place(row)
        found: T = self._files[file][its_row]
        return found

    def _place(self, row: int) -> tuple[int, int]:
        """The number of its file, and its own in that."""
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def supervised_rows(
    rows: RowSource, messages: Column, tools: Column | None = None
) -> TypedRows[SupervisedRow]:
    """Conversations. Messages of the assistant are trained on, others are not.

    `train` of a message, true or false, says otherwise for that message. A row that trains on no
    message is refused.
    """

    def parse(row: Row) -> SupervisedRow:
        found = chat(row, messages)
        flags = [message.pop("train", message["role"] == "assistant") for message in found]
        if not all(isinstance(flag, bool) for flag in flags):
            raise messages.refusal(row, flags, "messages whose `train` is true or false")
        if not any(flags):
            raise messages.refusal(row, found, "a chat with a message to train on")
        return SupervisedRow(found, flags, tool_schemas(row, tools))

    return TypedRows(rows, parse)


def preference_rows(
    rows: RowSource,
    prompt: Column,
    chosen: Column,
    rejected: Column,
    margin: Column | None = None,
    tools: Column | None = None,
) -> TypedRows[PreferenceRow]:
    """Prompts with a preferred and a rejected continuation, and the margin between the two."""

    def parse(row: Row) -> PreferenceRow:
        asked, *answers = (chat(row, column) for column in (prompt, chosen, rejected))
        for column, answer in zip((chosen, rejected), answers, strict=True):
            if answer[-1]["role"] != "assistant":
                raise column.refusal(row, answer, f"{_CHAT}, of which the last is the assistant's")
        if answers[0] == answers[1]:
            raise rejected.refusal(row, answers[1], f"another answer than {chosen.name!r}")
        found = _margin(row, margin), tool_schemas(row, tools)
        return PreferenceRow(asked, answers[0], answers[1], *found)

    return TypedRows(rows, parse)


def chat(row: Row, column: Column) -> list[Message]:
    """Messages with a role and a content of text; content may be null beside `tool_calls`.

    Other keys that are null are left out: a table gives each message the keys of all. Arguments of
    calls are objects, also those that are JSON text in the row.
    """
    value = column.of(row)
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise column.refusal(row, value, _CHAT)
    found = [{"content": m.get("content")} | without_nulls(m) for m in value]
    for message in found:
        is_text = isinstance(message["content"], str)
        is_call = message["content"] is None and bool(message.get("tool_calls"))
        if not isinstance(message.get("role"), str) or not (is_text or is_call):
            raise column.refusal(row, value, _CHAT)
        if not all(isinstance(message.get(name, ""), str) for name in REASONING):
            raise column.refusal(row, value, f"a chat with text as {' or '.join(REASONING)}")
        if "tool_calls" in message:
            try:
                message["tool_calls"] = [_parse_call(call) for call in message["tool_calls"]]
            except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
                raise column.refusal(row, value, _CALLS) from error
    return found


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a call that has its name and arguments."""
    function: dict[str, Any] = call.get("function", call)
    return function


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object. Raises where it is none."""
    function = function_of(call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(function["name"], str) or not isinstance(arguments, dict):
        raise TypeError
    json.dumps(arguments, allow_nan=False)
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else parsed


def tool_schemas(row: Row, column: Column | None) -> list[dict[str, Any]]:
    """The tools of a row; none without a column, or where it is null or empty.

    Whole lists and single schemas may be JSON text, as a table stores what differs by row.
    """
    value = column.of(row) if column else None
    if column is None or not value:
        return []
    try:
        found = json.loads(value) if isinstance(value, str) else value
        tools = [json.loads(t) if isinstance(t, str) else without_nulls(t) for t in found]
    except (ValueError, TypeError, RecursionError):
        found, tools = None, []
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in tools):
        raise column.refusal(row, value, _TOOLS)
    return tools


def without_nulls(value: Any) -> Any:
    """Objects without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _margin(row: Row, column: Column | None) -> float | None:
    value = column.of(row) if column else None
    if column is None or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise column.refusal(row, value, "a finite number, or null")
    return float(value)
