"""Text of the policy that ends no run: calls on which parsers raise, or that nothing can write."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage, ToolSpec
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.agents.loops import Task
from mcore_rl.config.schema import AgentConfig
from tests.unit.agents.families import tokenizer_of
from tests.unit.agents.served import CALCULATOR, QUESTION, ask, client, post
from tests.unit.agents.served import run as run_program
from tests.unit.agents.test_loops import run, text_of

ASK = [ChatMessage("user", "What is there?")]
LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {}}})
_HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": VALUE}}\n</tool_call>'
# How families write a call of `look`; deepseek-v3 has a wide bar and a low block for | and _.
CALLS = {
    ("qwen3", "renderers"): _HERMES,
    ("qwen3", "template"): _HERMES,
    ("qwen3.5", "renderers"): (
        "</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\nVALUE\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    ("glm-4.5", "renderers"): (
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
    ),
    ("deepseek-v3", "renderers"): (
        "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>look\n```json\n"
        '{"at": VALUE}\n```<|tool_call_end|><|tool_calls_end|>'
    ).translate({ord("|"): 0xFF5C, ord("_"): 0x2581}),
    ("kimi-k2", "renderers"): (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"at": VALUE}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    ("llama-3", "renderers"): '{"name": "look", "parameters": {"at": VALUE}}',
}
VALUES = {
    "digits": "9" * 6000,
    "lists": "[" * 3000 + "]" * 3000,
    "objects": '{"at": ' * 3000 + "1" + "}" * 3000,
    "a parser's limit is not a template's": "[" * 200 + "]" * 200,
    "not a number": "NaN",
    "infinity": "-1e999",
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize(("family", "kind"), CALLS)
def test_a_call_that_nothing_can_read_or_write_is_malformed(family: str, kind: Any, value: str):
    tokenizer = tokenizer_of(family)
    codec = select_codec(tokenizer, kind)

    def parse(written: str, tools: list[ToolSpec]) -> Any:
        text = CALLS[family, kind].replace("VALUE", written)
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        return codec.parse(ids, tools, codec.render(ASK, [LOOK]))

    [good] = parse("[7]", [LOOK]).calls
    assert (good.status, good.arguments) == ("ok", {"at": [7]})
    [bad] = parse(value, [LOOK]).calls
    assert (bad.status, bad.arguments) == ("malformed", {})
    assert value in bad.text
    without = parse(value, [])
    assert [call.status for call in without.calls] in ([], ["malformed"])
    assert value in without.content + "".join(call.text for call in without.calls)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_malformed_call_is_answered_without_its_middle(value: str):
    says = [_HERMES.replace("look", "calculator").replace("VALUE", value * 4), "42"]
    config = AgentConfig("tools", tools=["calculator"])
    [sample], policy = run(says, config, max_context=200_000, max_tokens=100_000)
    text = text_of(policy.prompts[1][len(policy.prompts[0]) :])
    assert "Error: the call is malformed" in text
    assert ("characters left out" in text) == (len(value) > 5000)
    assert (sample.reward, sample.status) == (1.0, "finished")


@pytest.mark.parametrize("value", [VALUES["digits"], VALUES["lists"], VALUES["infinity"]])
def test_a_client_gets_a_malformed_call_as_text(value: str):
    text = _HERMES.replace("look", "calculator").replace("VALUE", value)

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        for tools in ({"tools": [CALCULATOR]}, {}):
            message = (await ask(ai, QUESTION, **tools)).choices[0].message
            assert message.tool_calls is None and value in message.content
        body = {"token_ids": [1], "sampling_params": {}}
        answer = await post(base_url.removesuffix("/v1"), api_key, "inference/v1/generate", body)
        assert answer.status_code == 200
        assert (await ask(ai, QUESTION)).choices[0].message.content == "42"

    samples, _ = run_program(
        [text, text, text, "42"], program, max_context=100_000, config={"max_turns": 8}
    )
    assert {sample.status for sample in samples} <= {"finished", "truncated"}
