"""A codec for any chat template that does not rewrite what is there already.

What follows a turn is found by rendering it once, after a made-up conversation of a system message,
a user message and an assistant's turn, and taking the tokens behind that turn.
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
    ToolCall,
    ToolSpec,
    template_ids,
)
from mcore_rl.agents.chat_template.renderers_codec import parsed_turn
from mcore_rl.config.errors import ConfigError

_BEFORE = [ChatMessage("system", "Be brief."), ChatMessage("user", "Begin.")]
_SAID = "Here is what I have found so far, and there is more to come."
_THOUGHT = "Let me look at this first."
_INLINE = f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID}"
_THINK = re.compile("</?think>")
_GO_ON = ChatMessage("user", "Go on.")
_CALL = ToolCall("look", {"at": "home", "far": [1, True, None]}, "functions.look:0")
_TOOL = ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
_ANSWER = ChatMessage("tool", "A door.", tool_call_id=_CALL.id, name=_CALL.name)


class TemplateCodec:
    """`ChatCodec` by the tokenizer's chat template, with tool calls in the form of Hermes.

    That is JSON with the keys name and arguments between the tokens <tool_call> and </tool_call>.
    `tool_refusal` says why there are no tools, if so.
    """

    name = "template"

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        options: Mapping[str, JsonValue],
        stop_ids: Sequence[int] = (),
    ) -> None:
        """`stop_ids`: tokens that end a turn beside the template's, as generation_config.json has.

        Raises ConfigError when the template ends turns with text, or changes what an assistant
        said: trims it, or leaves out its reasoning without having a field for reasoning.
        """
        self._tokenizer, self._options = tokenizer, options
        eos = tokenizer.eos_token_id
        close = self._close_after(_SAID, "")
        self._stop_ids = frozenset([close, *stop_ids, *([] if eos is None else [eos])])
        for said in (f"  {_SAID}  ", f"\n{_SAID}\n\n"):
            self._close_after(said, "trims white space")
        self._has_reasoning = self._keeps_reasoning()
        if not self._has_reasoning:
            self._close_after(_INLINE, "strips the reasoning")
        self._call, self._call_end = self._token("<tool_call>"), self._token("</tool_call>")
        self.tool_refusal = self._find_tool_refusal()
        self._drops_reasoning = self._has_reasoning and not self._keeps_reasoning(_GO_ON)
        self._opening = self._text_that_opens_a_turn()

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
        roles = {message.role for message in new_messages}
        if not new_messages or "assistant" in roles:
            return None
        done = [*prompt_ids, *completion_ids]
        if self._drops_reasoning and "user" in roles and self._has_reasoned(done):
            return None
        after = self._after_turn(new_messages, tools)
        end = next((i for i, t in enumerate(completion_ids) if t in self._stop_ids), None)
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
        from renderers.parsing import parse_qwen3
        from renderers.reasoning import prompt_ends_in_reasoning

        ids = list(completion_ids)
        response = parse_qwen3(
            self._tokenizer,
            ids,
            stop_ids=set(self._stop_ids),
            tool_call_id=-1 if self._call is None else self._call,
            tool_call_end_id=-1 if self._call_end is None else self._call_end,
            reasoning_end_id=self._token("</think>"),
            prefilled_thinking=prompt_ends_in_reasoning(
                self._tokenizer, list(prompt_ids), stop_ids=self._stop_ids, initial_only=False
            ),
        )
        turn = parsed_turn(response, tools)
        if self._has_reasoning or not (turn.reasoning or not turn.reasoning_closed):
            return turn
        # Without a field for it, reasoning is content.
        ends = [i for i, t in enumerate(ids) if t in self._stop_ids or t == self._call]
        text = self._tokenizer.decode(ids[: ends[0]] if ends else ids, skip_special_tokens=False)
        return replace(turn, content=text.strip(), reasoning="", reasoning_closed=True)

    def _has_reasoned(self, ids: list[int]) -> bool:
        """Whether a turn of an assistant has reasoning, be it empty or cut off.

        What was before the last user message has none: it was rendered anew. Reasoning that each
        prompt opens and closes was not sampled, and does not count.
        """
        text, head = self._text(ids), _THINK.split(self._opening)[0].rstrip()
        if "</think>" in self._opening:
            text = text.replace(self._opening, head)
        turns = text.split(head)[1:] if head else [text]
        ends = filter(None, (self._text([token]) for token in self._stop_ids))
        end = re.compile("|".join(re.escape(token) for token in ends))
        return any(_THINK.search(end.split(turn, maxsplit=1)[0]) for turn in turns)

    def _text_that_opens_a_turn(self) -> str:
        """What the template puts at the end of a prompt; empty where that is not to be told."""
        history = template_ids(self._tokenizer, _BEFORE, (), self._options, generate=False)
        text, prompt = self._text(history), self._text(self.render(_BEFORE))
        return prompt.removeprefix(text) if prompt.startswith(text) else ""

    def _after_turn(
        self, new_messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]
    ) -> list[int]:
        """The token that ends a turn, and all that the template puts behind it."""
        answered = [message for message in new_messages if message.role == "tool"]
        calls = tuple(ToolCall(m.name or "tool", {}, m.tool_call_id) for m in answered)
        said = ChatMessage("assistant", _SAID, tool_calls=calls)
        start = template_ids(self._tokenizer, _BEFORE, tools, self._options)
        whole = template_ids(self._tokenizer, [*_BEFORE, said, *new_messages], tools, self._options)
        ends = (i for i in range(len(start), len(whole)) if whole[i] in self._stop_ids)
        return whole[next(ends, len(whole)) :]

    def _close_after(self, said: str, fault: str) -> int:
        """The added token right behind a turn that says `said`. ConfigError where there is none."""
        messages = [*_BEFORE, ChatMessage("assistant", said), _GO_ON]
        ids = template_ids(self._tokenizer, messages, (), self._options)
        added = set(self._tokenizer.get_added_vocab().values())
        for i, token in enumerate(ids):
            if token in added and self._text(ids[:i]).endswith(said):
                return token
        if not fault:
            raise ConfigError("the chat template ends an assistant's turn with text, not a token")
        raise ConfigError(
            f"the chat template {fault} of earlier turns: it does not keep {said!r}. "
            f"A template that changes what was sampled cannot be extended"
        )

    def _keeps_reasoning(
        self, *new_messages: ChatMessage, calls: tuple[ToolCall, ...] = ()
    ) -> bool:
        """Whether reasoning in a field of its own is rendered, before `new_messages`."""
        said = ChatMessage("assistant", _SAID, _THOUGHT, calls)
        messages = [*_BEFORE, said, *new_messages]
        tools = [_TOOL] if calls else []
        ids = template_ids(self._tokenizer, messages, tools, self._options, generate=False)
        return _THOUGHT in self._text(ids)

    def _find_tool_refusal(self) -> str:
        if self._call is None or self._call_end is None:
            return "the tokenizer has no tokens <tool_call> and </tool_call>"
        if self.render(_BEFORE, [_TOOL]) == self.render(_BEFORE):
            return "the chat template does not render tools"
        said = ChatMessage("assistant", _SAID, tool_calls=(_CALL,))
        try:
            start = self.render(_BEFORE, [_TOOL])
            whole = self.render([*_BEFORE, said, _ANSWER], [_TOOL])
        except Exception as error:  # noqa: BLE001, a template raises what it likes
            return f"the chat template does not render a tool's answer: {error}"
        calls = self.parse(whole[len(start) :], [_TOOL]).calls
        if [(c.name, c.arguments) for c in calls] != [(_CALL.name, _CALL.arguments)]:
            return "the chat template does not write calls as JSON in <tool_call> and </tool_call>"
        if self._has_reasoning and not self._keeps_reasoning(_ANSWER, calls=(_CALL,)):
            return "the chat template strips the reasoning of a turn that called a tool"
        return ""

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _token(self, token: str) -> int | None:
        """The id of a token that stands for itself, None where the tokenizer has none."""
        return self._tokenizer.get_added_vocab().get(token)
