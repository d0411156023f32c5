"""Arguments without quotes, as GLM and Qwen3.5 write them: what the schema of a tool makes of them.

The oracle of what a value is: the chat template's own rendering of a call, and jsonschema.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    ToolCall,
    ToolSpec,
    ValidatedChatTemplate,
)
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.agents.tools.base import tool
from tests.unit.agents.families import tokenizer_of

ASK = [ChatMessage("user", "What is there?")]
FAMILIES = ["glm-4.5", "published/glm-4.5", "qwen3.5"]


@tool
def optional(place: str | None, far: int | None = None) -> str:
    """Look.

    Args:
        place: a town
    """
    return f"{place} {far}"


@cache
def codec_of(family: str) -> ValidatedChatTemplate:
    return select_codec(tokenizer_of(family), "renderers")


def make_spec(schema: Any, **more: Any) -> ToolSpec:
    return ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": schema}, **more})


def parse(family: str, spec: ToolSpec, arguments: dict[str, Any]) -> Any:
    """Return the call that is read from what the template writes of it."""
    tokenizer = tokenizer_of(family)
    codec = codec_of(family)
    call = ToolCall(spec.name, arguments, "functions.look:0")
    turn = ChatMessage("assistant", "", tool_calls=(call,))
    prompt = codec.render(ASK, [spec])
    text = tokenizer.decode(codec.template.render([*ASK, turn], [spec], generate=False))
    start = text.index("<tool_call>", len(tokenizer.decode(prompt).rstrip()))
    ids = tokenizer.encode(text[start:], add_special_tokens=False)
    if family == "qwen3.5":  # the prompt has opened the thoughts
        ids = [tokenizer.convert_tokens_to_ids("</think>"), *ids]
    [read] = codec.parse(ids, [spec], prompt).calls
    return read


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
OPTIONAL = {"anyOf": [TEXT, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (TEXT, "12345"),
        (OPTIONAL, "12345"),
        ({"oneOf": [{"type": "null"}, TEXT]}, "12345"),
        ({"type": ["string", "null"]}, "12345"),
        ({"type": ["null", "string"]}, "text"),
        ({"type": ["string", "null"]}, "[1, 2]"),
        ({"type": ["string", "null"]}, '{"a": 1}'),
        ({"type": ["string", "null"]}, "true"),
        ({"type": ["string", "null"]}, None),
        (OPTIONAL, None),
        ({"enum": ["1", "2"]}, "2"),
        ({"enum": ["1", "2", 3]}, 3),
        ({"enum": ["here", "there"]}, "there"),
        ({"enum": ["none", None]}, None),
        ({"const": "7"}, "7"),
        ({"allOf": [TEXT, {"minLength": 1}]}, "7"),
        ({"$ref": "#/$defs/Place"}, "7"),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "7"),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, NUMBER]}, 7),
        ({"type": ["integer", "string"]}, 7),
        ({"type": ["integer", "string"]}, "7 miles"),
        ({"not": NUMBER}, "7"),
        (NUMBER, -7),
        ({"type": "number"}, 1.5),
        ({"type": "boolean"}, True),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, False),
        ({"type": "array", "items": TEXT}, ["7", " 8 "]),
        ({"type": "object"}, {"a": {"b": ["7", None, 1]}}),
        ({}, 7),
        ({}, "text"),
        (TEXT, '"quoted"'),
        (OPTIONAL, '"quoted"'),
        (TEXT, "NaN"),
        (OPTIONAL, "9" * 6000),
        (TEXT, "[" * 3000),
        # The first and the last line break of Qwen3.5's are of its template.
        (TEXT, "  blanks  "),
        (TEXT, "\n\n  lines\n\n"),
        (TEXT, ""),
        (TEXT, " "),
        (TEXT, "\n"),
        (OPTIONAL, "\ttab\n"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_as_the_template_wrote_it(family, schema, value):
    spec = make_spec(schema, **{"$defs": {"Place": TEXT}})
    read = parse(family, spec, {"at": value})
    assert (read.status, read.name, read.arguments) == ("ok", "look", {"at": value})
    assert type(read.arguments["at"]) is type(value)


CLOSING = {
    "glm-4.5": "</arg_value>",
    "published/glm-4.5": "</arg_value>",
    "qwen3.5": "</parameter>",
}


@pytest.mark.parametrize("text", ["TAG", "a TAG b", "TAGTAG\n", "print(1)\nTAG\n</function>"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_closing_tag_in_a_text_is_part_of_it(family, text):
    text = text.replace("TAG", CLOSING[family])
    spec = ToolSpec("look", "", {"type": "object", "properties": {"at": TEXT, "far": NUMBER}})
    for arguments in ({"at": text}, {"at": text, "far": 2}, {"far": 2, "at": text}):
        read = parse(family, spec, arguments)
        assert (read.status, read.arguments) == ("ok", arguments)


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"type": "object", "additionalProperties": TEXT}, "7"),
        ({"type": "object", "patternProperties": {"^a": OPTIONAL}}, "7"),
        ({"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"at": TEXT}}}}, "7"),
        ({"allOf": [{"properties": {"at": OPTIONAL}}]}, "7"),
        ({"type": "object"}, 7),
        # What no validator takes says nothing of types.
        ({"type": "object", "properties": {"at": {"type": "str"}}}, 7),
        ({"type": "object", "properties": {"at": {"$ref": "#/$defs/none"}}}, "text"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_argument_has_its_schema_wherever_the_tool_has_it(family, parameters, value):
    read = parse(family, ToolSpec("look", "", parameters), {"at": value})
    assert (read.status, read.arguments) == ("ok", {"at": value})


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string", "minLength": 9}, "123", "123"),
        ({"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}, "123", "123"),
        ({"enum": ["1", "2"]}, "3", "3"),
        ({"const": "1"}, "3", "3"),
        ({"type": "integer", "minimum": 9}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        (OPTIONAL, "None", None),
        (TEXT, "None", "None"),
        ({"type": "boolean"}, "3", 3),
        ({"type": "number"}, " 1e2\n", 100.0),
    ],
    ids=repr,
)
def test_a_value_that_the_tool_refuses_has_a_type_that_it_names(schema, text, value):
    [call] = read_text("qwen3.5", f"<function=look>\n<parameter=at>{text}</parameter>", schema)
    assert (call.status, call.arguments) == ("ok", {"at": value})


def read_text(family: str, text: str, schema: Any) -> Any:
    tokenizer, spec = tokenizer_of(family), make_spec(schema)
    codec = codec_of(family)
    opening = "</think>" if family == "qwen3.5" else ""
    written = f"{opening}<tool_call>{text}</tool_call>"
    ids = tokenizer.encode(written, add_special_tokens=False)
    return codec.parse(ids, [spec], codec.render(ASK, [spec])).calls


@pytest.mark.parametrize(
    ("family", "text", "status"),
    [
        ("qwen3.5", "<function=look>\n<parameter=at>\nten\n</parameter>\n</function>", "malformed"),
        ("qwen3.5", "<function=look>\n<parameter=at>\n7", "malformed"),
        ("qwen3.5", "<function=look>7<parameter=at>\n7\n</parameter>", "malformed"),
        ("qwen3.5", "<function=look>\n<parameter=at>\n7\n</parameter>\n8", "malformed"),
        ("qwen3.5", "look", "unnamed"),
        ("qwen3.5", "<function=gaze>\n</function>", "unknown_tool"),
        ("glm-4.5", "look\n<arg_key>at</arg_key>\n<arg_value>ten</arg_value>\n", "malformed"),
        ("glm-4.5", "look\n<arg_key>at</arg_key>\n<arg_value>7", "malformed"),
        ("glm-4.5", "look\n<arg_key>at</arg_key>\n7", "malformed"),
        ("glm-4.5", "\n", "unnamed"),
        ("glm-4.5", "gaze", "unknown_tool"),
    ],
)
def test_a_call_of_another_form_is_none(family, text, status):
    [call] = read_text(family, text, NUMBER)
    assert (call.status, call.arguments) == (status, {})


def test_a_tool_with_an_optional_text_takes_digits():
    made = optional.tool
    spec = ToolSpec(made.name, made.description, made.parameters)
    arguments = {"place": "12345", "far": 3}
    assert parse("qwen3.5", spec, arguments).arguments == arguments


@pytest.mark.parametrize("unit", [" ", "\n", "</parameter>", "\n</parameter>\n"])
def test_reading_a_call_takes_time_in_proportion_to_its_length(unit):
    text = f"<function=look>\n<parameter=at>\n{unit * (60_000 // len(unit))}x"
    start = time.perf_counter()
    [call] = read_text("qwen3.5", text, TEXT)
    assert call.status == "malformed" and time.perf_counter() - start < 5
