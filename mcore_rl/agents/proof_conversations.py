"""The conversations that a codec is proved on, by what each is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.agents.codec import ChatMessage, JsonValue, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class Conversation:
    """One turn of an assistant, what came before it, and what comes after it."""

    before: tuple[ChatMessage, ...]
    turn: ChatMessage
    after: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()


def _user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def _assistant(text: str, reasoning: str = "", *calls: ToolCall) -> ChatMessage:
    return ChatMessage("assistant", text, reasoning, calls)


def _answer(call: ToolCall, text: str) -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id=call.id, name=call.name)


def _call(name: str, index: int = 0, **arguments: JsonValue) -> ToolCall:
    return ToolCall(name, arguments, f"functions.{name}:{index}")


_SYSTEM = ChatMessage("system", "You are careful.")
_QUESTION = _user("How far is it to the harbour?")
_NEXT = _user("And back?")
_FAR = "It is two miles, by the coast road."
_THOUGHT = "The map says two miles. That is by road."
_UNICODE = "Grüße aus 東京 🌊, naïve café, ½ Ω"
_TOOLS = (
    ToolSpec(
        "distance",
        "Miles between two places.",
        {
            "type": "object",
            "properties": {"start": {"type": "string"}, "end": {"type": "string"}},
            "required": ["start", "end"],
        },
    ),
    ToolSpec("clock", "What time it is.", {"type": "object", "properties": {}}),
)
_DISTANCE = _call("distance", start="home", end="harbour")
_ODD = _call("distance", start="Zürich 東", end='a "quoted" \\ place')
_CLOCK = _call("clock", 1)

PLAIN: Mapping[str, Conversation] = {
    "no system message": Conversation((_QUESTION,), _assistant(_FAR), (_NEXT,)),
    "a system message": Conversation((_SYSTEM, _QUESTION), _assistant(_FAR), (_NEXT,)),
    "an earlier turn": Conversation(
        (_SYSTEM, _QUESTION, _assistant(_FAR), _NEXT), _assistant("The same."), (_user("Sure?"),)
    ),
    "two messages at once": Conversation((_QUESTION,), _assistant(_FAR), (_NEXT, _user("Well?"))),
    "unicode": Conversation((_user(_UNICODE),), _assistant(_UNICODE), (_user(_UNICODE),)),
    "empty texts": Conversation((_user(""),), _assistant(""), (_user(""),)),
    "markup": Conversation(
        (_user("<b>{{ x }}</b> & {%"),), _assistant("`a < b`\n\nYes."), (_NEXT,)
    ),
    "reasoning": Conversation((_QUESTION,), _assistant(_FAR, _THOUGHT), (_NEXT,)),
}
TOOLS: Mapping[str, Conversation] = {
    "tools, none called": Conversation((_SYSTEM, _QUESTION), _assistant(_FAR), (_NEXT,), _TOOLS),
    "a call and its answer": Conversation(
        (_SYSTEM, _QUESTION), _assistant("", "", _DISTANCE), (_answer(_DISTANCE, "2"),), _TOOLS
    ),
    "a call, no system message": Conversation(
        (_QUESTION,), _assistant("", "", _DISTANCE), (_answer(_DISTANCE, "2 miles"),), _TOOLS
    ),
    "text and a call": Conversation(
        (_QUESTION,), _assistant("I look it up.", "", _ODD), (_answer(_ODD, _UNICODE),), _TOOLS
    ),
    "reasoning and a call": Conversation(
        (_QUESTION,), _assistant("", _THOUGHT, _DISTANCE), (_answer(_DISTANCE, ""),), _TOOLS
    ),
    "a second call": Conversation(
        (_QUESTION, _assistant("", "", _DISTANCE), _answer(_DISTANCE, "2")),
        _assistant("", "", _CLOCK),
        (_answer(_CLOCK, "noon"),),
        _TOOLS,
    ),
    "an answer after reasoning and a call": Conversation(
        (_QUESTION, _assistant("", _THOUGHT, _DISTANCE), _answer(_DISTANCE, "2")),
        _assistant(_FAR),
        (_NEXT,),
        _TOOLS,
    ),
    "an answer after a call": Conversation(
        (_QUESTION, _assistant("", "", _DISTANCE), _answer(_DISTANCE, "2")),
        _assistant(_FAR),
        (_NEXT,),
        _TOOLS,
    ),
}
PARALLEL: Mapping[str, Conversation] = {
    "two calls at once": Conversation(
        (_QUESTION,),
        _assistant("", "", _DISTANCE, _CLOCK),
        (_answer(_DISTANCE, "2"), _answer(_CLOCK, "noon")),
        _TOOLS,
    ),
}
