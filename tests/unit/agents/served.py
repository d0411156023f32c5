"""A scripted policy behind the endpoint, and programs that talk with it by OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from mcore_rl.agents.loops import Task
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from tests.unit.agents.test_loops import END, TOKENIZER, is_42, text_of

THIS_FILE = __file__
QUESTION = [{"role": "user", "content": "How much is 6 * 7?"}]
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
    requests: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        number = len(self.requests)
        self.requests.append((prompt_ids, sampling, request_id))
        text = self.says[number]
        await asyncio.sleep(0)  # as a server, it does not answer before others can ask
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
        return [text_of(prompt) for prompt, _, _ in self.requests]


async def nothing(task: Task, base_url: str, api_key: str) -> None:
    """Stand in for a test's own program, which no import path leads to."""


def run(
    says: Sequence[str],
    program: Program | None,
    *,
    settings: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    policy: Policy | None = None,
    max_context: int = 4096,
    stops: bool = True,
    reward: Any = is_42,
    stop: tuple[str, ...] = (),
) -> tuple[list[Sample], Policy]:
    """Run a program of a test; `settings` of the loop name another in its place.

    stop: rollout.stop.
    """
    policy = policy or Policy(says)
    settings = settings or {"function": f"{THIS_FILE}:nothing"}
    agent = AgentConfig(loop="program", settings=settings, **(config or {}))

    async def work() -> list[Sample]:
        runner = AgentRunner(policy, TOKENIZER, reward, agent, max_context, stops_on_error=stops)
        if program is not None:
            runner._loop._function = program  # type: ignore[attr-defined]
        prompt = Prompt([], 3, {"answer": "42"}, row=7, messages=QUESTION)
        sampling = SamplingParams(n=1, seed=100, max_tokens=1000, temperature=0.7, stop=stop)
        try:
            async with asyncio.timeout(50):
                return await runner.run_all([prompt], sampling)
        finally:
            await close(runner)

    return asyncio.run(work()), policy


OPENED: list[AsyncOpenAI] = []


def client(base_url: str, api_key: str, **options: Any) -> AsyncOpenAI:
    OPENED.append(AsyncOpenAI(base_url=base_url, api_key=api_key, **options))
    return OPENED[-1]


async def close(runner: AgentRunner) -> None:
    await runner.close()
    while OPENED:
        await OPENED.pop().close()


async def ask(ai: AsyncOpenAI, messages: Sequence[Any], **options: Any) -> Any:
    return await ai.chat.completions.create(model="any", messages=list(messages), **options)


async def post(
    base_url: str, api_key: str, route: str, body: object = None, **headers: str
) -> httpx.Response:
    headers["Authorization"] = f"Bearer {api_key}"
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=30) as raw:
        return await raw.post(f"{base_url}/{route}", json=body)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.01)
