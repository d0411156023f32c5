"""Rows of supervised and of preference training, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.files import Row, RowSource, open_rows
from mcore_rl.data.rows import (
    PreferenceRow,
    RowColumn,
    SupervisedRow,
    read_chat,
    read_preference_rows,
    read_supervised_rows,
    read_tool_schemas,
)

MESSAGES = RowColumn("messages", "data.messages_column")
TOOLS = RowColumn("tools", "data.tools_column")
PREFERENCE = [RowColumn(name, f"data.{name}_column") for name in ("prompt", "chosen", "rejected")]
MARGIN = RowColumn("margin", "data.margin_column")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "int"}}},
    },
}


def message(role: str, content: str | None, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def source(folder: Path, *rows: dict) -> RowSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_rows(path, "data.train_file")


def test_the_turns_of_the_assistant_are_trained_on_unless_a_message_says_otherwise(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chats = [
        [message("system", "x"), message("user", "a"), message("assistant", "b"),
         message("user", "c"), message("assistant", "d", train=False),
         message("user", "e", train=True)],
        [message("user", "1+1"), message("assistant", None, tool_calls=[call]),
         message("tool", "2"), message("assistant", "2")],
    ]  # fmt: skip
    rows = source(
        tmp_path, {"messages": chats[0], "tools": None}, {"messages": chats[1], "tools": [ADD]}
    )
    result = read_supervised_rows(rows, MESSAGES, TOOLS)
    assert len(result) == 2
    first, second = result
    assert first.is_trained == [False, False, True, False, False, True]
    assert first.messages == [message(m["role"], m["content"]) for m in chats[0]]
    assert first.tools == []
    assert second == result[1] == SupervisedRow(chats[1], [False, True, False, True], [ADD])


def test_what_a_table_adds_to_messages_is_taken_away_again(tmp_path):
    # All messages of a table have all keys, and all schemas all properties.
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    other = {"function": {"name": "now", "arguments": {"zone": "UTC"}}}
    rows = [
        {"messages": [message("assistant", None, tool_calls=[call]), message("tool", "2", id="x")],
         "tools": [ADD]},
        {"messages": [message("assistant", "hm", tool_calls=[other])],
         "tools": [{"type": "function", "function": {"name": "now", "description": "time"}}]},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    result = read_supervised_rows(open_rows(tmp_path / "rows.parquet", "x"), MESSAGES, TOOLS)
    assert [row.messages for row in result] == [row["messages"] for row in rows]
    assert [row.tools for row in result] == [row["tools"] for row in rows]


NULLS = {"x": None, "y": {"z": None, "w": [None, {"v": None}]}}
OPTIONAL = {"name": "find", "parameters": {"properties": {"x": {"default": None, "enum": [None]}}}}


def write_nulls(folder: Path, form: str, arguments: object, tools: object) -> RowSource:
    """Write a row with a call and tools, with null keys of messages and calls, as APIs have."""
    call = {"id": None, "function": {"name": "find", "arguments": arguments, "strict": None}}
    answer = message("assistant", None, tool_calls=[call], refusal=None, train=None)
    row = {"messages": [message("user", "a", tool_calls=None), answer], "tools": tools}
    if form == "jsonl":
        return source(folder, row)
    if form == "function":
        (folder / "own.py").write_text(f"def rows():\n    return [{row!r}]\n")
        return open_rows(f"{folder}/own.py:rows", "data.train_file")
    pq.write_table(pa.Table.from_pylist([row]), folder / "rows.parquet")
    return open_rows(folder / "rows.parquet", "data.train_file")


@pytest.mark.parametrize(
    ("form", "as_text"),
    [("jsonl", False), ("jsonl", True), ("function", False), ("function", True), ("parquet", True)],
)
def test_nulls_of_arguments_and_schemas_stay_where_no_table_added_them(form, as_text, tmp_path):
    write = json.dumps if as_text else lambda value: value
    rows = write_nulls(tmp_path, form, write(NULLS), write([OPTIONAL]))
    [row] = read_supervised_rows(rows, MESSAGES, TOOLS)
    function = {"name": "find", "arguments": NULLS}
    assert row.messages == [
        message("user", "a"), message("assistant", None, tool_calls=[{"function": function}])
    ]  # fmt: skip
    assert row.is_trained == [False, True]
    assert row.tools == [OPTIONAL]


@pytest.mark.parametrize("texts", [[json.dumps(OPTIONAL)], json.dumps([OPTIONAL])], ids=["l", "t"])
def test_schemas_of_a_table_as_json_text_keep_their_nulls(texts, tmp_path):
    rows = write_nulls(tmp_path, "parquet", json.dumps(NULLS), texts)
    assert read_tool_schemas(rows[0], TOOLS) == [OPTIONAL]


def test_nulls_of_structs_of_a_dataset_of_datasets_go(tmp_path):
    # Not installed here; such an object has `features`, and rows by index.
    (tmp_path / "own.py").write_text(
        "class Dataset(list):\n    features = {}\n\n"
        "def rows():\n    call = {'name': 'f', 'arguments': {'x': 1, 'y': None}}\n"
        "    return Dataset([{'messages': [{'role': 'assistant', 'tool_calls': [call]}]}])\n"
    )
    rows = open_rows(f"{tmp_path}/own.py:rows", "data.train_file")
    assert read_chat(rows[0], MESSAGES)[0]["tool_calls"] == [{"name": "f", "arguments": {"x": 1}}]


HALF = {"a": ["x", {"\ud800": 1}]}


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("messages", {"arguments": json.dumps({"a": "\ud800"})}),
        ("messages", {"arguments": json.dumps(HALF)}),
        ("tools", {"tools": json.dumps([ADD | HALF])}),
        ("tools", {"tools": [json.dumps(ADD | {"description": "\udfff"})]}),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "function", "parquet"])
def test_half_a_surrogate_pair_in_json_text_is_an_error_of_its_row(form, column, change, tmp_path):
    given = {"arguments": "{}", "tools": "[]"} | change
    [row] = write_nulls(tmp_path, form, given["arguments"], given["tools"])
    with pytest.raises(ConfigError, match=rf"row 0 of column '{column}' has half a surrogate pair"):
        read_tool_schemas(row, TOOLS) or read_chat(row, MESSAGES)


@pytest.mark.parametrize(
    "value", [[ADD], json.dumps([ADD]), [json.dumps(ADD)]], ids=["objects", "text", "texts"]
)
def test_tools_are_objects_or_json_text(value):
    assert read_tool_schemas(Row("x", 0, {"tools": value}), TOOLS) == [ADD]
    assert read_tool_schemas(Row("x", 0, {"tools": value}), None) == []


@pytest.mark.parametrize("value", [None, [], "", "[]"])
def test_a_row_may_have_no_tools(value):
    assert read_tool_schemas(Row("x", 0, {"tools": value}), TOOLS) == []


@pytest.mark.parametrize("value", ["[{", "{}", 3, [3], ["x"], {"a": 1}, json.dumps(ADD)], ids=str)
def test_what_is_no_tool_is_refused(value):
    with pytest.raises(
        ConfigError,
        match=r"^x: row 7 of column 'tools' \(data\.tools_column\) is .*; it must be a li",
    ):
        read_tool_schemas(Row("x", 7, {"tools": value}), TOOLS)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("hello", "must be a list of messages"),
        ([message("user", "a")], "must be a chat with a message to train on"),
        ([message("assistant", "a", train=False)], "must be a chat with a message to train on"),
        (
            [message("assistant", "a", train="yes")],
            "must be messages whose `train` is true or false",
        ),
        ([message("assistant", None)], "must be a list of messages"),
        ([message("assistant", None, tool_calls=[])], "must be a list of messages"),
        ([message("assistant", [{"type": "text"}])], "must be a list of messages"),
        ([message(None, "a")], "must be a list of messages"),
        ([{"content": "a"}], "must be a list of messages"),
    ],
)
def test_a_chat_that_cannot_be_trained_on_is_refused(tmp_path, messages, why):
    good = {"messages": [message("user", "a"), message("assistant", "b")]}
    rows = read_supervised_rows(source(tmp_path, good, {"messages": messages}), MESSAGES)
    assert rows[0].is_trained == [False, True]
    with pytest.raises(ConfigError, match=why) as caught:
        rows[1]
    where = "rows.jsonl': row 1 of column 'messages' (data.messages_column) is "
    assert where in str(caught.value)


def test_a_missing_column_is_named_by_its_row(tmp_path):
    rows = source(tmp_path, {"messages": [message("user", "a")]}, {"text": "x", "id": 3})
    assert read_chat(rows[0], MESSAGES)
    with pytest.raises(ConfigError, match=r"row 1 has no column 'messages' .*; it has: text, id$"):
        read_chat(rows[1], MESSAGES)


GOOD = {
    "prompt": [message("user", "a")],
    "chosen": [message("assistant", "b")],
    "rejected": [message("assistant", "c")],
    "margin": 1,
}


def test_preferences_have_a_prompt_two_answers_and_maybe_a_margin(tmp_path):
    turns = [message("assistant", "x"), message("user", "y"), message("assistant", "z")]
    rows = source(tmp_path, GOOD, {**GOOD, "rejected": turns, "margin": None})
    item, two = read_preference_rows(rows, *PREFERENCE, MARGIN)
    assert item == PreferenceRow(GOOD["prompt"], GOOD["chosen"], GOOD["rejected"], 1.0, [])
    assert isinstance(item.margin, float)
    assert two == PreferenceRow(GOOD["prompt"], GOOD["chosen"], turns, None, [])
    assert [row.margin for row in read_preference_rows(rows, *PREFERENCE)] == [None, None]
    [texts] = read_preference_rows(
        source(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}), *PREFERENCE
    )
    assert (texts.prompt, texts.chosen, texts.rejected) == (
        GOOD["prompt"], GOOD["chosen"], GOOD["rejected"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"prompt": 7},
            "column 'prompt' (data.prompt_column) is '7'; it must be a text, or a",
        ),
        (
            {"chosen": []},
            "column 'chosen' (data.chosen_column) is '[]'; it must be a text, or",
        ),
        ({"chosen": [message("user", "b")]}, "of which the last is the assistant's"),
        ({"rejected": GOOD["chosen"]}, "it must be another answer than 'chosen'"),
        ({"margin": "much"}, "is 'much'; it must be a finite number, or null"),
        ({"margin": True}, "is 'True'; it must be a finite number, or null"),
        ({"margin": float("nan")}, "is 'nan'; it must be a finite number, or null"),
    ],
)
def test_a_preference_that_says_nothing_is_refused(tmp_path, change, why):
    with pytest.raises(ConfigError) as caught:
        list(read_preference_rows(source(tmp_path, GOOD, {**GOOD, **change}), *PREFERENCE, MARGIN))
    assert "rows.jsonl': row 1 of column" in str(caught.value)
    assert why in str(caught.value)
