"""Codecs and templates with a fault are found by the proof, and refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    TemplateRenderer,
    ToolCall,
    ToolSpec,
    ValidatedChatTemplate,
)
from mcore_rl.agents.chat_template.renderers_codec import RenderersCodec
from mcore_rl.agents.chat_template.template_codec import TemplateCodec
from mcore_rl.agents.chat_template.validation import select_codec, validate_codec
from mcore_rl.config.errors import ConfigError
from tests.unit.agents.families import template_of, tokenizer_of

LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {}})
ASK = [ChatMessage("system", "Be brief."), ChatMessage("user", "What is there?")]
GO_ON = [ChatMessage("user", "Go on.")]
ANSWERS = [ChatMessage("tool", "A door.", "", (), f"functions.look:{i}", "look") for i in range(2)]


def changed(family: str, old: str, new: str) -> str:
    template = template_of(family)
    assert old in template
    return template.replace(old, new)


def ids(family: str, text: str) -> list[int]:
    return tokenizer_of(family).encode(text, add_special_tokens=False)


class Faulty(TemplateCodec):
    """The codec of Qwen3's template with one of the faults that were shipped elsewhere."""

    fault = ""

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        done = [*prompt_ids, *completion_ids]
        if self.fault == "keeps reasoning":
            after = self._render_after_turn(new_messages, tools)
            return done + after[1:]
        extended = super().extend(prompt_ids, completion_ids, new_messages, tools)
        if self.fault == "drops the separator" and extended:
            return extended[: len(done)] + extended[len(done) + 1 :]
        if self.fault == "renders calls again":
            turn = self.parse(completion_ids, tools, prompt_ids).to_message()
            if turn.tool_calls:
                return self.render([*ASK, turn, *new_messages], tools)
        return extended

    def _contains_reasoning(self, ids: list[int]) -> bool:
        if self.fault == "looks at the last turn alone":
            start = self._tokenizer.get_added_vocab()["<|im_start|>"]
            ids = ids[max(i for i, token in enumerate(ids) if token == start) :]
        return super()._contains_reasoning(ids)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("drops the separator", "extends a turn in another way than the chat template: '<|im_sta"),
        ("keeps reasoning", "keeps the reasoning of an earlier turn, which the chat template str"),
    ],
)
def test_a_codec_with_a_fault_is_refused(fault: str, words: str):
    tokenizer = tokenizer_of("qwen3")
    codec = Faulty(tokenizer, {})
    codec.fault = fault
    with pytest.raises(ConfigError, match=f"the codec template {re.escape(words)}"):
        validate_codec(codec, TemplateRenderer(tokenizer, {}))


def test_a_codec_that_keeps_reasoning_of_turns_before_the_last_has_no_tools():
    tokenizer = tokenizer_of("published/qwen3")
    codec = Faulty(tokenizer, {})
    assert validate_codec(codec, TemplateRenderer(tokenizer, {})).tool_refusal == ""
    codec.fault = "looks at the last turn alone"
    assert validate_codec(codec, TemplateRenderer(tokenizer, {})).tool_refusal == (
        "it goes on from earlier turns, which the chat template changes (an answer after "
        "reasoning and a call)"
    )


CALL_TEXT = '<tool_call>\n{"name":  "look",\n "arguments": {}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("kind", ["renderers", "template"])
def test_a_call_keeps_the_tokens_that_were_sampled(kind: str):
    # The text has two spaces and a newline, which JSON written again would not have.
    codec = select_codec(tokenizer_of("qwen3"), kind)
    prompt, turn = codec.render(ASK, [LOOK]), ids("qwen3", CALL_TEXT)
    extended = codec.extend(prompt, turn, ANSWERS[:1], [LOOK])
    assert extended[: len(prompt) + len(turn)] == prompt + turn
    assert tokenizer_of("qwen3").decode(extended[len(prompt) + len(turn) :]) == (
        "\n<|im_start|>user\n<tool_response>\nA door.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    [call] = codec.parse(turn, [LOOK], prompt).calls
    assert (call.status, call.name, call.arguments) == ("ok", "look", {})
    assert call.span == (0, len(turn) - 1)


def test_a_codec_that_renders_calls_again_extends_nothing():
    tokenizer = tokenizer_of("qwen3")
    codec = Faulty(tokenizer, {})
    codec.fault = "renders calls again"
    proved = validate_codec(codec, TemplateRenderer(tokenizer, {}))
    assert "extends a turn in another way" in proved.tool_refusal
    proved = replace(proved, tool_refusal="", parallel_refusal="")
    prompt = proved.render(ASK, [LOOK])
    assert proved.extend(prompt, ids("qwen3", CALL_TEXT), ANSWERS[:1], [LOOK]) is None


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (changed("chatml", "message.content", "message.content | trim"), "trims white space"),
        (
            changed("chatml", "message.content", "message.content.split('</think>')[-1]"),
            "strips the reasoning of earlier turns",
        ),
        (changed("chatml", "<|im_end|>", "END"), "ends an assistant's turn with text"),
        # The newline is left out where an assistant's turn is not the last.
        (
            changed(
                "chatml",
                "'<|im_end|>\\n'",
                "'<|im_end|>' + ('' if message.role == 'assistant' and 'mile' in message.content "
                "else '\\n')",
            ),
            "extends a turn in another way than the chat template",
        ),
    ],
)
def test_a_template_that_breaks_the_laws_is_refused(template: str, words: str):
    with pytest.raises(ConfigError, match=words):
        select_codec(tokenizer_of("chatml", template), "template")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            changed("qwen3", "loop.index0 > last.user and (loop.last or thought)", "loop.last"),
            "strips the reasoning of a turn that called a tool",
        ),
        (changed("qwen3", '"name": "\' +', '"tool": "\' +'), "does not write calls as JSON in"),
    ],
)
def test_tools_of_a_template_are_refused_alone(template: str, words: str):
    codec = select_codec(tokenizer_of("qwen3", template), "template")
    assert codec.render(ASK)
    with pytest.raises(ConfigError, match=f"the codec template has no tools: .*{words}"):
        codec.render(ASK, [LOOK])
    with pytest.raises(ConfigError, match="has no tools"):
        codec.extend(codec.render(ASK), [], ANSWERS[:1])


def test_several_calls_are_refused_where_the_template_takes_one():
    codec = select_codec(tokenizer_of("llama-3"), "renderers")
    turn = ChatMessage("assistant", tool_calls=(ToolCall("look", {}), ToolCall("look", {})))
    with pytest.raises(ConfigError, match="takes one tool call a turn, not 2: "):
        codec.render([*ASK, turn])


@pytest.mark.parametrize("kind", ["renderers", "template"])
def test_the_token_that_ends_a_turn_is_context_after_a_cut(kind: str):
    codec, turn = select_codec(tokenizer_of("qwen3"), kind), ids("qwen3", "There is a")
    prompt = codec.render(ASK, [LOOK])
    extended = codec.extend(prompt, turn, ANSWERS, [LOOK])
    text = tokenizer_of("qwen3").decode(extended[len(prompt) + len(turn) :])
    assert text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")


SECOND_ENDS = [
    ("published/qwen2.5", "template", "<|endoftext|>"),
    ("kimi-k2", "renderers", "[EOS]"),
    ("kimi-k2", "template", "[EOS]"),
    ("llama-3", "renderers", "<|begin_of_text|>"),
]


@pytest.mark.parametrize(("family", "kind", "end"), SECOND_ENDS)
def test_a_second_token_that_ends_turns_is_no_text_and_ends_a_turn_once(family, kind, end):
    # If generation_config.json has another end, servers stop at it; the template has its own.
    [token] = ids(family, end)
    codec = select_codec(tokenizer_of(family), kind, stop_ids=[token])
    assert token in codec.stop_ids
    prompt, turn = codec.render(ASK), ids(family, "A door.")
    assert codec.parse([*turn, token], (), prompt).content == "A door."
    assert codec.extend(prompt, [*turn, token], GO_ON) is None  # begins a new sample
    cut = codec.extend(prompt, turn, GO_ON)
    assert cut is not None and token not in cut[len(prompt) :]


def test_a_template_codec_goes_on_only_from_a_turn_that_ends_as_the_template_ends_it():
    codec = select_codec(
        tokenizer_of("chatml"), "template", stop_ids=ids("chatml", "<|endoftext|>")
    )
    prompt, turn = codec.render(ASK), ids("chatml", "A door.")
    for end, goes_on in (("<|im_end|>", True), ("<|endoftext|>", False), ("<|im_start|>", True)):
        done = [*turn, *ids("chatml", end)]
        extended = codec.extend(prompt, done, GO_ON)
        assert (extended is not None) == goes_on, end
    text = tokenizer_of("chatml").decode(extended[len(prompt) :])
    # A token that ends nothing is part of a turn that was cut off.
    assert text.startswith("A door.<|im_start|><|im_end|>\n<|im_start|>user\nGo on.")
    twice = ids("chatml", "A door.<|im_end|><|im_end|>")
    assert codec.extend(prompt, twice, GO_ON) is None


def test_reasoning_that_a_user_message_strips_begins_a_new_sample():
    codec = select_codec(tokenizer_of("qwen3"), "template")
    prompt = codec.render(ASK)
    thought = ids("qwen3", "<think>\nHm.\n</think>\n\nA door.<|im_end|>")
    assert codec.extend(prompt, thought, GO_ON) is None
    assert codec.extend(prompt, thought[:3], GO_ON) is None  # cut off in its reasoning
    assert codec.extend(prompt, thought, ANSWERS[:1], [LOOK]) is not None
    assert codec.extend(prompt, ids("qwen3", "A door.<|im_end|>"), GO_ON) is not None


OPENS = "{{- '<|im_start|>assistant\\n' }}"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
THOUGHTS = ("<think>\nHm.\n</think>\n\n", "<think>\n\n</think>\n\n")


def after_a_call(
    family: str, codec: ValidatedChatTemplate, first: str, last: str, *, room: str = "A door."
) -> list[int] | None:
    """Return the prompt behind a turn with a call, the tool's answer, a last turn, and a user."""
    answer = ChatMessage("tool", room, "", (), "functions.look:0", "look")
    prompt = codec.render([ChatMessage("system", "Write <think> and </think>."), *ASK[1:]], [LOOK])
    prompt = codec.extend(prompt, ids(family, f"{first}{CALL}<|im_end|>"), [answer], [LOOK])
    assert prompt is not None  # nothing is stripped of a turn that called a tool
    done = ids(family, last)
    extended = codec.extend(prompt, done, GO_ON, [LOOK])
    assert extended is None or extended[: len(prompt) + len(done)] == prompt + done
    return extended


@pytest.mark.parametrize("family", ["qwen3", "published/qwen3"])
def test_no_reasoning_since_the_last_user_message_outlives_the_next(family: str):
    """Nor an empty one, nor one that was cut off. What others wrote about it is no reasoning."""
    codec, turn = select_codec(tokenizer_of(family), "template"), "A door.<|im_end|>"
    assert after_a_call(family, codec, "", turn, room="It says <think> or </think>.") is not None
    for thought in THOUGHTS:
        assert after_a_call(family, codec, thought, turn) is None
        assert after_a_call(family, codec, "", thought + turn) is None
        assert after_a_call(family, codec, "", thought.partition("\n</")[0]) is None


def test_reasoning_before_the_last_user_message_is_gone_and_the_next_turns_go_on():
    codec, tokenizer = (
        select_codec(tokenizer_of("published/qwen3"), "template"),
        tokenizer_of("qwen3"),
    )
    calls, call = (ToolCall("look", {}),), ids("qwen3", f"{CALL}<|im_end|>")
    earlier = [ChatMessage("assistant", "", "Hm.", calls), ANSWERS[0]]
    messages = [ChatMessage("assistant", "A door.", "Hm."), *GO_ON]
    prompt = codec.render([*ASK, *earlier, *messages], [LOOK])
    assert "Hm." not in tokenizer.decode(prompt)
    prompt = codec.extend(prompt, call, ANSWERS[:1], [LOOK])
    assert codec.extend(prompt, ids("qwen3", "A door.<|im_end|>"), GO_ON, [LOOK]) is not None


def test_reasoning_that_every_prompt_opens_and_closes_was_not_sampled():
    turn, options = "A door.<|im_end|>", {"enable_thinking": False}
    codec = select_codec(tokenizer_of("published/qwen3"), "template", options)
    assert after_a_call("published/qwen3", codec, "", turn) is not None
    for thought in THOUGHTS:
        assert after_a_call("published/qwen3", codec, thought, turn) is None
        assert after_a_call("published/qwen3", codec, "", thought + turn) is None


def test_reasoning_that_every_prompt_opens_is_sampled():
    template = changed("qwen3", OPENS, OPENS.replace("\\n", "\\n<think>\\n"))
    codec = select_codec(tokenizer_of("qwen3", template), "template")
    for last in ("Hm.\n</think>\n\nA door.<|im_end|>", "</think>A door.<|im_end|>", "Hm"):
        assert after_a_call("qwen3", codec, "Hm.\n</think>\n\n", last) is None
        assert codec.extend(codec.render(ASK), ids("qwen3", last), GO_ON) is None


@pytest.mark.parametrize("kind", ["renderers", "template"])
def test_a_turn_is_parsed(kind: str):
    codec = select_codec(tokenizer_of("qwen3"), kind)
    good, bad = '<tool_call>\n{"name": "look"}\n</tool_call>', "<tool_call>\n{no\n</tool_call>"
    other = '<tool_call>{"name": "fly"}</tool_call>'
    text = f"<think>\nHm.\n</think>\n\nI look.\n{good}{bad}{other}<tool_call>\n{{"
    turn = codec.parse(ids("qwen3", text), [LOOK])
    assert (turn.reasoning, turn.content) == ("Hm.", "I look.")
    assert [c.status for c in turn.calls] == ["ok", "malformed", "unknown_tool", "unclosed"]
    assert [tokenizer_of("qwen3").decode(ids("qwen3", text)[slice(*c.span)]) for c in turn.calls][
        :3
    ] == [good, bad, other]
    assert not codec.parse(ids("qwen3", "<think>\nHm"), [LOOK]).reasoning_closed


def test_no_codec_says_why_of_each():
    template = changed("chatml", "message.content", "message.content | trim")
    with pytest.raises(ConfigError) as refused:
        select_codec(tokenizer_of("llama-3", template), "auto")
    assert "renderers:qwen3: Special token '<|im_start|>' not found" in str(refused.value)
    assert "template: the chat template" in str(refused.value)


def test_a_renderer_of_another_family_is_refused():
    tokenizer = tokenizer_of("chatml")
    proved = validate_codec(RenderersCodec(tokenizer, "qwen3", {}), TemplateRenderer(tokenizer, {}))
    assert "extends a turn in another way" in proved.tool_refusal
    assert select_codec(tokenizer).name == "template"
