"""The laws of a codec on random conversations, for each family, codec and template."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    JsonValue,
    TemplateRenderer,
    ToolCall,
    ToolSpec,
    ValidatedChatTemplate,
)
from mcore_rl.agents.chat_template.validation import (
    CodecKind,
    Conversation,
    find_difference,
    select_codec,
)
from mcore_rl.config.errors import ConfigError
from tests.nightly import nightly
from tests.unit.agents.families import FAMILIES, template_of, tokenizer_of

# What each codec is, whether it has tools and several calls a turn, and whether it goes on from a
# turn without reasoning where a user speaks: one that never does would break no law.
PROVED = {
    ("qwen3", "renderers"): "renderers:qwen3, tools, several calls",
    ("qwen3.5", "renderers"): "renderers:qwen3.5, tools, several calls",
    ("deepseek-v3", "renderers"): "renderers:deepseek-v3, tools, several calls, users",
    ("deepseek-r1", "renderers"): "renderers:deepseek-r1",
    ("glm-4.5", "renderers"): "renderers:glm-4.5, tools, several calls",
    ("kimi-k2", "renderers"): "renderers:kimi-k2, tools, several calls, users",
    ("llama-3", "renderers"): "renderers:llama-3, tools, users",
    ("gpt-oss", "renderers"): "harmony, tools",
    ("chatml", "template"): "template, users",
    ("qwen3", "template"): "template, tools, several calls, users",
    ("deepseek-v3", "template"): "template, users",
    ("kimi-k2", "template"): "template, users",
    ("qwen2", "template"): "template, users",
    ("deepseek-v2", "template"): "template, users",
    ("moonlight", "template"): "template, users",
    ("published/qwen2.5", "renderers"): "renderers:qwen3, tools, several calls",
    ("published/qwen2.5", "template"): "template, tools, several calls, users",
    ("published/qwen3", "renderers"): "renderers:qwen3, tools, several calls",
    ("published/qwen3", "template"): "template, tools, several calls, users",
    ("published/qwen3-2507", "renderers"): "renderers:qwen3, tools, several calls",
    ("published/qwen3-2507", "template"): "template, tools, several calls, users",
    ("published/deepseek-v3", "renderers"): "renderers:deepseek-r1",
    ("published/deepseek-r1-distill", "renderers"): "renderers:deepseek-r1",
    ("published/glm-4.5", "renderers"): "renderers:glm-4.5, tools, several calls",
}
# What breaks the laws, and the word on it.
REFUSED = {
    ("qwen3.5", "template"): "trims white space of earlier turns",
    ("deepseek-r1", "template"): "strips the reasoning of earlier turns",
    ("glm-4.5", "template"): "trims white space of earlier turns",
    ("gpt-oss", "template"): "ends the last turn with another token than earlier turns",
    ("llama-3", "template"): "trims white space of earlier turns",
    ("llama-2", "auto"): "ends an assistant's turn with text, not a token",
    ("mixtral", "auto"): "cannot render a conversation: roles must alternate",
    ("published/deepseek-v3", "template"): "strips the reasoning of earlier turns",
    ("published/deepseek-r1-distill", "template"): "strips the reasoning of earlier turns",
    ("published/glm-4.5", "template"): "trims white space of earlier turns",
}
NAMES, KEYS = ("look", "add_up"), ("at", "n")
TEXTS = ("", " ", "\n", "Yes.", "  in \n\n", "```\nx = 1\n```", "東京 🌊 e\u0301", "{'a': \"\\\"}")
LETTERS = "ab 1.\n\t\"'{}<>é東🌊\\"
VALUES: tuple[JsonValue, ...] = (7, True, None, "12", [1, "a b"], {"k": 0.5})


@cache
def codec_of(family: str, kind: str) -> tuple[ValidatedChatTemplate, TemplateRenderer]:
    tokenizer = tokenizer_of(family)
    codec = select_codec(tokenizer, kind)
    return codec, codec.template


def some_text(chance: Random) -> str:
    if chance.random() < 0.5:
        return chance.choice(TEXTS)
    return "".join(chance.choices(LETTERS, k=chance.randrange(9)))


def some_turn(chance: Random, first: int) -> tuple[ChatMessage, tuple[ChatMessage, ...]]:
    """Draw an assistant's turn, and its answers; `first` is the number of its first call."""
    reasoning = chance.choice(("", "Hm. Let me see", "1 < 2\n\nso: é"))
    names = chance.choices(NAMES, k=chance.choice((0, 0, 1, 2, 3)))
    values = (*VALUES, some_text(chance))
    calls = tuple(
        ToolCall(
            name,
            {key: chance.choice(values) for key in KEYS[: chance.randrange(3)]},
            f"functions.{name}:{first + i}",
        )
        for i, name in enumerate(names)
    )
    turn = ChatMessage("assistant", some_text(chance), reasoning, calls)
    if not calls:
        return turn, (ChatMessage("user", some_text(chance)),)
    return turn, tuple(
        ChatMessage("tool", some_text(chance), "", (), call.id, call.name) for call in calls
    )


def some_conversation(seed: int) -> Conversation:
    chance = Random(seed)
    before = [ChatMessage("system", some_text(chance))] if chance.random() < 0.5 else []
    before.append(ChatMessage("user", some_text(chance)))
    for i in range(chance.randrange(2)):
        turn, answers = some_turn(chance, 4 * i)
        before += [turn, *answers]
    turn, after = some_turn(chance, 8)
    parameters: dict[str, JsonValue] = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = tuple(ToolSpec(name, "Does it.", parameters) for name in NAMES)
    return Conversation(tuple(before), turn, after, tools)


def with_calls(given: Conversation, most: int) -> Conversation:
    """Limit a conversation to so many calls a turn; with none, tools' answers become users'."""

    def limit_calls(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        messages_left: list[ChatMessage] = []
        for message in messages:
            if message.role == "tool":
                calls = messages_left[-1].tool_calls
                if not most:
                    message = ChatMessage("user", message.content)
                elif not any(call.id == message.tool_call_id for call in calls):
                    continue
            messages_left.append(replace(message, tool_calls=message.tool_calls[:most]))
        return tuple(messages_left)

    both = limit_calls((given.turn, *given.after))
    tools = given.tools if most else ()
    return Conversation(limit_calls(given.before), both[0], both[1:], tools)


@pytest.mark.parametrize("count", [20, nightly(2000)])
def test_laws(count: int) -> None:
    hold = settings(max_examples=count, suppress_health_check=list(HealthCheck), database=None)
    hold(given(st.integers(0, 2**32), st.none() | st.integers(0, 30))(laws_hold))()


def laws_hold(seed: int, cut: int | None) -> None:
    conversation = some_conversation(seed)
    fewer = {most: with_calls(conversation, most) for most in (0, 1, 3)}
    for family, kind in PROVED:
        codec, template = codec_of(family, kind)
        most = 0 if codec.tool_refusal else 1 if codec.parallel_refusal else 3
        assert find_difference(codec, template, fewer[most], cut) == "", (family, kind)


def test_what_is_proved():
    summaries = {}
    for family, kind in PROVED:
        codec, _ = codec_of(family, kind)
        summaries[family, kind] = (
            codec.name
            + ("" if codec.tool_refusal else ", tools")
            + ("" if codec.parallel_refusal else ", several calls")
            + (", users" if codec.extends_users else "")
        )
    assert summaries == PROVED
    assert {family for family, _ in [*PROVED, *REFUSED]} == FAMILIES.keys()


def test_auto_is_a_codec_that_goes_on_where_a_user_speaks_if_there_is_one():
    for family in {family for family, _ in PROVED}:
        kinds = [kind for kind in ("renderers", "template") if (family, kind) in PROVED]
        codecs = [codec_of(family, kind)[0] for kind in kinds]
        chosen, _ = codec_of(family, "auto")
        most = max(("tools" in PROVED[family, kind]) for kind in kinds)
        as_able = [codec for codec in codecs if (not codec.tool_refusal) == most]
        assert chosen.name in {codec.name for codec in as_able}, family
        assert chosen.extends_users == any(codec.extends_users for codec in as_able), family


@pytest.mark.parametrize(("family", "kind"), PROVED)
def test_prompts_of_agents_are_those_of_rows(family: str, kind: str):
    # Renderers get whatever values of the template's variables they need.
    rows = [{"role": "user", "content": "Go."}]
    codec, _ = codec_of(family, kind)
    expected = tokenizer_of(family).apply_chat_template(
        rows, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert codec.render([ChatMessage("user", "Go.")]) == expected


def test_a_renderer_gets_whether_its_template_thinks_by_default():
    opens = "enable_thinking is defined and not enable_thinking"
    for family, template in (
        ("qwen3.5", ""),
        ("qwen3.5", template_of("qwen3.5").replace(opens, "not enable_thinking")),
    ):
        tokenizer = tokenizer_of(family, template)
        codec = select_codec(tokenizer, "renderers")
        prompt = tokenizer.decode(codec.render([ChatMessage("user", "Go.")]))
        assert prompt.endswith("</think>\n\n" if template else "<think>\n")
        completion = tokenizer.encode("A door.<|im_end|>", add_special_tokens=False)
        turn = codec.parse(completion, (), tokenizer.encode(prompt, add_special_tokens=False))
        assert turn.content == ("A door." if template else "")


@pytest.mark.parametrize(("family", "kind"), REFUSED)
def test_a_template_that_breaks_the_laws_is_refused_by_name(family: str, kind: CodecKind):
    with pytest.raises(ConfigError, match=f"template: the chat template {REFUSED[family, kind]}"):
        select_codec(tokenizer_of(family), kind)


HARMONY = [
    (
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Two miles.<|return|>",
        ("Two miles.", "Let me see.", True, []),
    ),
    (  # as the model itself writes a call
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"n\": 1}<|call|>",
        ("", "", True, [("ok", "look", {"n": 1})]),
    ),
    (
        " to=functions.look<|channel|>commentary json<|message|>{\"n\": <|call|>",
        ("", "", True, [("malformed", "look", {})]),
    ),
    (
        " to=functions.fly<|channel|>commentary json<|message|>{}<|call|>",
        ("", "", True, [("unknown_tool", "fly", {})]),
    ),
    ("<|channel|>analysis<|message|>Let me", ("", "Let me", False, [])),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.look json<|message|>{}<|call|>",
        ("I look.", "", True, [("ok", "look", {})]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_a_turn_in_channels_is_split_into_reasoning_calls_and_answer(text: str, expected: object):
    codec, tokenizer = codec_of("gpt-oss", "auto")[0], tokenizer_of("gpt-oss")
    ids = tokenizer.encode(text, add_special_tokens=False)
    turn = codec.parse(ids, [ToolSpec("look", "Looks.", {"type": "object", "properties": {}})])
    calls = [(call.status, call.name, call.arguments) for call in turn.calls]
    assert (turn.content, turn.reasoning, turn.reasoning_closed, calls) == expected
    for call in turn.calls:
        assert call.text in tokenizer.decode(ids[slice(*call.span)])


def test_only_an_answer_of_a_tool_extends_a_turn_in_channels():
    codec, tokenizer = codec_of("gpt-oss", "auto")[0], tokenizer_of("gpt-oss")
    prompt = codec.render([ChatMessage("user", "Go.")])
    call = tokenizer.encode(HARMONY[1][0], add_special_tokens=False)
    answer = ChatMessage("tool", 'A "door".', name="look")
    extended = codec.extend(prompt, call, [answer])
    assert extended is not None and extended[: len(prompt) + len(call)] == [*prompt, *call]
    assert tokenizer.decode(extended[len(prompt) + len(call) :]) == (
        "<|start|>functions.look to=assistant<|channel|>commentary<|message|>"
        '"A \\"door\\"."<|end|><|start|>assistant'
    )
    final = tokenizer.encode(HARMONY[0][0], add_special_tokens=False)
    assert codec.extend(prompt, final, [ChatMessage("user", "And back?")]) is None
    assert codec.extend(prompt, call[:-1], [answer]) is None
    assert codec.stop_ids == {*tokenizer.encode("<|return|><|call|>", add_special_tokens=False)}
