"""What OpenAI's own client asks of a served session, and the samples that come of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from mcore_rl.agents.loops import Task
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent_schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards.base import RewardError
from mcore_rl.rollout.agent_loop import Prompt
from mcore_rl.rollout.protocol import Completion, SamplingParams
from tests.unit.agents.test_loops import END, TOKENIZER, call, is_42, text_of

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
            await close(runner)

    return asyncio.run(work()), policy


OPENED: list[AsyncOpenAI] = []


def client(base_url: str, api_key: str, **own: Any) -> AsyncOpenAI:
    OPENED.append(AsyncOpenAI(base_url=base_url, api_key=api_key, **own))
    return OPENED[-1]


async def close(runner: AgentRunner) -> None:
    await runner.close()
    while OPENED:
        await OPENED.pop().close()


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


def test_calls_of_tools_come_as_the_client_knows_them_and_their_answers_go_on():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await said(ai, ASKED, tools=[CALCULATOR])
        [choice] = answer.choices
        [asked] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert asked.function.name == "calculator"
        assert json.loads(asked.function.arguments) == {"expression": "6 * 7"}
        asked.id = "an id of the client's own"
        told = {"role": "tool", "tool_call_id": asked.id, "content": "42"}
        parts = [{"type": "text", "text": "How much is "}, {"type": "text", "text": "6 * 7?"}]
        messages = [{"role": "user", "content": parts}, choice.message, told]
        answer = await said(ai, messages, tools=[CALCULATOR])
        assert answer.choices[0].message.content == "42"

    [sample], policy = run([call("6 * 7"), "42"], program)
    assert sample.reward == 1
    first, second = policy.prompts
    assert "<tools>" in first and second.startswith(first + call("6 * 7"))
    assert "<tool_response>\n42\n</tool_response>" in second[len(first) :]
    whole = TOKENIZER.apply_chat_template(
        [*ASKED, {"role": "assistant", "content": call("6 * 7")},
         {"role": "tool", "content": "42"}],
        tools=[CALCULATOR], add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert second == whole


def test_a_call_that_is_not_well_formed_is_text():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        [choice] = (await said(ai, ASKED, tools=[CALCULATOR])).choices
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert "<tool_call>\n{\n</tool_call>" in choice.message.content
        [choice] = (await said(ai, [*ASKED, choice.message, AGAIN], tools=[CALCULATOR])).choices
        assert choice.message.content == "42"
        [choice] = (await said(ai, ASKED, tools=[CALCULATOR], tool_choice="none")).choices
        assert choice.message.tool_calls is None

    bad = "Look: <tool_call>\n{\n</tool_call>"
    samples, policy = run([bad, "42", call("1")], program)
    assert [sample.segment for sample in samples] == [0, 1, 2]
    assert "Look:\n<tool_call>\n{\n</tool_call><|im_end|>" in policy.prompts[1]


def test_each_of_n_choices_is_a_branch_that_can_be_gone_on_from():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await said(ai, ASKED, n=3)
        assert [one.message.content for one in answer.choices] == ["a", "b", "c"]
        assert answer.usage.completion_tokens == 6
        await said(ai, [*ASKED, answer.choices[1].message, AGAIN], n=2)

    samples, policy = run(["a", "b", "c", "d", "e"], program)
    assert len({asked.seed for _, asked, _ in policy.asked}) == 5
    shown = [[text_of([token]) for token in sample.response_ids] for sample in samples]
    assert [(s[0], s[-2]) for s in shown] == [("a", "a"), ("c", "c"), ("b", "d"), ("b", "e")]
    masks = [sum(sample.response_mask) for sample in samples]
    assert masks == [2, 2, 4, 2]  # "b" is trained once
    assert [sample.segment for sample in samples] == [0, 1, 2, 3]


def test_a_stop_text_ends_an_answer_and_is_not_in_it():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await said(ai, ASKED, stop=["END", "!"])
        assert answer.choices[0].message.content == "41"
        assert answer.choices[0].finish_reason == "stop"
        await said(ai, [*ASKED, answer.choices[0].message, AGAIN], stop="!", max_tokens=7)

    [sample], policy = run(["41! or 42", "42"], program)
    assert [asked.stop for _, asked, _ in policy.asked] == [("END", "!"), ("!",)]
    assert [asked.max_tokens for _, asked, _ in policy.asked] == [1000, 7]
    assert "41!<|im_end|>\n<|im_start|>user\nAre you sure?" in policy.prompts[1]
    assert sample.response_mask[:4] == [1, 1, 1, 0]  # "41!", and the end that was not sampled


def test_a_stream_says_the_same_in_chunks(monkeypatch):
    monkeypatch.setattr("mcore_rl.agents.endpoint.openai_app.COMMENTS_S", 0.05)
    waits = asyncio.Event()
    comments = 0

    async def program(task: Task, base_url: str, api_key: str) -> None:
        nonlocal comments
        ai = client(base_url, api_key)
        options = {"include_usage": True}
        stream = await said(ai, ASKED, stream=True, stream_options=options, tools=[CALCULATOR])
        chunks = [chunk async for chunk in stream]
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Well."
        [asked] = [one for delta in deltas for one in delta.tool_calls or ()]
        assert (asked.index, asked.function.name) == (0, "calculator")
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.total_tokens > 0
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=headers, trust_env=False) as raw:
            body = {"messages": ASKED, "stream": True}
            async with raw.stream("POST", f"{base_url}/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    comments += line.startswith(":")
                    if comments == 2:
                        waits.set()
        assert line == "data: [DONE]" or line == ""
        stream = await ai.completions.create(model="any", prompt="6 * 7 =", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "42"

    policy = Policy(["Well." + call("6 * 7"), "42", "42"], {1: waits})
    samples, _ = run((), program, policy=policy)
    assert comments >= 2
    assert [sample.reward for sample in samples] == [1.0] * 3


def test_what_fails_before_a_stream_has_its_status_and_what_fails_in_it_an_event(monkeypatch):
    monkeypatch.setattr("mcore_rl.agents.endpoint.openai_app.COMMENTS_S", 0.05)

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        with pytest.raises(openai.BadRequestError):
            await said(ai, ASKED, stream=True, tool_choice="required")
        stream = await said(ai, ASKED, stream=True)
        await httpx_post(base_url, api_key, "sessions/abort")
        with pytest.raises(openai.APIError, match="the session has ended"):
            [_ async for _ in stream]

    policy = Policy(["42"], {0: asyncio.Event()})
    with pytest.raises(RewardError, match="a session without a turn has no samples"):
        run((), program, policy=policy)
    assert policy.cancelled == [0]


async def httpx_post(
    base_url: str, api_key: str, route: str, body: object = None, **headers: str
) -> httpx.Response:
    headers["Authorization"] = f"Bearer {api_key}"
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=30) as raw:
        return await raw.post(f"{base_url}/{route}", json=body)


def test_a_key_is_of_its_session_only():
    kept: list[tuple[str, str]] = []

    async def program(task: Task, base_url: str, api_key: str) -> None:
        with pytest.raises(openai.AuthenticationError, match="the key is missing, wrong"):
            await said(client(base_url, "sk-other"), ASKED)
        with pytest.raises(openai.NotFoundError):
            await client(base_url, api_key).embeddings.create(model="any", input="a")
        if kept:
            with pytest.raises(openai.AuthenticationError):
                await said(client(*kept[0]), ASKED)
        kept.append((base_url, api_key))
        await said(client(base_url, api_key), ASKED)

    policy = Policy(["42", "42"])

    async def work() -> list[Sample]:
        settings = AgentConfig(loop="program", settings={"function": f"{HERE}:nothing"})
        runner = AgentRunner(policy, TOKENIZER, is_42, settings, 4096, stops_on_error=True)
        runner._loop._function = program  # type: ignore[attr-defined]
        prompt = Prompt([], 3, {}, messages=ASKED)
        found = await runner.run_all([prompt], SamplingParams())
        found += await runner.run_all([prompt], SamplingParams())
        await close(runner)
        return found

    assert len(asyncio.run(work())) == 2
    assert kept[0][0] == kept[1][0] and kept[0][1] != kept[1][1]


def test_a_session_that_has_ended_answers_no_more_and_may_still_be_rewarded():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        await said(ai, ASKED)
        assert (await httpx_post(base_url, api_key, "sessions/finish")).status_code == 200
        with pytest.raises(openai.ConflictError, match="the session has ended") as caught:
            await said(ai, ASKED)
        assert caught.value.response.headers["x-should-retry"] == "false"
        body: dict[str, Any] = {"reward": 0.25, "turn_rewards": [0.1, 0.2]}
        refused = await httpx_post(base_url, api_key, "sessions/reward", body)
        assert refused.status_code == 400 and "the session has 1 turns" in refused.text
        body["turn_rewards"] = [0.25]
        assert (await httpx_post(base_url, api_key, "sessions/reward", body)).status_code == 200

    [sample], policy = run(["41"], program)
    assert len(policy.asked) == 1
    assert (sample.reward, sample.status) == (0.25, "finished")
    assert sample.process_rewards == [0.0] * (len(sample.response_ids) - 1) + [0.25]


def test_requests_that_are_too_large_or_unfit_are_told():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        with pytest.raises(openai.APIStatusError) as caught:
            await said(ai, [{"role": "user", "content": "x" * 2**25}])
        assert caught.value.status_code == 413
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        for field_, own in {
            "tool_choice": {"tool_choice": "required"},
            "response_format": {"response_format": {"type": "json_object"}},
            "stop_token_ids": {"extra_body": {"stop_token_ids": [1]}},
            "n": {"n": 0},
            "messages": {"messages": [{"role": "user", "content": [image]}]},
            "tools": {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
        }.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await said(ai, **{"messages": ASKED, **own})
            assert refused.value.param == field_
        with pytest.raises(openai.BadRequestError, match="the role 'robot'; allowed: system"):
            await said(ai, [{"role": "robot", "content": "a"}])
        with pytest.raises(openai.BadRequestError, match="one prompt a request is allowed"):
            await ai.completions.create(model="any", prompt=["a", "b"])
        answer = await said(ai, ASKED, extra_body={"stop_token_ids": [END]})
        assert answer.choices[0].message.content == "42"

    [sample], policy = run(["42"], program)
    assert len(policy.asked) == 1 and sample.reward == 1


def test_a_program_that_met_a_limit_is_truncated():
    async def goes_on(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        messages: list[Any] = [*ASKED]
        while True:
            answer = await said(ai, messages)
            messages += [answer.choices[0].message, AGAIN]

    [sample], policy = run(["42"] * 9, goes_on, config={"max_turns": 3})
    assert (len(policy.asked), sample.status, sample.finish_reason) == (3, "truncated", "length")
    assert sample.reward == 1
    context = len(policy.asked[2][0]) - 5
    [sample], policy = run(["42"] * 9, goes_on, max_context=context)
    assert (len(policy.asked), sample.status) == (2, "truncated")

    async def full(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        await said(ai, ASKED)
        with pytest.raises(openai.BadRequestError, match=f"of {context} tokens are used") as error:
            await said(ai, [{"role": "user", "content": "x " * 500}])
        assert error.value.code == "context_length_exceeded"

    [sample], _ = run(["42"], full, max_context=context)
    assert sample.status == "truncated"

    async def many(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        with pytest.raises(openai.RateLimitError, match="at once are allowed: 64") as error:
            await said(ai, ASKED, n=65)
        assert error.value.response.headers["x-should-retry"] == "true"
        await said(ai, ASKED)

    [sample], policy = run(["42"], many, config={"max_turns": 100})
    assert (len(policy.asked), sample.status) == (1, "finished")


def test_a_client_that_vanishes_ends_its_request_and_leaves_the_turns_before():
    policy = Policy(["42", "a", "b", "a"], {1: asyncio.Event(), 3: asyncio.Event()})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        answer = await said(ai, ASKED)
        messages = [*ASKED, answer.choices[0].message, AGAIN]
        with pytest.raises(openai.APITimeoutError):
            await said(ai, messages, n=2, timeout=0.5)
        await until(lambda: policy.cancelled == [1])
        stream = await said(ai, messages, stream=True)
        await stream.close()
        await until(lambda: policy.cancelled == [1, 3])

    import mcore_rl.agents.endpoint.openai_app as app

    before, app.COMMENTS_S = app.COMMENTS_S, 0.05
    try:
        [sample], _ = run((), program, policy=policy)
    finally:
        app.COMMENTS_S = before
    assert (sample.reward, sum(sample.response_mask)) == (1.0, 3)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.01)


def test_a_retry_with_an_idempotency_key_is_the_same_answer():
    waits = asyncio.Event()
    policy = Policy(["a", "b"], {0: waits})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        key = {"Idempotency-Key": "1"}
        with pytest.raises(openai.APITimeoutError):
            await said(ai, ASKED, extra_headers=key, timeout=0.5)
        waits.set()
        found = [await said(ai, ASKED, extra_headers=key) for _ in range(2)]
        assert found[0] == found[1] and found[0].choices[0].message.content == "a"
        with pytest.raises(openai.ConflictError, match="came with another request"):
            await said(ai, [AGAIN], extra_headers=key)
        refused = {"Idempotency-Key": "2"}
        with pytest.raises(openai.BadRequestError):
            await said(ai, ASKED, tool_choice="required", extra_headers=refused)
        assert (await said(ai, ASKED, extra_headers=refused)).choices[0].message.content == "b"

    samples, _ = run((), program, policy=policy)
    assert (len(policy.asked), len(samples), policy.cancelled) == (2, 2, [])


def test_requests_at_the_same_time_are_turns_of_one_trajectory():
    waits = asyncio.Event()
    policy = Policy(["a", "b", "c"], {0: waits})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        first = asyncio.create_task(said(ai, ASKED))
        await until(lambda: len(policy.asked) == 1)
        second = await said(ai, ASKED)
        await said(ai, [*ASKED, second.choices[0].message, AGAIN])
        waits.set()
        assert (await first).choices[0].message.content == "a"

    samples, _ = run((), program, policy=policy)
    assert [sample.turn_spans[0].turn_id for sample in samples] == ["1", "0"]
    assert [sum(sample.response_mask) for sample in samples] == [4, 2]
    assert {(s.group_id, s.trajectory, s.reward) for s in samples} == {(3, 0, samples[0].reward)}


@pytest.mark.parametrize("change", ["content", "tools", "system"])
def test_a_history_that_was_edited_begins_a_new_sample(change):
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await said(ai, ASKED)
        reply: dict[str, Any] = {"role": "assistant", "content": answer.choices[0].message.content}
        messages, own = [*ASKED, reply, AGAIN], {}
        if change == "content":
            reply["content"] = "43"
        elif change == "tools":
            own["tools"] = [CALCULATOR]
        else:
            messages.insert(0, {"role": "developer", "content": "Be brief."})
        await said(ai, messages, **own)

    samples, policy = run(["41", "42"], program)
    assert [sample.segment for sample in samples] == [0, 1]
    assert [sum(sample.response_mask) for sample in samples] == [3, 3]
    said_before = "43" if change == "content" else "41"
    assert said_before in text_of(samples[1].prompt_ids)
    assert "Be brief." in policy.prompts[1] or change != "system"
    assert not any(text in policy.prompts[1] for text in ["41"] if change == "content")


def test_tokens_in_and_out_with_versions_and_both_forms_of_log_probs():
    first = TOKENIZER.encode("6 * 7 = ")

    async def program(task: Task, base_url: str, api_key: str) -> None:
        url = base_url.removesuffix("/v1")
        sampling = {"stop_token_ids": [END], "logprobs": 1, "max_tokens": 9, "temperature": 1.0}
        body = {"token_ids": first, "sampling_params": sampling, "model": "any"}
        answer = await httpx_post(url, api_key, "inference/v1/generate", body)
        [choice] = answer.json()["choices"]
        ids = [*TOKENIZER.encode("41"), END]
        assert choice["token_ids"] == ids and choice["finish_reason"] == "stop"
        assert choice["logprobs"]["content"] == [
            {"token": f"token_id:{token}", "token_id": token, "logprob": -0.25} for token in ids
        ]
        assert choice["weight_versions"] == [{"version": "5", "start": 0, "end": 3}]
        body["token_ids"] = [*first, *ids, *TOKENIZER.encode("Sure?")]
        await httpx_post(url, api_key, "inference/v1/generate", body)
        body["sampling_params"] = {"stop_token_ids": [1]}
        refused = await httpx_post(url, api_key, "inference/v1/generate", body)
        assert refused.status_code == 400 and "those that end turns anyway" in refused.text

    [sample], policy = run(["41", "42"], program)
    assert sample.prompt_ids == first and sample.reward == 1
    mask = sample.response_mask
    assert mask == [1] * 3 + [0] * len(TOKENIZER.encode("Sure?")) + [1] * 3
    assert [asked.temperature for _, asked, _ in policy.asked] == [0.7] * 2


def test_an_abort_of_a_request_keeps_its_tokens_and_one_of_the_session_no_more():
    policy = Policy(["41 42", "never"], {0: asyncio.Event(), 1: asyncio.Event()})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        url = base_url.removesuffix("/v1")
        body: dict[str, Any] = {"token_ids": [1], "sampling_params": {}, "request_id": "mine"}
        asked = asyncio.create_task(httpx_post(url, api_key, "inference/v1/generate", body))
        await until(lambda: len(policy.asked) == 1)
        ids = {"request_ids": ["another", "mine"]}
        await httpx_post(url, api_key, "inference/v1/abort_requests", ids)
        assert (await asked).json()["choices"][0]["finish_reason"] == "abort"
        ai = client(base_url, api_key, max_retries=0)
        asked = asyncio.create_task(said(ai, ASKED))
        await until(lambda: len(policy.asked) == 2)
        await httpx_post(base_url, api_key, "sessions/abort")
        with pytest.raises(openai.ConflictError):
            await asked

    [sample], _ = run((), program, policy=policy)
    assert (sample.status, sample.reward, len(sample.response_ids)) == ("aborted", 0.0, 1)


def test_a_program_that_never_asks_or_fails_is_told():
    async def fails(task: Task, base_url: str, api_key: str) -> None:
        await said(client(base_url, api_key), ASKED)
        raise KeyError("city")

    with pytest.raises(RewardError, match=r"'program' raised ValueError: a session without a turn"):
        run((), nothing)
    with pytest.raises(RewardError, match=r"'program' raised KeyError: 'city'.* row 7"):
        run(["42"], fails)
    [sample], _ = run(["42"], fails, stops=False)
    assert (sample.status, sample.reward) == ("failed", 0.0)


def test_a_server_that_fails_ends_the_step_whatever_the_program_makes_of_it():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        await said(ai, ASKED)
        with pytest.raises(openai.InternalServerError, match="the server is gone"):
            await said(ai, ASKED)

    with pytest.raises(ConnectionError, match="the server is gone"):
        run(["42", "dies"], program, stops=False)


def test_requests_wait_while_the_weights_are_replaced():
    policy = Policy(["42"])

    async def work() -> None:
        settings = AgentConfig(loop="program", settings={"function": f"{HERE}:nothing"})
        runner = AgentRunner(policy, TOKENIZER, is_42, settings, 4096, stops_on_error=True)

        async def program(task: Task, base_url: str, api_key: str) -> None:
            runner.gate.hold("sleep")
            with runner.gate.held("update"):
                asked = asyncio.create_task(said(client(base_url, api_key), ASKED))
                await asyncio.sleep(0.5)
            await asyncio.sleep(0.2)
            assert not asked.done() and not policy.asked
            runner.gate.release("sleep")
            assert (await asked).choices[0].message.content == "42"

        runner._loop._function = program  # type: ignore[attr-defined]
        prompt = Prompt([], 3, {}, messages=ASKED)
        assert len(await runner.run_all([prompt], SamplingParams())) == 1
        await close(runner)

    asyncio.run(work())


def test_a_program_may_open_sessions_of_roles_with_rewards_of_their_own():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        for role, reward in (("asks", 1.0), ("answers", -1.0)):
            opened = (await httpx_post(base_url, api_key, "sessions", {"role": role})).json()
            assert opened["base_url"] == base_url
            await said(client(base_url, opened["api_key"]), ASKED)
            await httpx_post(base_url, opened["api_key"], "sessions/reward", {"reward": reward})
        assert (await httpx_post(base_url, api_key, "sessions", {"role": ""})).status_code == 400

    samples, _ = run(["Why?", "So."], program)
    assert [(s.role, s.reward) for s in samples] == [("asks", 1.0), ("answers", -1.0)]
    assert samples[0].trajectory != samples[1].trajectory


def test_the_client_of_renderers_reads_what_tokens_give():
    from renderers import config_from_name, create_renderer
    from renderers.client import generate

    async def program(task: Task, base_url: str, api_key: str) -> None:
        found = await generate(
            client=client(base_url, api_key),
            renderer=create_renderer(TOKENIZER, config_from_name("qwen3")),
            messages=[{"role": "user", "content": "How much is 6 * 7?"}],
            model="policy",
            sampling_params={"temperature": 1.0, "max_tokens": 50},
            extra_headers={"X-Session-ID": "a trace"},
        )
        ids = [*TOKENIZER.encode("42"), END]
        assert found["completion_ids"] == ids and found["content"] == "42"
        assert found["completion_logprobs"] == [-0.25] * 3

    [sample], _ = run(["42"], program)
    assert (sample.reward, sum(sample.response_mask)) == (1.0, 3)
