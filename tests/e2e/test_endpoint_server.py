"""OpenAI's client against a real server: stop texts, tools, several choices and streams of them.

What is trained has the tokens that the client was sent, with transformers' log-probs.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mcore_rl.agents.loops import Task
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.config.schema import AgentConfig, RolloutConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from tests.e2e.hosting import hosting
from tests.e2e.served import Model, tiny_families
from tests.e2e.test_agent_updates import END, tokenizer_of_characters
from tests.unit.agents.served import (
    AGAIN,
    CALCULATOR,
    QUESTION,
    THIS_FILE,
    Program,
    client,
    close,
    nothing,
)

pytestmark = pytest.mark.server

CONTEXT = 1024  # characters, which are tokens here: tools are shown in some 600
STOPS = list(string.ascii_letters)  # one of them comes soon, as any character may
IDS = {"extra_body": {"return_token_ids": True}}


@dataclass(frozen=True)
class Serving:
    server: VLLMServer
    runner: asyncio.Runner
    model: Model
    tokenizer: PreTrainedTokenizerFast

    def trained(self, program: Program) -> list[Sample]:
        """Return the samples of a program, with log-probs as transformers has them."""
        config = AgentConfig(
            loop="program", settings={"function": f"{THIS_FILE}:{nothing.__name__}"}
        )

        async def work() -> list[Sample]:
            agent = AgentRunner(
                self.server, self.tokenizer, no_reward, config, CONTEXT, stops_on_error=True
            )
            agent._loop._function = program  # type: ignore[attr-defined]
            sampling = SamplingParams(n=1, seed=100, max_tokens=40)
            try:
                async with asyncio.timeout(300):
                    return await agent.run_all([Prompt([], 3, {}, messages=QUESTION)], sampling)
            finally:
                await close(agent)

        samples = self.runner.run(work())
        for sample in samples:
            expected = self.model.log_probs(sample.prompt_ids, sample.response_ids)
            rows = zip(sample.rollout_log_probs, expected, sample.response_mask, strict=True)
            assert max(abs(a - b) for a, b, mask in rows if mask) < 1e-4
        return samples

    def sent(self, samples: list[Sample]) -> list[list[int]]:
        """Return the turns of the policy, each where it is trained."""
        return [
            sample.response_ids[span.start : span.end]
            for sample in samples
            for span in sample.turn_spans
            if sample.response_mask[span.start]
        ]


async def no_reward(samples: list[Sample], *_: object) -> None:
    for sample in samples:
        sample.reward = 1.0


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    config = tiny_families.served_config("qwen3_moe")
    config.max_position_embeddings = CONTEXT
    model, tokenizer = Model(tmp_path_factory.mktemp("model"), config, 0), tokenizer_of_characters()
    tokenizer.save_pretrained(model.path)
    rollout = RolloutConfig(max_num_seqs=32, kv_cache_bytes=32 << 20)
    server = VLLMServer(model.path, "float32", CONTEXT, rollout, seed=0)
    with hosting(), asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            yield Serving(server, runner, model, tokenizer)
        finally:
            runner.run(server.close())


def build_request(messages: list[Any], **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": messages, **IDS, **fields}


def test_a_stop_text_ends_an_answer_that_is_gone_on_from_with_all_its_tokens(serving):
    seen: list[list[int]] = []

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        messages: list[Any] = list(QUESTION)
        for _ in range(2):
            answer = await ai.chat.completions.create(**build_request(messages, stop=STOPS))
            [choice] = answer.choices
            assert choice.finish_reason == "stop"
            assert not set(STOPS) & set(choice.message.content or "")
            messages += [choice.message, AGAIN]
            seen.append(choice.model_extra["token_ids"])

    samples = serving.trained(program)
    assert serving.sent(samples) == seen
    ends = {serving.tokenizer.decode(ids[-1:]) for ids in seen}
    assert ends - {END} and all(set(end) & set(STOPS) for end in ends)  # also <unused 3>
    assert len(samples) == 1 and len(samples[0].turn_spans) == 2


def test_tools_are_in_the_prompt_and_their_answers_in_the_next_one(serving):
    prompts: list[str] = []

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        function = {"name": "calculator", "arguments": '{"expression": "6 * 7"}'}
        call = {"type": "function", "id": "a", "function": function}
        history = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "42!"},
        ]
        for messages in (QUESTION, history):
            answer = await ai.chat.completions.create(
                **build_request(list(messages), tools=[CALCULATOR])
            )
            prompts.append(serving.tokenizer.decode(answer.model_extra["prompt_token_ids"]))
            assert answer.choices[0].message.tool_calls is None

    samples = serving.trained(program)
    assert len(samples) == 2
    assert all('"name": "calculator"' in prompt for prompt in prompts)
    assert "<tool_response>\n42!\n</tool_response>" in prompts[1]


def test_choices_and_a_stream_of_them_are_branches_with_the_tokens_that_were_sent(serving):
    seen: list[list[int]] = []

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        # The turns of a branch share the response, so the first leaves some of it.
        answer = await ai.chat.completions.create(
            **build_request(list(QUESTION), n=2, max_tokens=12)
        )
        seen.extend(choice.model_extra["token_ids"] for choice in answer.choices)
        usage, texts = None, ["", "", ""]
        messages = [*QUESTION, answer.choices[1].message, AGAIN]
        tokens: list[list[int]] = [[], [], []]
        options = {"include_usage": True}
        stream = await ai.chat.completions.create(
            **build_request(messages, n=3, stop=STOPS, stream=True, stream_options=options)
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += choice.model_extra.get("token_ids") or []
        assert usage is not None and usage.completion_tokens == sum(map(len, tokens))
        for text, ids in zip(texts, tokens, strict=True):
            assert text == serving.tokenizer.decode(ids)[: len(text)]
            assert not set(STOPS) & set(text)
        seen.extend(tokens)

    samples = serving.trained(program)
    assert sorted(serving.sent(samples)) == sorted(seen)
    assert len({tuple(ids) for ids in seen[2:]}) > 1  # each has a seed of its own
    assert len(samples) == 4  # the first choice alone, the second one with three that go on
