"""A codec for harmony, the chat format of gpt-oss: messages in channels.

A turn is `<|start|>assistant<|channel|>CHANNEL<|message|>...` once or more: reasoning in the
channel analysis, calls in commentary, with `to=functions.NAME`, the answer in final. It ends with
<|call|> or <|return|>; <|end|> ends a message in it.

The chat template ends an earlier turn with <|end|> instead of <|return|> and drops its reasoning,
so only a turn with a call is extended, by the answer of its tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    ChatTokenizer,
    JsonValue,
    ParsedTurn,
    TemplateRenderer,
    ToolCall,
    ToolSpec,
    convert_response,
)

_TOKENS = ("return", "call", "start", "end", "channel", "message", "constrain")
_BEFORE = [ChatMessage("user", "Begin.")]


class HarmonyTemplate(TemplateRenderer):
    """Renders with the names of harmony's template: reasoning is `thinking`.

    Of a turn with a call it takes either reasoning or text, and writes both as reasoning.
    """

    def write_message(self, message: ChatMessage) -> dict[str, JsonValue]:
        thinking = message.reasoning
        if message.tool_calls:
            thinking = "\n\n".join(text for text in (thinking, message.content) if text)
            message = replace(message, content="")
        written = replace(message, reasoning="").to_dict()
        return written | ({"thinking": thinking} if thinking else {})


class HarmonyCodec:
    """`ChatCodec` for harmony."""

    name, tool_refusal = "harmony", ""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        options: Mapping[str, JsonValue],
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Look the tokens of the format up.

        Args:
            options: Values of the template's variables, such as reasoning_effort.
            stop_ids: Tokens that end a turn beside harmony's, as generation_config.json has.

        Raises:
            ValueError: The tokenizer lacks a token of the format.
        """
        added = tokenizer.get_added_vocab()
        if lacking := [token for token in _TOKENS if f"<|{token}|>" not in added]:
            raise ValueError(f"the tokenizer has no <|{lacking[0]}|>")
        self._ids = {f"{token}_id": added[f"<|{token}|>"] for token in _TOKENS}
        self._tokenizer, self.template = tokenizer, HarmonyTemplate(tokenizer, options)
        self._opening = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
        self.stop_ids = frozenset([self._ids["return_id"], self._ids["call_id"], *stop_ids])

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a prompt by the chat template."""
        return self.template.render(messages, tools)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Return the next prompt, or None; see `ChatCodec.extend`."""
        ends = [i for i, token in enumerate(completion_ids) if token in self.stop_ids]
        is_call = ends == [len(completion_ids) - 1] and completion_ids[-1] == self._ids["call_id"]
        if not is_call or [message.role for message in new_messages] != ["tool"]:
            return None
        calls = self.parse(completion_ids, tools).calls
        call = ToolCall(calls[-1].name if calls else new_messages[0].name, {})
        turn = ChatMessage("assistant", tool_calls=(call,))
        start = len(self.render(_BEFORE, tools))
        ids = self.render([*_BEFORE, turn, *new_messages], tools)
        end = ids.index(self._ids["call_id"], start)
        return [*prompt_ids, *completion_ids, *ids[end + 1 :]]

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """Split a completion into its parts; see `ChatCodec.parse`."""
        from renderers.parsing import parse_gpt_oss

        ids, shift = [*self._opening, *completion_ids], len(self._opening)
        final_ids = self.stop_ids - {self._ids["call_id"]}
        end = next((i for i, token in enumerate(ids) if token in final_ids), len(ids))
        turn = convert_response(parse_gpt_oss(self._tokenizer, ids[:end], **self._ids), tools)
        calls = tuple(
            call
            if call.span is None
            else replace(call, span=(max(0, call.span[0] - shift), call.span[1] - shift))
            for call in turn.calls
        )
        return replace(turn, calls=calls)
