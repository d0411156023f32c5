"""Codecs compared with whole renders of the tokenizer's own chat template, before they are used.

The law: what a codec puts behind a turn is what the template puts there when it renders the whole
conversation. `difference` checks it on one conversation; `Proved` holds a codec to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Protocol

from jinja2 import TemplateError

from mcore_rl.agents.chat_template.codec import (
    ChatCodec,
    ChatMessage,
    ChatTokenizer,
    JsonValue,
    ParsedCall,
    ParsedTurn,
    ToolCall,
    ToolSpec,
    check_length,
    template_ids,
)
from mcore_rl.agents.chat_template.renderers_codec import FAMILIES, RenderersCodec
from mcore_rl.agents.chat_template.template_codec import TemplateCodec
from mcore_rl.config.errors import ConfigError

# What templates and renderers raise for a conversation that they do not take.
REFUSALS = (TemplateError, ValueError, TypeError, KeyError, AttributeError)


class UnprovedCodec(ChatCodec, Protocol):
    @property
    def name(self) -> str: ...

    @property
    def tool_refusal(self) -> str:
        """Why it does not know the template's tools; empty where it does."""


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer's chat template, with values for its own variables."""

    tokenizer: ChatTokenizer
    options: Mapping[str, JsonValue]

    def ids(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        *,
        generate: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        return template_ids(
            self.tokenizer,
            messages,
            tools,
            self.options,
            generate=generate,
            max_tokens=max_tokens,
        )

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class Proved:
    """A codec that agrees with the chat template, held to the laws of `ChatCodec`."""

    def __init__(
        self, codec: UnprovedCodec, template: Template, max_tokens: int | None = None
    ) -> None:
        """ConfigError where it differs from the template without tools, naming the conversation.

        Where it differs with tools only, or with several calls in a turn only, those are refused:
        `tool_refusal` and `parallel_refusal` say why. A codec may begin a new sample wherever a
        user speaks: `extends_users` says whether it goes on from a turn without reasoning.

        max_tokens: of a prompt. A text with many more is refused before all of it is tokenised.
        """
        self._codec, self._template, self._max_tokens = codec, template, max_tokens
        self.options = template.options
        self.name = codec.name
        for case, given in PLAIN.items():
            if found := difference(codec, template, given):
                raise ConfigError(f"the codec {codec.name} {found} ({case})")
        self.tool_refusal = codec.tool_refusal or _first(codec, template, TOOLS)
        self.parallel_refusal = self.tool_refusal or _first(codec, template, PARALLEL)
        self.extends_users = _extends(codec, template, PLAIN["a system message"])

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._codec.stop_ids

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        calls = max((len(message.tool_calls) for message in messages), default=0)
        self._refuse(tools, calls)
        return self._template.ids(messages, tools, max_tokens=self._max_tokens)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        self._refuse(tools, sum(message.role == "tool" for message in new_messages))
        if self._max_tokens is not None:
            text = "".join(message.content for message in new_messages)
            check_length(self._template.tokenizer, text, self._max_tokens)
        done = [*prompt_ids, *completion_ids]
        found = self._codec.extend(prompt_ids, completion_ids, new_messages, tools)
        return found if found is not None and found[: len(done)] == done else None

    def parse(
        self,
        completion_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """Parse a completion; one that the codec's parser raises on is a malformed call.

        Without tools it is content, since there is nothing to call.
        """
        try:
            return self._codec.parse(completion_ids, tools, prompt_ids)
        except Exception:  # noqa: BLE001 (a parser raises what it likes on the policy's text)
            text_ids = [*takewhile(lambda token: token not in self.stop_ids, completion_ids)]
        text = self._template.text(text_ids)
        if not tools:
            return ParsedTurn(text, "", ())
        call = ParsedCall("malformed", "", {}, text, (0, len(text_ids)))
        return ParsedTurn("", "", (call,))

    def _refuse(self, tools: Sequence[ToolSpec], calls: int) -> None:
        if (tools or calls) and self.tool_refusal:
            raise ConfigError(f"the codec {self.name} has no tools: {self.tool_refusal}")
        if calls > 1 and self.parallel_refusal:
            raise ConfigError(
                f"the codec {self.name} takes one tool call a turn, not {calls}: "
                f"{self.parallel_refusal}"
            )


def difference(
    codec: ChatCodec, template: Template, given: Conversation, cut: int | None = None
) -> str:
    """In what `codec` differs from the template on a conversation; empty where in nothing.

    `cut`: the turn ends after so many tokens, without the one that ends it.
    """
    try:
        return _difference(codec, template, given, cut)
    except REFUSALS as error:
        return f"cannot render a conversation: {error}"


def _difference(codec: ChatCodec, template: Template, given: Conversation, cut: int | None) -> str:
    prompt = codec.render(given.before, given.tools)
    whole = template.ids([*given.before, given.turn, *given.after], given.tools)
    start = _start_of_turn(codec, template, given, prompt, whole)
    completion = _until_stop(codec, whole[start:])
    if not completion:
        return "does not know the token that ends an assistant's turn"
    after = whole[start + len(completion) :]

    thought = given.turn.reasoning.strip()
    if _is_changed(template, given, prompt, whole):
        alone = _as_last(codec, template, given, prompt, completion[-1])
        for said in (completion, completion[:cut], alone):
            if codec.extend(prompt, said, given.after, given.tools) is not None:
                return "goes on from earlier turns, which the chat template changes"
        return ""
    if thought and thought not in template.text(completion):
        said = _as_last(codec, template, given, prompt, completion[-1])
        if thought not in template.text(said):  # the template has no reasoning
            return ""
        if codec.extend(prompt, said, given.after, given.tools) is not None:
            return "keeps the reasoning of an earlier turn, which the chat template strips"
        return ""

    if cut is not None:
        return _cut_difference(
            codec, given, prompt, completion[: min(cut, len(completion) - 1)], after
        )
    found = codec.extend(prompt, completion, given.after, given.tools)
    if found is None:
        answered = all(message.role == "tool" for message in given.after)
        return "does not extend a turn with the answers of its tools" if answered else ""
    expected = [*prompt, *completion, *after]
    if found == expected:
        return ""
    at = _common(found, expected)
    return (
        f"extends a turn in another way than the chat template: "
        f"{template.text(found[at : at + 8])!r} for {template.text(expected[at : at + 8])!r}"
    )


def _extends(codec: ChatCodec, template: Template, given: Conversation) -> bool:
    prompt, completion = _sampled(codec, template, given)
    return codec.extend(prompt, completion, given.after, given.tools) is not None


def _as_last(
    codec: ChatCodec, template: Template, given: Conversation, prompt: list[int], end: int
) -> list[int]:
    """The turn as the template writes it while nothing comes after it, with its reasoning.

    `end` ends it where the template does not.
    """
    last = template.ids([*given.before, given.turn], given.tools, generate=False)
    said = last[_common(prompt, last) :]
    return _until_stop(codec, said) or [*said, end]


def _cut_difference(
    codec: ChatCodec, given: Conversation, prompt: list[int], kept: list[int], after: list[int]
) -> str:
    found = codec.extend(prompt, kept, given.after, given.tools)
    if found is None:
        return ""
    done = [*prompt, *kept]
    if found[: len(done)] != done:
        return "changes the tokens of a turn that was cut off"
    closing = found[len(done) : len(found) - len(after)]
    if found[len(found) - len(after) :] != after or not codec.stop_ids.intersection(closing):
        return "does not end a turn that was cut off"
    return ""


def _is_changed(
    template: Template, given: Conversation, prompt: list[int], whole: list[int]
) -> bool:
    """Whether the whole render has something else in the place of what came before the turn.

    What the prompt opens for the turn is not counted to that: see _start_of_turn.
    """
    text = template.text(whole)
    history = template.ids(given.before, given.tools, generate=False)
    return not text.startswith((template.text(prompt), template.text(history)))


def _start_of_turn(
    codec: ChatCodec, template: Template, given: Conversation, prompt: list[int], whole: list[int]
) -> int:
    """Where the turn starts in the whole render.

    A render need not begin with the prompt: the prompt may open reasoning that the template leaves
    out of earlier turns. Then the turn starts behind as many ends of turns as came before it.
    """
    if whole[: len(prompt)] == prompt:
        return len(prompt)
    history = template.ids(given.before, given.tools, generate=False)
    before = sum(token in codec.stop_ids for token in history)
    ends = [i for i, token in enumerate(whole) if token in codec.stop_ids]
    start = ends[before - 1] + 1 if before else 0
    return max(start, _common(prompt, whole))


def _until_stop(codec: ChatCodec, ids: list[int]) -> list[int]:
    """Up to and with the first token that ends a turn; empty where there is none."""
    end = next((i for i, token in enumerate(ids) if token in codec.stop_ids), -1)
    return ids[: end + 1]


def _common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _first(codec: ChatCodec, template: Template, given: Mapping[str, Conversation]) -> str:
    """The first conversation that the codec differs on, or whose calls it does not read."""
    for case, conversation in given.items():
        found = difference(codec, template, conversation)
        if found or (found := _unread(codec, template, conversation)):
            return f"it {found} ({case})"
    return ""


def _sampled(
    codec: ChatCodec, template: Template, given: Conversation
) -> tuple[list[int], list[int]]:
    """The prompt of the turn, and the turn as the whole render has it."""
    prompt = codec.render(given.before, given.tools)
    whole = template.ids([*given.before, given.turn, *given.after], given.tools)
    start = _start_of_turn(codec, template, given, prompt, whole)
    return prompt, _until_stop(codec, whole[start:])


def _unread(codec: ChatCodec, template: Template, given: Conversation) -> str:
    prompt, completion = _sampled(codec, template, given)
    calls = codec.parse(completion, given.tools, prompt).calls
    found = [(call.status, call.name, call.arguments) for call in calls]
    if found == [("ok", call.name, call.arguments) for call in given.turn.tool_calls]:
        return ""
    return f"reads the calls of {template.text(completion)!r} as {found}"


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


CodecKind = Literal["auto", "renderers", "template"]


def codec_for(
    tokenizer: ChatTokenizer,
    kind: CodecKind = "auto",
    options: Mapping[str, JsonValue] | None = None,
    stop_ids: Sequence[int] = (),
    max_tokens: int | None = None,
) -> Proved:
    """The codec of a tokenizer's chat template: the first that is proved, one with tools if any.

    If that begins a new sample wherever a user speaks, another that can do as much and need not
    is taken. A family is known by what its renderer writes, not by the model's name. `options` are
    values of the template's own variables, such as enable_thinking; `stop_ids` are the ends of
    turns in generation_config.json, `max_tokens` those of a context: see `Proved`. Raises
    ConfigError, with the reason of each codec, where none is proved.
    """
    reasons: list[str] = []
    found: list[Proved] = []
    for proved in _proved(tokenizer, kind, options or {}, stop_ids, max_tokens, reasons):
        found.append(proved)
        if not proved.tool_refusal and proved.extends_users:
            break
    if not found:
        raise ConfigError(
            f"the tokenizer's chat template cannot be used over several turns, "
            f"with codec={kind}:\n" + "\n".join(f"  {reason}" for reason in reasons)
        )
    return _best(found)


def _best(found: Sequence[Proved]) -> Proved:
    with_tools = [one for one in found if not one.tool_refusal]
    first = with_tools[0] if with_tools else found[-1]  # the last is the template's own
    if first.extends_users:
        return first
    like_it = [
        one
        for one in found
        if bool(one.tool_refusal) <= bool(first.tool_refusal)
        and bool(one.parallel_refusal) <= bool(first.parallel_refusal)
    ]
    return next((one for one in like_it if one.extends_users), first)


def _proved(
    tokenizer: ChatTokenizer,
    kind: CodecKind,
    options: Mapping[str, JsonValue],
    stop_ids: Sequence[int],
    max_tokens: int | None,
    reasons: list[str],
) -> Iterator[Proved]:
    """Codecs that are proved; `reasons` gets those of the others.

    The template's own knows the ends of turns that a family has, too.
    """
    ends = {*stop_ids}
    if kind != "template":
        for family, variants in FAMILIES.items():
            for variant in variants:
                try:
                    known = RenderersCodec(tokenizer, family, options, variant, stop_ids)
                except ValueError as error:
                    reasons.append(f"renderers:{family}: {str(error).splitlines()[0]}")
                    continue
                try:
                    proved = Proved(known, Template(tokenizer, options), max_tokens)
                except ConfigError as error:
                    reasons.append(str(error))
                    continue
                ends |= proved.stop_ids
                yield proved
    if kind != "renderers":
        try:
            codec = TemplateCodec(tokenizer, options, sorted(ends))
            yield Proved(codec, Template(tokenizer, options), max_tokens)
        except ConfigError as error:
            reasons.append(f"template: {error}")
        except REFUSALS as error:
            reasons.append(f"template: the chat template cannot render a conversation: {error}")
