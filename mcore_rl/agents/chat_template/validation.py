"""Choose the codec of a tokenizer, and compare it with the chat template before it is used.

The law: what a codec puts behind a turn is what the template puts there when it renders the whole
conversation. `find_difference` checks it on a conversation; `validate_codec` on some twenty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError

from mcore_rl.agents.chat_template.codec import (
    ChatCodec,
    ChatMessage,
    ChatTokenizer,
    JsonValue,
    NamedCodec,
    TemplateRenderer,
    ToolCall,
    ToolSpec,
    ValidatedChatTemplate,
)
from mcore_rl.agents.chat_template.harmony_codec import HarmonyCodec
from mcore_rl.agents.chat_template.renderers_codec import FAMILIES, RenderersCodec
from mcore_rl.agents.chat_template.template_codec import TemplateCodec
from mcore_rl.config.errors import ConfigError

CodecKind = Literal["auto", "renderers", "template"]
# Raised by templates and renderers for a conversation that they do not take.
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A turn of an assistant, the messages before it, and the messages after it."""

    before: tuple[ChatMessage, ...]
    turn: ChatMessage
    after: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()


def select_codec(
    tokenizer: ChatTokenizer,
    kind: CodecKind = "auto",
    options: Mapping[str, JsonValue] | None = None,
    stop_ids: Sequence[int] = (),
    max_tokens: int | None = None,
) -> ValidatedChatTemplate:
    """Return the first codec that agrees with the tokenizer's chat template, with tools if any.

    If that one begins a new sample at each message of a user, another that can do as much and
    continues the sample is taken. A family is recognised by what its renderer writes, not by the
    model's name.

    Args:
        options: Values of the template's own variables, such as enable_thinking.
        stop_ids: Ends of turns in generation_config.json.
        max_tokens: Tokens of a context; see `ValidatedChatTemplate`.

    Raises:
        ConfigError: No codec agrees; the message has the reason of each.
    """
    reasons: list[str] = []
    codecs: list[ValidatedChatTemplate] = []
    for codec in _validate_all(tokenizer, kind, options or {}, stop_ids, max_tokens, reasons):
        codecs.append(codec)
        if not codec.tool_refusal and codec.extends_users:
            break
    if not codecs:
        raise ConfigError(
            f"the tokenizer's chat template cannot be used over several turns, "
            f"with codec={kind}:\n" + "\n".join(f"  {reason}" for reason in reasons)
        )
    with_tools = [codec for codec in codecs if not codec.tool_refusal]
    first = with_tools[0] if with_tools else codecs[-1]  # the last is the template's own
    if first.extends_users:
        return first
    equals = [
        codec
        for codec in codecs
        if bool(codec.tool_refusal) <= bool(first.tool_refusal)
        and bool(codec.parallel_refusal) <= bool(first.parallel_refusal)
    ]
    return next((codec for codec in equals if codec.extends_users), first)


def _validate_all(
    tokenizer: ChatTokenizer,
    kind: CodecKind,
    options: Mapping[str, JsonValue],
    stop_ids: Sequence[int],
    max_tokens: int | None,
    reasons: list[str],
) -> Iterator[ValidatedChatTemplate]:
    """Yield the codecs that agree with the template; append why others do not to `reasons`.

    The template's own codec also gets the ends of turns of the families that agree.
    """
    template, ends = TemplateRenderer(tokenizer, options), {*stop_ids}
    if kind != "template":
        try:
            harmony = HarmonyCodec(tokenizer, options, stop_ids)
            yield validate_codec(harmony, harmony.template, max_tokens)
        except ValueError as error:
            reasons.append(f"harmony: {error}")
        except ConfigError as error:
            reasons.append(str(error))
        for family, variants in FAMILIES.items():
            for variant in variants:
                try:
                    codec = RenderersCodec(tokenizer, family, options, variant, stop_ids)
                except ValueError as error:
                    reasons.append(f"renderers:{family}: {str(error).splitlines()[0]}")
                    continue
                try:
                    validated = validate_codec(codec, template, max_tokens)
                except ConfigError as error:
                    reasons.append(str(error))
                    continue
                ends |= validated.stop_ids
                yield validated
    if kind != "renderers":
        try:
            yield validate_codec(
                TemplateCodec(tokenizer, options, sorted(ends)), template, max_tokens
            )
        except ConfigError as error:
            reasons.append(f"template: {error}")
        except TEMPLATE_ERRORS as error:
            reasons.append(f"template: the chat template cannot render a conversation: {error}")


def validate_codec(
    codec: NamedCodec, template: TemplateRenderer, max_tokens: int | None = None
) -> ValidatedChatTemplate:
    """Compare a codec with the chat template on PLAIN, TOOLS and PARALLEL.

    If it differs only with tools, or only with several calls in a turn, those are refused.

    Raises:
        ConfigError: It differs without tools; the message names the conversation.
    """
    for case, conversation in PLAIN.items():
        if difference := find_difference(codec, template, conversation):
            raise ConfigError(f"the codec {codec.name} {difference} ({case})")
    tool_refusal = codec.tool_refusal or _find_fault(codec, template, TOOLS)
    plain = PLAIN["a system message"]
    prompt, completion = _split_render(codec, template, plain)
    return ValidatedChatTemplate(
        codec,
        template,
        max_tokens,
        tool_refusal,
        parallel_refusal=tool_refusal or _find_fault(codec, template, PARALLEL),
        extends_users=codec.extend(prompt, completion, plain.after, plain.tools) is not None,
    )


def find_difference(
    codec: ChatCodec, template: TemplateRenderer, given: Conversation, cut: int | None = None
) -> str:
    """Return how `codec` differs from the template on a conversation; empty if they agree.

    Args:
        cut: The turn ends after so many tokens, without the one that ends it.
    """
    try:
        return _compare_extension(codec, template, given, cut)
    except TEMPLATE_ERRORS as error:
        return f"cannot render a conversation: {error}"


def _compare_extension(
    codec: ChatCodec, template: TemplateRenderer, given: Conversation, cut: int | None
) -> str:
    prompt = codec.render(given.before, given.tools)
    render = template.render([*given.before, given.turn, *given.after], given.tools)
    start = _find_turn_start(codec, template, given, prompt, render)
    completion = _cut_after_stop(codec, render[start:])
    if not completion:
        last_turn = _cut_after_stop(codec, _render_last_turn(template, given, prompt))
        if not last_turn:
            return "does not know the token that ends an assistant's turn"
        # The template ends earlier turns with another token.
        if codec.extend(prompt, last_turn, given.after, given.tools) is not None:
            return "goes on from earlier turns, which the chat template changes"
        return ""
    after = render[start + len(completion) :]

    thought = given.turn.reasoning.strip()
    if _is_history_changed(template, given, prompt, render):
        last_turn = _render_as_last(codec, template, given, prompt, completion[-1])
        for turn in (completion, completion[:cut], last_turn):
            if codec.extend(prompt, turn, given.after, given.tools) is not None:
                return "goes on from earlier turns, which the chat template changes"
        return ""
    if thought and thought not in template.decode(completion):
        last_turn = _render_as_last(codec, template, given, prompt, completion[-1])
        if thought not in template.decode(last_turn):  # the template has no reasoning
            return ""
        if codec.extend(prompt, last_turn, given.after, given.tools) is not None:
            return "keeps the reasoning of an earlier turn, which the chat template strips"
        return ""

    if cut is not None:
        cut_turn = completion[: min(cut, len(completion) - 1)]
        return _compare_cut_off(codec, given, prompt, cut_turn, after)
    extended = codec.extend(prompt, completion, given.after, given.tools)
    if extended is None:
        is_of_tools = all(message.role == "tool" for message in given.after)
        return "does not extend a turn with the answers of its tools" if is_of_tools else ""
    expected = [*prompt, *completion, *after]
    if extended == expected:
        return ""
    start = _count_common(extended, expected)
    return (
        f"extends a turn in another way than the chat template: "
        f"{template.decode(extended[start : start + 8])!r} for "
        f"{template.decode(expected[start : start + 8])!r}"
    )


def _compare_cut_off(
    codec: ChatCodec, given: Conversation, prompt: list[int], turn: list[int], after: list[int]
) -> str:
    extended = codec.extend(prompt, turn, given.after, given.tools)
    if extended is None:
        return ""
    done = [*prompt, *turn]
    if extended[: len(done)] != done:
        return "changes the tokens of a turn that was cut off"
    closing = extended[len(done) : len(extended) - len(after)]
    if extended[len(extended) - len(after) :] != after or not codec.stop_ids.intersection(closing):
        return "does not end a turn that was cut off"
    return ""


def _render_as_last(
    codec: ChatCodec, template: TemplateRenderer, given: Conversation, prompt: list[int], end: int
) -> list[int]:
    """Render the turn as the last of its conversation, with its reasoning.

    Args:
        end: Token to end it with if the template does not.
    """
    turn = _render_last_turn(template, given, prompt)
    return _cut_after_stop(codec, turn) or [*turn, end]


def _render_last_turn(
    template: TemplateRenderer, given: Conversation, prompt: list[int]
) -> list[int]:
    render = template.render([*given.before, given.turn], given.tools, generate=False)
    return render[_count_common(prompt, render) :]


def _is_history_changed(
    template: TemplateRenderer, given: Conversation, prompt: list[int], render: list[int]
) -> bool:
    """Return whether the whole render changes the messages before the turn.

    The text that a prompt opens the turn with does not count: see _find_turn_start.
    """
    text = template.decode(render)
    history = template.render(given.before, given.tools, generate=False)
    return not text.startswith((template.decode(prompt), template.decode(history)))


def _find_turn_start(
    codec: ChatCodec,
    template: TemplateRenderer,
    given: Conversation,
    prompt: list[int],
    render: list[int],
) -> int:
    """Return the position of the turn in the whole render.

    A render need not begin with the prompt: the prompt may open reasoning that the template leaves
    out of earlier turns. Then the turn begins behind as many ends of turns as the history has.
    """
    if render[: len(prompt)] == prompt:
        return len(prompt)
    history = template.render(given.before, given.tools, generate=False)
    before = sum(token in codec.stop_ids for token in history)
    ends = [i for i, token in enumerate(render) if token in codec.stop_ids]
    start = ends[before - 1] + 1 if before else 0
    return max(start, _count_common(prompt, render))


def _cut_after_stop(codec: ChatCodec, ids: list[int]) -> list[int]:
    """Return the tokens up to the first that ends a turn, included; empty if none does."""
    end = next((i for i, token in enumerate(ids) if token in codec.stop_ids), -1)
    return ids[: end + 1]


def _count_common(left: list[int], right: list[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _find_fault(
    codec: ChatCodec, template: TemplateRenderer, conversations: Mapping[str, Conversation]
) -> str:
    """Describe the first conversation that the codec writes or reads wrongly; empty if none."""
    for case, given in conversations.items():
        fault = find_difference(codec, template, given) or _compare_calls(codec, template, given)
        if fault:
            return f"it {fault} ({case})"
    return ""


def _compare_calls(codec: ChatCodec, template: TemplateRenderer, given: Conversation) -> str:
    """Describe calls of the turn that the codec reads otherwise; empty if there are none."""
    prompt, completion = _split_render(codec, template, given)
    calls = codec.parse(completion, given.tools, prompt).calls
    parsed = [(call.status, call.name, call.arguments) for call in calls]
    if parsed == [("ok", call.name, call.arguments) for call in given.turn.tool_calls]:
        return ""
    return f"reads the calls of {template.decode(completion)!r} as {parsed}"


def _split_render(
    codec: ChatCodec, template: TemplateRenderer, given: Conversation
) -> tuple[list[int], list[int]]:
    """Return the prompt of the turn, and the turn as the whole render has it."""
    prompt = codec.render(given.before, given.tools)
    render = template.render([*given.before, given.turn, *given.after], given.tools)
    start = _find_turn_start(codec, template, given, prompt, render)
    return prompt, _cut_after_stop(codec, render[start:])


def _make_user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def _make_turn(text: str, reasoning: str = "", *calls: ToolCall) -> ChatMessage:
    return ChatMessage("assistant", text, reasoning, calls)


def _make_answer(call: ToolCall, text: str) -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id=call.id, name=call.name)


def _make_call(name: str, index: int = 0, **arguments: JsonValue) -> ToolCall:
    return ToolCall(name, arguments, f"functions.{name}:{index}")


_SYSTEM = ChatMessage("system", "You are careful.")
_QUESTION = _make_user("How far is it to the harbour?")
_NEXT = _make_user("And back?")
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
_DISTANCE = _make_call("distance", start="home", end="harbour")
_ODD = _make_call("distance", start="Zürich 東", end='a "quoted" \\ place')
_CLOCK = _make_call("clock", 1)

# Conversations to compare on, each named by the case that it is for.
PLAIN: Mapping[str, Conversation] = {
    "no system message": Conversation((_QUESTION,), _make_turn(_FAR), (_NEXT,)),
    "a system message": Conversation((_SYSTEM, _QUESTION), _make_turn(_FAR), (_NEXT,)),
    "an earlier turn": Conversation(
        (_SYSTEM, _QUESTION, _make_turn(_FAR), _NEXT),
        _make_turn("The same."),
        (_make_user("Sure?"),),
    ),
    "two messages at once": Conversation(
        (_QUESTION,), _make_turn(_FAR), (_NEXT, _make_user("Well?"))
    ),
    "unicode": Conversation((_make_user(_UNICODE),), _make_turn(_UNICODE), (_make_user(_UNICODE),)),
    "empty texts": Conversation((_make_user(""),), _make_turn(""), (_make_user(""),)),
    "markup": Conversation(
        (_make_user("<b>{{ x }}</b> & {%"),), _make_turn("`a < b`\n\nYes."), (_NEXT,)
    ),
    "reasoning": Conversation((_QUESTION,), _make_turn(_FAR, _THOUGHT), (_NEXT,)),
}
TOOLS: Mapping[str, Conversation] = {
    "tools, none called": Conversation((_SYSTEM, _QUESTION), _make_turn(_FAR), (_NEXT,), _TOOLS),
    "a call and its answer": Conversation(
        (_SYSTEM, _QUESTION), _make_turn("", "", _DISTANCE), (_make_answer(_DISTANCE, "2"),), _TOOLS
    ),
    "a call, no system message": Conversation(
        (_QUESTION,), _make_turn("", "", _DISTANCE), (_make_answer(_DISTANCE, "2 miles"),), _TOOLS
    ),
    "text and a call": Conversation(
        (_QUESTION,), _make_turn("I look it up.", "", _ODD), (_make_answer(_ODD, _UNICODE),), _TOOLS
    ),
    "reasoning and a call": Conversation(
        (_QUESTION,), _make_turn("", _THOUGHT, _DISTANCE), (_make_answer(_DISTANCE, ""),), _TOOLS
    ),
    "a second call": Conversation(
        (_QUESTION, _make_turn("", "", _DISTANCE), _make_answer(_DISTANCE, "2")),
        _make_turn("", "", _CLOCK),
        (_make_answer(_CLOCK, "noon"),),
        _TOOLS,
    ),
    "an answer after reasoning and a call": Conversation(
        (_QUESTION, _make_turn("", _THOUGHT, _DISTANCE), _make_answer(_DISTANCE, "2")),
        _make_turn(_FAR),
        (_NEXT,),
        _TOOLS,
    ),
    "an answer after a call": Conversation(
        (_QUESTION, _make_turn("", "", _DISTANCE), _make_answer(_DISTANCE, "2")),
        _make_turn(_FAR),
        (_NEXT,),
        _TOOLS,
    ),
}
PARALLEL: Mapping[str, Conversation] = {
    "two calls at once": Conversation(
        (_QUESTION,),
        _make_turn("", "", _DISTANCE, _CLOCK),
        (_make_answer(_DISTANCE, "2"), _make_answer(_CLOCK, "noon")),
        _TOOLS,
    ),
}
