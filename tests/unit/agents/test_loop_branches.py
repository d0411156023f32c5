"""Branches of the loops, of sessions and of streams that a usual trajectory does not take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.agents.frozen_model import FrozenModel
from mcore_rl.agents.loops import Agent, Task
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.agents.trajectory import hash_state
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from tests.unit.agents.families import tokenizer_of
from tests.unit.agents.served import CALCULATOR, QUESTION, ask, client
from tests.unit.agents.served import run as run_program
from tests.unit.agents.test_loops import (
    MESSAGES,
    TOKENIZER,
    TOOLS,
    Guessing,
    Scripted,
    call,
    is_42,
    text_of,
)
from tests.unit.agents.test_segments import SECOND_END, EndsOtherwise, tools_of

THIS_FILE = __file__
ABORTED = "[aborted]"  # ends a text that the server has not sampled to its end


class Aborting(Scripted):
    async def submit(self, *args: Any, **options: Any) -> list[Completion]:
        is_aborted = self.says[len(self.prompts)].endswith(ABORTED)
        [completion] = await super().submit(*args, **options)
        if not is_aborted:
            return [completion]
        num = len(TOKENIZER.encode(ABORTED, add_special_tokens=False)) + 1
        return [
            replace(
                completion,
                token_ids=completion.token_ids[:-num],
                log_probs=completion.log_probs[:-num],
                weight_versions=completion.weight_versions[:-num],
                finish_reason="abort",
            )
        ]


def run(
    policy: Scripted, config: AgentConfig, max_context: int = 4096, **options: Any
) -> list[Sample]:
    runner = AgentRunner(
        policy, TOKENIZER, is_42, config, max_context, stops_on_error=True,
        models=["user"], **options,
    )  # fmt: skip
    codec = select_codec(TOKENIZER)
    runner.models["user"] = FrozenModel(Scripted(["Yes?"] * 9), codec, SamplingParams(), 4096)
    prompt = Prompt([], 3, {"answer": "42"}, row=7, messages=MESSAGES)

    async def work() -> list[Sample]:
        try:
            return await runner.run_all([prompt], SamplingParams(n=1, max_tokens=1000))
        finally:
            await runner.close()

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("config", "status"),
    [
        (TOOLS, "truncated"),
        (AgentConfig("environment", environment=f"{THIS_FILE}:Guessing"), "aborted"),
        (AgentConfig("user", settings={"prompt": "Ask."}), "aborted"),
    ],
    ids=lambda value: getattr(value, "loop", value),
)
def test_an_aborted_turn_ends_the_trajectory(config, status):
    policy = Aborting(["40" + ABORTED, "42"])
    [sample] = run(policy, config)
    assert (len(policy.prompts), sample.status) == (1, status)
    assert text_of(sample.response_ids) == "40"


def test_an_aborted_turn_may_be_the_one_that_an_environment_waited_for():
    config = AgentConfig("environment", environment=f"{THIS_FILE}:Guessing")
    [sample] = run(Aborting(["42" + ABORTED]), config)
    assert (sample.status, sample.reward) == ("finished", 1.0)


def test_a_context_that_is_rendered_anew_is_counted_with_its_tools():
    # The second prompt goes on from no token, so tools are written once more.
    says, ends = [call("6 * 7"), "Sum.", "42"], {"stop_ids": [SECOND_END]}
    config = replace(tools_of(0), codec="template")
    policy = EndsOtherwise([says[0], "42"])
    run(policy, config, **ends)
    length = len(policy.prompts[1])
    for max_context, num_prompts in ((2 * length, 2), (2 * length - 1, 3)):
        policy = EndsOtherwise(says if num_prompts == 3 else [says[0], "42"])
        run(policy, replace(tools_of(0.5), codec="template"), max_context, **ends)
        assert len(policy.prompts) == num_prompts


def test_a_summary_that_is_cut_off_is_a_summary_and_an_aborted_one_is_none():
    config = tools_of(0.01, max_turn_tokens=len(TOKENIZER.encode(call("6 * 7"))) + 1)
    long = "so " * 99
    policy = Aborting([call("6 * 7"), long, "42"])
    first, second = run(policy, config)
    assert (first.finish_reason, first.status, second.reward) == ("length", "finished", 1.0)
    cut = text_of(first.response_ids[-config.max_turn_tokens :])
    assert f"What was done so far:\n{cut.strip()}<|im_end|>" in text_of(policy.prompts[2])
    policy = Aborting([call("6 * 7"), "so" + ABORTED, "42"])
    [sample] = run(policy, config)
    assert (len(policy.prompts), sample.status) == (2, "truncated")


class Nameless(Guessing):
    """Its states are all the one without a name."""

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        return replace(await super().step(turn), state="")


class AsksInNoState:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, task: Task) -> list[Sample]:
        session = self._agent.session(task)
        await session.ask(task.messages, state="")
        await session.ask([ChatMessage("user", "Again.")])
        return self._agent.build_samples(task, session, "finished", 1.0)


def test_a_state_without_a_name_is_a_state():
    config = AgentConfig("environment", environment=f"{THIS_FILE}:Nameless")
    [sample] = run(Scripted(["40", "42"]), config)
    states = [sample.state_ids[span.start] for span in sample.turn_spans]
    assert states == [hash_state("How much is 6 * 7?\nGuess."), hash_state("")]
    [sample] = run(Scripted(["40", "42"]), AgentConfig(f"{THIS_FILE}:AsksInNoState"))
    states = [sample.state_ids[span.start] for span in sample.turn_spans]
    assert states == [hash_state(""), -1]


BAD = "<tool_call>\n{\n</tool_call>"
UNKNOWN = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("is_stream", [False, True])
def test_refused_calls_between_others_are_text_and_the_others_are_numbered(is_stream):
    turn = "Well." + BAD + call("1 + 1") + UNKNOWN + call("2 + 2") + BAD

    async def program(task: Task, base_url: str, api_key: str) -> None:
        if not is_stream:
            answer = await ask(client(base_url, api_key), QUESTION, tools=[CALCULATOR])
            message = answer.choices[0].message.model_dump()
            contents, calls = [message["content"]], list(enumerate(message["tool_calls"]))
        else:
            body = {"messages": QUESTION, "tools": [CALCULATOR], "stream": True}
            headers = {"Authorization": f"Bearer {api_key}"}
            async with httpx.AsyncClient(headers=headers, trust_env=False) as raw:
                text = (await raw.post(f"{base_url}/chat/completions", json=body)).text
            lines = [line for line in text.splitlines() if line.startswith("data: {")]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            contents = [d["content"] for d in deltas if d.get("content")]
            parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
            calls = [(part["index"], part) for part in parts]
        assert contents == ["\n".join(["Well.", BAD, UNKNOWN, BAD])]
        read = [(number, json.loads(c["function"]["arguments"])) for number, c in calls]
        assert read == [(0, {"expression": "1 + 1"}), (1, {"expression": "2 + 2"})]
        assert [c["id"] for _, c in calls] == ["call_0_0", "call_0_1"]

    run_program([turn], program)


LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {"type": "integer"}}})
# Thoughts, a text, a call that is refused and another: each with the tokens of the calls.
REFUSED = {
    "qwen3": ("<think>\nA door?\n</think>\n\nWell.", BAD, UNKNOWN),
    "qwen3.5": (
        "A door?\n</think>\n\nWell.",
        "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=gaze>\n</function>\n</tool_call>",
    ),
    "glm-4.5": (
        "<think>A door?</think>\nWell.",
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call>gaze\n</tool_call>",
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>A door?<|end|>",
        "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{",
        "",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_the_span_of_a_refused_call_has_its_tokens(family):
    tokenizer = tokenizer_of(family)
    codec = select_codec(tokenizer)
    before, *calls = REFUSED[family]
    ids = tokenizer.encode(before + "".join(calls), add_special_tokens=False)
    end = "<|call|>" if family == "gpt-oss" else tokenizer.eos_token
    ids.append(tokenizer.convert_tokens_to_ids(end))
    prompt = codec.render([ChatMessage("user", "What is there?")], [LOOK])
    parsed = codec.parse(ids, [LOOK], prompt)
    spans: Sequence[str] = [
        tokenizer.decode(ids[slice(*call.span)], skip_special_tokens=False) for call in parsed.calls
    ]
    assert {call.status for call in parsed.calls} <= {"malformed", "unknown_tool"}
    assert [span.removesuffix("<|call|>") for span in spans] == [text for text in calls if text]
    assert max(call.span[1] for call in parsed.calls) <= len(ids)
    assert parsed.reasoning == "A door?"
