"""Calls of tools whose arguments stand between tags as plain text, as Qwen3.5 and GLM write them.

Texts have no quotes there, so 12345 is a number or a text as the tool's schema says. The package
`renderers` finds the calls; its own reading of an argument strips blanks, ends at a closing tag
inside a text, and takes an optional text for JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from mcore_rl.agents.chat_template.codec import JsonValue, ToolSpec


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags of a family: what is inside <tool_call>.

    A value ends at the closing tag that another argument or the end of the call follows; a closing
    tag before that is part of a text. Each pattern is linear in the text, which may be anything.
    """

    name: re.Pattern[str]  # group: the name of the tool
    argument: re.Pattern[str]  # groups: name and value
    end: str  # after the last argument
    # Values that the chat template does not write as JSON: Qwen3.5's has Jinja's filter `string`.
    literals: Mapping[str, JsonValue] = field(default_factory=dict)


QWEN_TAGS = CallTags(
    re.compile(r"\s*<function=([^>]+)>"),
    re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=[^>]+>|\Z)", re.DOTALL),
    "</function>",
    {"True": True, "False": False, "None": None},
)
GLM_TAGS = CallTags(
    re.compile(r"([^<]*)"),
    re.compile(
        r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
    ),
    "",
)


def declare_texts(tools: Sequence[ToolSpec]) -> list[dict[str, JsonValue]]:
    """Return tools in OpenAI's form whose parameters are all texts.

    So the package parses no declared argument as JSON: it raises on what is nested too deeply.
    """
    declared = []
    for tool in tools:
        properties = tool.parameters.get("properties")
        names = properties if isinstance(properties, dict) else ()
        texts: dict[str, JsonValue] = {name: {"type": "string"} for name in names}
        parameters: dict[str, JsonValue] = {"type": "object", "properties": texts}
        declared.append(replace(tool, parameters=parameters).to_dict())
    return declared


def read_calls(response: Any, tags: CallTags, tools: Sequence[ToolSpec]) -> Any:
    """Return a `renderers.ParsedResponse` with the arguments of its calls as tags and schemas say.

    A call with something else than arguments, or with an argument that is neither JSON nor a text
    that its schema allows, is malformed.
    """
    validators = {tool.name: Draft202012Validator(dict(tool.parameters)) for tool in tools}
    calls = [
        call if call.status == "unclosed_block" else _read_call(call, tags, validators)
        for call in response.tool_calls
    ]
    return replace(response, tool_calls=calls)


def _read_call(call: Any, tags: CallTags, validators: Mapping[str, Draft202012Validator]) -> Any:
    match = tags.name.match(call.raw)
    name = match[1].strip() if match else ""
    if match is None or not name:
        return replace(call, name=None, arguments={}, status="missing_name")
    text = call.raw[match.end() :].strip().removesuffix(tags.end).rstrip()
    arguments: dict[str, JsonValue] = {}
    position = 0
    while position < len(text):
        argument = tags.argument.match(text, position)
        if argument is None:
            return replace(call, name=name, arguments={}, status="malformed_structure")
        key, position = argument[1].strip(), argument.end()
        try:
            arguments[key] = _read_argument(validators.get(name), key, argument[2], tags.literals)
        except ValueError:
            return replace(call, name=name, arguments={}, status="invalid_json")
    return replace(call, name=name, arguments=arguments, status="ok")


def _read_argument(
    validator: Draft202012Validator | None,
    name: str,
    text: str,
    literals: Mapping[str, JsonValue],
) -> JsonValue:
    """Return the value that a text without quotes stands for.

    JSON or a literal if the schema allows it, else the text itself; of what it does not allow, that
    of a type which it names. A text in quotes is a text with these quotes.

    Args:
        validator: Of the arguments of the tool; None: the tool is unknown.

    Raises:
        ValueError: The text is no JSON, and the schema wants no text.
    """
    value: JsonValue = text
    try:
        value = literals.get(text) if text in literals else json.loads(text)
    except json.JSONDecodeError:
        pass
    except (ValueError, RecursionError):  # too many digits, or nested too deeply
        value = math.inf  # which no call may have
    is_text = isinstance(value, str)
    values = [text] if is_text else [value, text]
    if validator is None:
        return values[0]
    try:
        errors = [_list_errors(validator, name, candidate) for candidate in values]
    except Exception:  # noqa: BLE001 (a client's schema may be anything)
        return values[0]
    for candidate, faults in zip(values, errors, strict=True):
        if not faults:
            return candidate
    for candidate, faults in zip(values, errors, strict=True):
        if all(map(_is_of_type, faults)):
            return candidate
    if is_text:
        raise ValueError(f"{name}: {text!r} is no JSON")
    return values[0]


def _list_errors(
    validator: Draft202012Validator, name: str, value: JsonValue
) -> list[ValidationError]:
    """Return what a schema has against an argument, whatever the others are."""
    errors = validator.iter_errors({name: value})
    return [error for error in errors if list(error.path)[:1] == [name]]


def _is_of_type(error: ValidationError) -> bool:
    """Return whether a value has a type that its schema names, though another fault."""
    if error.validator in ("anyOf", "oneOf"):
        branches: dict[object, list[ValidationError]] = {}
        for inner in error.context or ():
            branches.setdefault(inner.schema_path[0], []).append(inner)
        return any(all(map(_is_of_type, inner)) for inner in branches.values())
    allowed: Iterable[object] = ()
    if error.validator == "enum":
        allowed = error.validator_value
    elif error.validator == "const":
        allowed = [error.validator_value]
    else:
        return bool(error.validator != "type")
    return any(type(value) is type(error.instance) for value in allowed)
