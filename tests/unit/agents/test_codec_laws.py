"""The laws of a codec on 2,000 random conversations, for each family, codec and template."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_rl.agents.choose import codec_for
from mcore_rl.agents.codec import JsonValue, Message, ToolCall, ToolSpec
from mcore_rl.agents.codec_proof import Proved, Template, difference
from mcore_rl.agents.proof_conversations import Conversation
from tests.unit.agents.families import FAMILIES, tokenizer_of

OPTIONS: dict[str, dict[str, JsonValue]] = {"llama-3": {"date_string": "26 Jul 2024"}}
# What each codec is, and whether it has tools and several calls a turn.
PROVED = {
    ("qwen3", "renderers"): "renderers:qwen3, tools, several calls",
    ("qwen3.5", "renderers"): "renderers:qwen3.5, tools, several calls",
    ("deepseek-v3", "renderers"): "renderers:deepseek-v3, tools, several calls",
    ("deepseek-r1", "renderers"): "renderers:deepseek-r1",
    ("glm-4.5", "renderers"): "renderers:glm-4.5, tools, several calls",
    ("kimi-k2", "renderers"): "renderers:kimi-k2, tools, several calls",
    ("llama-3", "renderers"): "renderers:llama-3, tools",
    ("chatml", "template"): "template",
    ("qwen3", "template"): "template, tools, several calls",
    ("deepseek-v3", "template"): "template",
    ("kimi-k2", "template"): "template",
}
NAMES = ("look", "add_up")
TEXTS = st.one_of(
    st.sampled_from(["", " ", "\n", "Yes.", "  in \n\n", "```\nx = 1\n```", "東京 🌊 é\u0301"]),
    st.text("ab 1.\n\t\"'{}<>é東🌊\\", max_size=9),
)
VALUES: st.SearchStrategy[JsonValue] = st.one_of(
    TEXTS, st.integers(-9, 99), st.booleans(), st.none(), st.just([1, "a b"]), st.just({"k": 0.5})
)


@cache
def codec_of(family: str, kind: str) -> tuple[Proved, Template]:
    options = OPTIONS.get(family, {})
    tokenizer = tokenizer_of(family)
    return codec_for(tokenizer, kind, options), Template(tokenizer, variables(family, kind))


def variables(family: str, kind: str) -> dict[str, JsonValue]:
    """With these the template of Qwen3.5 opens the reasoning, as its renderer is tried first."""
    return {"enable_thinking": True} if family == "qwen3.5" else OPTIONS.get(family, {})


@st.composite
def turns(draw: st.DrawFn, first: int) -> tuple[Message, tuple[Message, ...]]:
    """An assistant's turn, and what answers it; `first` is the number of its first call."""
    reasoning = draw(st.sampled_from(["", "", "Hm. Let me see", "1 < 2\n\nso: é"]))
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3))
    keys = st.sampled_from(["at", "n", "what_for"])
    calls = tuple(
        ToolCall(n, draw(st.dictionaries(keys, VALUES, max_size=2)), f"functions.{n}:{first + i}")
        for i, n in enumerate(names)
    )
    said = Message("assistant", draw(TEXTS), reasoning, calls)
    if not calls:
        return said, (Message("user", draw(TEXTS)),)
    answers = tuple(Message("tool", draw(TEXTS), "", (), c.id, c.name) for c in calls)
    return said, answers


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    before = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    before.append(Message("user", draw(TEXTS)))
    for i in range(draw(st.integers(0, 2))):
        said, answers = draw(turns(4 * i))
        before += [said, *answers]
    said, after = draw(turns(8))
    parameters: dict[str, JsonValue] = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = tuple(ToolSpec(name, draw(TEXTS), parameters) for name in NAMES)
    return Conversation(tuple(before), said, after, tools)


def with_calls(given: Conversation, most: int) -> Conversation:
    """The conversation with so many calls a turn; with none, tools' answers become users'."""

    def kept(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        found: list[Message] = []
        for message in messages:
            if message.role == "tool":
                calls = found[-1].tool_calls
                if not most:
                    message = Message("user", message.content)
                elif not any(call.id == message.tool_call_id for call in calls):
                    continue
            found.append(replace(message, tool_calls=message.tool_calls[:most]))
        return tuple(found)

    both = kept((given.turn, *given.after))
    tools = given.tools if most else ()
    return Conversation(kept(given.before), both[0], both[1:], tools)


@settings(max_examples=2000, suppress_health_check=list(HealthCheck), database=None)
@given(conversations(), st.none() | st.integers(0, 30))
def test_laws(conversation: Conversation, cut: int | None) -> None:
    fewer = {most: with_calls(conversation, most) for most in (0, 1, 3)}
    for family, kind in PROVED:
        codec, template = codec_of(family, kind)
        most = 0 if codec.tool_refusal else 1 if codec.parallel_refusal else 3
        assert difference(codec, template, fewer[most], cut) == "", (family, kind)


def test_what_is_proved():
    found = {}
    for family, kind in PROVED:
        codec, _ = codec_of(family, kind)
        found[family, kind] = (
            codec.name
            + ("" if codec.tool_refusal else ", tools")
            + ("" if codec.parallel_refusal else ", several calls")
        )
    assert found == PROVED
    assert {family for family, _ in PROVED} == FAMILIES.keys()
