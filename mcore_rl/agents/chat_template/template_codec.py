"""A codec for any chat template that does not rewrite earlier turns.

The tokens that follow a turn are read off a render: new messages are rendered after a made-up
conversation of a system message, a user message and an assistant's turn, and the tokens behind that
turn are taken.
"""

from __future__ import annotations

import re
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
from mcore_rl.config.errors import ConfigError

_BEFORE = [ChatMessage("system", "Be brief."), ChatMessage("user", "Begin.")]
_TEXT = "Here is what I have found so far, and there is more to come."
_THOUGHT = "Let me look at this first."
_INLINE = f"<think>\n{_THOUGHT}\n</think>\n\n{_TEXT}"
_THINK = re.compile("</?think>")
_NEXT = ChatMessage("user", "Go on.")
_CALL = ToolCall("look", {"at": "home", "far": [1, True, None]}, "functions.look:0")
_TOOL = ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
_ANSWER = ChatMessage("tool", "A door.", tool_call_id=_CALL.id, name=_CALL.name)


class TemplateCodec:
    """`ChatCodec` by the tokenizer's chat template, with tool calls in the form of Hermes.

    That is JSON with the keys name and arguments between the tokens <tool_call> and </tool_call>.
    `tool_refusal` is the reason why tools do not work; empty if they do.
    """

    name = "template"

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        options: Mapping[str, JsonValue],
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Probe the template with made-up conversations.

        Args:
            options: Values of the template's variables.
            stop_ids: Tokens that end a turn beside the template's, as generation_config.json has.

        Raises:
            ConfigError: The template ends turns with text, or changes the text of an assistant:
                trims it, or leaves out its reasoning without having a field for reasoning.
        """
        self._tokenizer, self._template = tokenizer, TemplateRenderer(tokenizer, options)
        eos = tokenizer.eos_token_id
        close = self._find_end(_TEXT, "")
        last = self._template.render(
            [*_BEFORE, ChatMessage("assistant", _TEXT)], (), generate=False
        )
        if self._find_token_after(_TEXT, last) not in (None, close):
            raise ConfigError(
                "the chat template ends the last turn with another token than earlier turns"
            )
        self.stop_ids = frozenset([close, *stop_ids, *([] if eos is None else [eos])])
        for text in (f"  {_TEXT}  ", f"\n{_TEXT}\n\n"):
            self._find_end(text, "trims white space")
        self._has_reasoning = self._keeps_reasoning()
        if not self._has_reasoning:
            self._find_end(_INLINE, "strips the reasoning")
        added = tokenizer.get_added_vocab()
        self._call_id, self._call_end_id = added.get("<tool_call>"), added.get("</tool_call>")
        self._reasoning_end_id = added.get("</think>")
        self.tool_refusal = self._find_tool_refusal()
        self._drops_reasoning = self._has_reasoning and not self._keeps_reasoning(_NEXT)
        self._opening = self._find_turn_opening()

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a prompt by the chat template."""
        return self._template.render(messages, tools)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Return the next prompt, or None; see `ChatCodec.extend`."""
        roles = {message.role for message in new_messages}
        if not new_messages or "assistant" in roles:
            return None
        done = [*prompt_ids, *completion_ids]
        if self._drops_reasoning and "user" in roles and self._contains_reasoning(done):
            return None
        after = self._render_after_turn(new_messages, tools)
        end = next((i for i, t in enumerate(completion_ids) if t in self.stop_ids), None)
        if not after:
            return None
        if end is None:  # cut off: the token that ends the turn is the first of what follows
            return done + after
        if end + 1 == len(completion_ids) and completion_ids[-1] == after[0]:
            return done + after[1:]
        return None

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """Split a completion into its parts; see `ChatCodec.parse`."""
        from renderers.parsing import parse_qwen3
        from renderers.reasoning import prompt_ends_in_reasoning

        ids = list(completion_ids)
        response = parse_qwen3(
            self._tokenizer,
            ids,
            stop_ids=set(self.stop_ids),
            tool_call_id=-1 if self._call_id is None else self._call_id,
            tool_call_end_id=-1 if self._call_end_id is None else self._call_end_id,
            reasoning_end_id=self._reasoning_end_id,
            prefilled_thinking=prompt_ends_in_reasoning(
                self._tokenizer, list(prompt_ids), stop_ids=self.stop_ids, initial_only=False
            ),
        )
        turn = convert_response(response, tools)
        if self._has_reasoning or not (turn.reasoning or not turn.reasoning_closed):
            return turn
        # A template without a field for reasoning has it in the content.
        ends = [i for i, t in enumerate(ids) if t in self.stop_ids or t == self._call_id]
        text = self._template.decode(ids[: ends[0]] if ends else ids)
        return replace(turn, content=text.strip(), reasoning="", reasoning_closed=True)

    def _contains_reasoning(self, ids: list[int]) -> bool:
        """Return whether a turn of an assistant has sampled reasoning, even empty or cut off.

        Turns before the last user message have none: they were rendered anew. Reasoning that each
        prompt opens and closes was not sampled.
        """
        text, head = self._template.decode(ids), _THINK.split(self._opening)[0].rstrip()
        if "</think>" in self._opening:
            text = text.replace(self._opening, head)
        turns = text.split(head)[1:] if head else [text]
        ends = filter(None, (self._template.decode([token]) for token in self.stop_ids))
        end = re.compile("|".join(re.escape(token) for token in ends))
        return any(_THINK.search(end.split(turn, maxsplit=1)[0]) for turn in turns)

    def _find_turn_opening(self) -> str:
        """Return the text that ends each prompt; empty if the template does not append one."""
        history = self._template.render(_BEFORE, (), generate=False)
        text, prompt = self._template.decode(history), self._template.decode(self.render(_BEFORE))
        return prompt.removeprefix(text) if prompt.startswith(text) else ""

    def _render_after_turn(
        self, new_messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]
    ) -> list[int]:
        """Return the token that ends a turn, and the tokens of new messages behind it."""
        answers = [message for message in new_messages if message.role == "tool"]
        calls = tuple(ToolCall(m.name or "tool", {}, m.tool_call_id) for m in answers)
        turn = ChatMessage("assistant", _TEXT, tool_calls=calls)
        start = len(self._template.render(_BEFORE, tools))
        ids = self._template.render([*_BEFORE, turn, *new_messages], tools)
        ends = (i for i in range(start, len(ids)) if ids[i] in self.stop_ids)
        return ids[next(ends, len(ids)) :]

    def _find_end(self, text: str, fault: str) -> int:
        """Return the added token right behind a turn with this text.

        Args:
            fault: What the template does to the text, for the error without such a token.

        Raises:
            ConfigError: There is none.
        """
        ids = self._template.render([*_BEFORE, ChatMessage("assistant", text), _NEXT], ())
        if (end := self._find_token_after(text, ids)) is not None:
            return end
        if not fault:
            raise ConfigError("the chat template ends an assistant's turn with text, not a token")
        raise ConfigError(
            f"the chat template {fault} of earlier turns: it does not keep {text!r}. "
            f"A template that changes what was sampled cannot be extended"
        )

    def _find_token_after(self, text: str, ids: list[int]) -> int | None:
        """Return the added token right behind a text, or None."""
        added = set(self._tokenizer.get_added_vocab().values())
        for i, token in enumerate(ids):
            if token in added and self._template.decode(ids[:i]).endswith(text):
                return token
        return None

    def _keeps_reasoning(
        self, *new_messages: ChatMessage, calls: tuple[ToolCall, ...] = ()
    ) -> bool:
        """Return whether the field for reasoning is rendered in a turn before `new_messages`."""
        turn = ChatMessage("assistant", _TEXT, _THOUGHT, calls)
        tools = [_TOOL] if calls else []
        ids = self._template.render([*_BEFORE, turn, *new_messages], tools, generate=False)
        return _THOUGHT in self._template.decode(ids)

    def _find_tool_refusal(self) -> str:
        if self._call_id is None or self._call_end_id is None:
            return "the tokenizer has no tokens <tool_call> and </tool_call>"
        if self.render(_BEFORE, [_TOOL]) == self.render(_BEFORE):
            return "the chat template does not render tools"
        turn = ChatMessage("assistant", _TEXT, tool_calls=(_CALL,))
        try:
            start = len(self.render(_BEFORE, [_TOOL]))
            ids = self.render([*_BEFORE, turn, _ANSWER], [_TOOL])
        except Exception as error:  # noqa: BLE001, a template raises anything
            return f"the chat template does not render a tool's answer: {error}"
        calls = self.parse(ids[start:], [_TOOL]).calls
        if [(c.name, c.arguments) for c in calls] != [(_CALL.name, _CALL.arguments)]:
            return "the chat template does not write calls as JSON in <tool_call> and </tool_call>"
        if self._has_reasoning and not self._keeps_reasoning(_ANSWER, calls=(_CALL,)):
            return "the chat template strips the reasoning of a turn that called a tool"
        return ""
