"""What OpenAI's own client asks of a served session, and the samples that come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from mcore_rl.agents.loops import Task
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent_schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rollout.agent_loop import Prompt
from mcore_rl.rollout.protocol import Completion, SamplingParams
from tests.unit.agents.test_loops import END, TOKENIZER, is_42, text_of

HERE = __file__
ASKED = [{"role": "user", "content": "How much is 6 * 7?"}]
AGAIN = {"role": "user", "content": "Are you sure?"}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
Program = Callable[[Task, str, str], Awaitable[None]]


@dataclass
class Policy:
    """Says what `says` has under the number of a request, to all that came by then or later."""

    says: Sequence[str]
    waits: dict[int, asyncio.Event] = field(default_factory=dict)  # by the number of a request
    asked: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        number = len(self.asked)
        self.asked.append((prompt_ids, sampling, request_id))
        text = self.says[number]
        if text == "dies":
            raise ConnectionError("the server is gone")
        try:
            while number in self.waits and not self.waits[number].is_set():
                if request_id in self.aborted:
                    return [self._completion(number, TOKENIZER.encode(text)[:1], "abort")]
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        for stop in sampling.stop:
            if stop in text:
                ids = TOKENIZER.encode(text[: text.index(stop) + len(stop)])
                return [self._completion(number, ids, "stop", stop)]
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), END]
        is_whole = len(ids) <= sampling.max_tokens
        reason = "stop" if is_whole else "length"
        return [self._completion(number, ids[: sampling.max_tokens], reason)]

    @staticmethod
    def _completion(number: int, ids: list[int], reason: str, stop: str = "") -> Completion:
        log_probs = [-0.25 * (number + 1)] * len(ids)
        return Completion(ids, log_probs, reason, [5 + number] * len(ids), stop)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    @property
    def prompts(self) -> list[str]:
        return [text_of(prompt) for prompt, _, _ in self.asked]


async def nothing(task: Task, base_url: str, api_key: str) -> None:
    """In place of a test's own program, which no import path leads to."""


def run(
    says: Sequence[str],
    program: Program,
    *,
    config: dict[str, Any] | None = None,
    policy: Policy | None = None,
    max_context: int = 4096,
    stops: bool = True,
    reward: Any = is_42,
) -> tuple[list[Sample], Policy]:
    policy = policy or Policy(says)
    settings = AgentConfig(
        loop="program", settings={"function": f"{HERE}:nothing"}, **(config or {})
    )

    async def work() -> list[Sample]:
        runner = AgentRunner(policy, TOKENIZER, reward, settings, max_context, stops_on_error=stops)
        runner._loop._function = program  # type: ignore[attr-defined]
        prompt = Prompt([], 3, {"answer": "42"}, row=7, messages=ASKED)
        sampling = SamplingParams(n=1, seed=100, max_tokens=1000, temperature=0.7)
        try:
            async with asyncio.timeout(50):
                return await runner.run_all([prompt], sampling)
        finally:
            await runner.close()

    return asyncio.run(work()), policy


def client(base_url: str, api_key: str, **own: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, **own)


async def said(ai: AsyncOpenAI, messages: Sequence[Any], **own: Any) -> Any:
    return await ai.chat.completions.create(model="any", messages=list(messages), **own)


def test_a_chat_that_resends_its_history_is_one_sample():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        messages: list[Any] = [*ASKED]
        for _ in range(2):
            answer = await said(ai, messages, temperature=0.1, logprobs=True)
            choice = answer.choices[0]
            messages += [{"role": "assistant", "content": choice.message.content}, AGAIN]
        assert choice.message.content == "42" and choice.finish_reason == "stop"
        tokens = choice.logprobs.content
        assert [(one.token, one.logprob) for one in tokens] == [
            ("4", -0.5), ("2", -0.5), ("<|im_end|>", -0.5),
        ]  # fmt: skip
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + 3
        assert [model.id async for model in ai.models.list()] == ["policy"]

    [sample], policy = run(["41 perhaps", "42"], program)
    first, second = (prompt for prompt, _, _ in policy.asked)
    assert sample.prompt_ids == first
    ids = TOKENIZER.encode("41 perhaps")
    assert second[: len(first) + len(ids) + 1] == [*first, *ids, END]
    assert [*sample.prompt_ids, *sample.response_ids[:-3]] == second
    between = len(second) - len(first) - len(ids) - 1
    assert sample.response_mask == [1] * (len(ids) + 1) + [0] * between + [1] * 3
    assert sample.weight_versions == [5] * (len(ids) + 1) + [-1] * between + [6] * 3
    assert sample.rollout_log_probs[-3:] == [-0.5] * 3
    assert (sample.reward, sample.status, sample.fields) == (1.0, "finished", {"answer": "42"})
    assert [asked.temperature for _, asked, _ in policy.asked] == [0.7, 0.7]
    seeds = [asked.seed for _, asked, _ in policy.asked]
    assert seeds[0] == 103 and seeds[1] not in (None, 103)
