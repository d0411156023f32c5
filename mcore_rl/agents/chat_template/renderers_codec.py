"""A codec for known families: prompts by the chat template, turns by the package `renderers`.

The package knows how each family ends a turn, what comes behind it, and how it writes calls.

gpt-oss is not among them: its renderer loads a vocabulary from the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from mcore_rl.agents.chat_template.codec import (
    CallStatus,
    ChatMessage,
    ChatTokenizer,
    JsonValue,
    ParsedCall,
    ParsedTurn,
    ToolSpec,
    encodable,
    template_ids,
)

MAX_DEPTH = 100  # of lists and objects in the arguments of a call
# Family -> values of the template's own variables that its renderer is told, to try in this order:
# those by which it writes what the template writes.
FAMILIES: Mapping[str, Sequence[Mapping[str, JsonValue]]] = {
    "qwen3": ({},),
    "qwen3.5": ({"enable_thinking": True}, {"enable_thinking": False}),
    "qwen3.6": ({"enable_thinking": True}, {"enable_thinking": False}),
    "deepseek-v3": ({},),
    "deepseek-r1": ({},),
    "glm-4.5": ({},),
    "glm-5": ({},),
    "glm-5.1": ({},),
    "kimi-k2": ({},),
    "kimi-k2.5": ({},),
    "llama-3": ({},),
}
_STATUS: Mapping[str, CallStatus] = {
    "ok": "ok",
    "unclosed_block": "unclosed",
    "missing_name": "unnamed",
    "unknown_tool": "unknown_tool",
    "invalid_json": "malformed",
    "malformed_structure": "malformed",
}


class RenderersCodec:
    """`ChatCodec` with the renderer of one family."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        family: str,
        options: Mapping[str, JsonValue],
        variant: Mapping[str, JsonValue] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Args:
            options: Values of the template's variables.
            variant: More values, for the renderer alone.
            stop_ids: Tokens that end a turn beside the family's, as generation_config.json has.

        Raises:
            ValueError: The tokenizer lacks the family's tokens, or the values do not suit it.
        """
        from renderers import config_from_name, create_renderer

        self._tokenizer, self._options = tokenizer, options
        self.name, self.tool_refusal = f"renderers:{family}", ""
        try:
            self._renderer = create_renderer(
                tokenizer,
                config_from_name(family),
                chat_template_kwargs={**(variant or {}), **options},
            )
        except AssertionError as error:  # of a token that the tokenizer does not have
            raise ValueError(str(error)) from error
        own_ids = frozenset(self._renderer.get_stop_token_ids())
        self._foreign_ids = frozenset(stop_ids) - own_ids  # which the renderer takes for text
        self._stop_ids = own_ids | self._foreign_ids

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return template_ids(self._tokenizer, messages, tools, self._options)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        if completion_ids and completion_ids[-1] in self._foreign_ids:
            return None  # the renderer would end the turn again
        rendered = self._renderer.bridge_to_next_turn(
            list(prompt_ids),
            list(completion_ids),
            _dicts(new_messages),
            tools=_dicts(tools) or None,
        )
        done = len(prompt_ids) + len(completion_ids)
        if rendered is None:
            return None
        ids: list[int] = rendered.token_ids
        return ids[:done] + self._as_one_text(ids[done:])

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        ids = [*takewhile(lambda token: token not in self._foreign_ids, completion_ids)]
        response = self._renderer.parse_response(
            ids, tools=_dicts(tools) or None, prompt_ids=list(prompt_ids)
        )
        return parsed_turn(response, tools)

    def _as_one_text(self, ids: list[int]) -> list[int]:
        """The same text in the tokens that the chat template gives.

        Renderers encode some texts in pieces: a newline and an answer that begins with one.
        """
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return self._tokenizer.encode(text, add_special_tokens=False)


def parsed_turn(response: Any, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """Convert a `renderers.ParsedResponse` to our types.

    A call is "ok" if it has arguments by name, which JSON can write again.
    """
    names = {tool.name for tool in tools}
    calls = []
    for call in response.tool_calls:
        status = _STATUS[str(call.status)]
        arguments = call.arguments
        is_named = isinstance(arguments, dict) and isinstance(call.name, str)
        if status == "ok" and not (is_named and _is_writable(arguments)):
            status = "malformed"
        if status == "ok" and names and call.name not in names:
            status = "unknown_tool"
        calls.append(
            ParsedCall(
                status=status,
                name=encodable(str(call.name or "")),
                arguments=arguments if status == "ok" else {},
                text=call.raw,
                span=call.token_span,
                id=call.id or "",
            )
        )
    return ParsedTurn(
        content=response.content,
        reasoning=response.reasoning_content or "",
        calls=tuple(calls),
        reasoning_closed=response.reasoning_complete is not False,
    )


def _is_writable(arguments: dict[str, Any]) -> bool:
    """Check for values nested at most MAX_DEPTH deep, without NaN, infinity or endless digits.

    What is deeper ends in a RecursionError where a template or a tool walks it.
    """
    containers: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        values = (v.values() if isinstance(v, dict) else v for v in containers)
        containers = [v for inner in values for v in inner if isinstance(v, dict | list)]
    try:
        json.dumps(None if containers else arguments, allow_nan=False)
    except ValueError:
        return False
    return not containers


def _dicts(items: Sequence[ChatMessage] | Sequence[ToolSpec]) -> list[dict[str, JsonValue]]:
    return [item.as_dict() for item in items]
