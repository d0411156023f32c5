"""Keys, limits, failures and clients that vanish: what a client is told, and what is trained."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from mcore_rl.agents.loops import Task
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rewards.registry import RewardError
from tests.unit.agents.served import (
    AGAIN,
    QUESTION,
    THIS_FILE,
    Policy,
    ask,
    client,
    close,
    nothing,
    post,
    run,
    until,
)
from tests.unit.agents.test_loops import END, TOKENIZER, is_42


def test_what_fails_before_a_stream_has_its_status_and_what_fails_in_it_an_event(monkeypatch):
    monkeypatch.setattr("mcore_rl.agents.api_server.app.COMMENTS_S", 0.05)

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        with pytest.raises(openai.BadRequestError):
            await ask(ai, QUESTION, stream=True, tool_choice="required")
        stream = await ask(ai, QUESTION, stream=True)
        await post(base_url, api_key, "sessions/abort")
        with pytest.raises(openai.APIError, match="the session has ended"):
            [_ async for _ in stream]

    policy = Policy(["42"], {0: asyncio.Event()})
    with pytest.raises(RewardError, match="a session without a turn has no samples"):
        run((), program, policy=policy)
    assert policy.cancelled == [0]


def test_a_key_is_of_its_session_only():
    keys: list[tuple[str, str]] = []

    async def program(task: Task, base_url: str, api_key: str) -> None:
        with pytest.raises(openai.AuthenticationError, match="the key is missing, wrong"):
            await ask(client(base_url, "sk-other"), QUESTION)
        with pytest.raises(openai.NotFoundError):
            await client(base_url, api_key).embeddings.create(model="any", input="a")
        if keys:
            with pytest.raises(openai.AuthenticationError):
                await ask(client(*keys[0]), QUESTION)
        keys.append((base_url, api_key))
        await ask(client(base_url, api_key), QUESTION)

    policy = Policy(["42", "42"])

    async def work() -> list[Sample]:
        settings = AgentConfig(loop="program", settings={"function": f"{THIS_FILE}:nothing"})
        runner = AgentRunner(policy, TOKENIZER, is_42, settings, 4096, stops_on_error=True)
        runner._loop._function = program  # type: ignore[attr-defined]
        prompt = Prompt([], 3, {}, messages=QUESTION)
        samples = await runner.run_all([prompt], SamplingParams())
        samples += await runner.run_all([prompt], SamplingParams())
        await close(runner)
        return samples

    assert len(asyncio.run(work())) == 2
    assert keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1]


def test_a_session_that_has_ended_answers_no_more_and_may_still_be_rewarded():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        await ask(ai, QUESTION)
        assert (await post(base_url, api_key, "sessions/finish")).status_code == 200
        with pytest.raises(openai.ConflictError, match="the session has ended") as caught:
            await ask(ai, QUESTION)
        assert caught.value.response.headers["x-should-retry"] == "false"
        body: dict[str, Any] = {"reward": 0.25, "turn_rewards": [0.1, 0.2]}
        refused = await post(base_url, api_key, "sessions/reward", body)
        assert refused.status_code == 400 and "the session has 1 turns" in refused.text
        body = {"reward": 0.25, "turn_rewards": [0.2], "token_rewards": [[0.5]]}
        refused = await post(base_url, api_key, "sessions/reward", body)
        reason = "1 numbers for 'token_rewards' of turn 0, of 3 tokens"
        assert refused.status_code == 400 and reason in refused.text
        body["token_rewards"] = [[0.0, 0.5, 0.25]]
        assert (await post(base_url, api_key, "sessions/reward", body)).status_code == 200

    [sample], policy = run(["41"], program)
    assert len(policy.requests) == 1
    assert (sample.reward, sample.status) == (0.25, "finished")
    assert sample.process_rewards == [0.0, 0.5, pytest.approx(0.45)]


def test_requests_that_are_too_large_or_unfit_are_refused():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(ai, [{"role": "user", "content": "x" * 2**25}])
        assert caught.value.status_code == 413
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        for field_, options in {
            "tool_choice": {"tool_choice": "required"},
            "response_format": {"response_format": {"type": "json_object"}},
            "stop_token_ids": {"extra_body": {"stop_token_ids": [1]}},
            "n": {"n": 0},
            "messages": {"messages": [{"role": "user", "content": [image]}]},
            "tools": {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
        }.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(ai, **{"messages": QUESTION, **options})
            assert refused.value.param == field_
        with pytest.raises(openai.BadRequestError, match="the role 'robot'; allowed: system"):
            await ask(ai, [{"role": "robot", "content": "a"}])
        odd = {"role": "assistant", "content": "a", "tool_calls": 1}
        with pytest.raises(openai.BadRequestError, match="this cannot be written as tokens"):
            await ask(ai, [odd, *QUESTION])
        with pytest.raises(openai.BadRequestError, match="one prompt a request is allowed"):
            await ai.completions.create(model="any", prompt=["a", "b"])
        answer = await ask(ai, QUESTION, extra_body={"stop_token_ids": [END]})
        assert answer.choices[0].message.content == "42"

    [sample], policy = run(["42"], program)
    assert len(policy.requests) == 1 and sample.reward == 1


def test_a_program_that_met_a_limit_is_truncated():
    async def goes_on(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        messages: list[Any] = [*QUESTION]
        while True:
            answer = await ask(ai, messages)
            messages += [answer.choices[0].message, AGAIN]

    [sample], policy = run(["42"] * 9, goes_on, config={"max_turns": 3})
    assert (len(policy.requests), sample.status, sample.finish_reason) == (3, "truncated", "length")
    assert sample.reward == 1
    context = len(policy.requests[2][0]) - 5
    [sample], policy = run(["42"] * 9, goes_on, max_context=context)
    assert (len(policy.requests), sample.status) == (2, "truncated")

    async def full(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        await ask(ai, QUESTION)
        with pytest.raises(openai.BadRequestError, match=f"of {context} tokens are used") as error:
            await ask(ai, [{"role": "user", "content": "x " * 500}])
        assert error.value.code == "context_length_exceeded"

    [sample], _ = run(["42"], full, max_context=context)
    assert sample.status == "truncated"

    async def many(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        with pytest.raises(openai.RateLimitError, match="at once are allowed: 64") as error:
            await ask(ai, QUESTION, n=65)
        assert error.value.response.headers["x-should-retry"] == "true"
        await ask(ai, QUESTION)

    [sample], policy = run(["42"], many, config={"max_turns": 100})
    assert (len(policy.requests), sample.status) == (1, "finished")


def test_a_client_that_vanishes_ends_its_request_and_leaves_the_turns_before(monkeypatch):
    monkeypatch.setattr("mcore_rl.agents.api_server.app.COMMENTS_S", 0.05)
    policy = Policy(["42", "a", "b", "a"], {1: asyncio.Event(), 3: asyncio.Event()})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        answer = await ask(ai, QUESTION)
        messages = [*QUESTION, answer.choices[0].message, AGAIN]
        with pytest.raises(openai.APITimeoutError):
            await ask(ai, messages, n=2, timeout=0.5)
        await until(lambda: policy.cancelled == [1])
        stream = await ask(ai, messages, stream=True)
        await stream.close()
        await until(lambda: policy.cancelled == [1, 3])

    [sample], _ = run((), program, policy=policy)
    assert (sample.reward, sum(sample.response_mask)) == (1.0, 3)


def test_a_retry_with_an_idempotency_key_is_the_same_answer():
    waits = asyncio.Event()
    policy = Policy(["a", "b"], {0: waits})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key, max_retries=0)
        key = {"Idempotency-Key": "1"}
        with pytest.raises(openai.APITimeoutError):
            await ask(ai, QUESTION, extra_headers=key, timeout=0.5)
        waits.set()
        contents = [await ask(ai, QUESTION, extra_headers=key) for _ in range(2)]
        assert contents[0] == contents[1] and contents[0].choices[0].message.content == "a"
        with pytest.raises(openai.ConflictError, match="came with another request"):
            await ask(ai, [AGAIN], extra_headers=key)
        refused = {"Idempotency-Key": "2"}
        with pytest.raises(openai.BadRequestError):
            await ask(ai, QUESTION, tool_choice="required", extra_headers=refused)
        assert (await ask(ai, QUESTION, extra_headers=refused)).choices[0].message.content == "b"

    samples, _ = run((), program, policy=policy)
    assert (len(policy.requests), len(samples), policy.cancelled) == (2, 2, [])


def test_an_abort_of_a_request_keeps_its_tokens_and_one_of_the_session_no_more():
    policy = Policy(["41 42", "never"], {0: asyncio.Event(), 1: asyncio.Event()})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        url = base_url.removesuffix("/v1")
        body: dict[str, Any] = {"token_ids": [1], "sampling_params": {}, "request_id": "mine"}
        request = asyncio.create_task(post(url, api_key, "inference/v1/generate", body))
        await until(lambda: len(policy.requests) == 1)
        ids = {"request_ids": ["another", "mine"]}
        await post(url, api_key, "inference/v1/abort_requests", ids)
        assert (await request).json()["choices"][0]["finish_reason"] == "abort"
        ai = client(base_url, api_key, max_retries=0)
        request = asyncio.create_task(ask(ai, QUESTION))
        await until(lambda: len(policy.requests) == 2)
        await post(base_url, api_key, "sessions/abort")
        with pytest.raises(openai.ConflictError):
            await request

    [sample], _ = run((), program, policy=policy)
    assert (sample.status, sample.reward, len(sample.response_ids)) == ("aborted", 0.0, 1)


def test_a_program_that_never_asks_or_fails_is_an_error():
    async def fails(task: Task, base_url: str, api_key: str) -> None:
        await ask(client(base_url, api_key), QUESTION)
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
        await ask(ai, QUESTION)
        with pytest.raises(openai.InternalServerError, match="the server is gone"):
            await ask(ai, QUESTION)

    with pytest.raises(ConnectionError, match="the server is gone"):
        run(["42", "dies"], program, stops=False)


def test_requests_wait_while_the_weights_are_replaced():
    policy = Policy(["42"])

    async def work() -> None:
        settings = AgentConfig(loop="program", settings={"function": f"{THIS_FILE}:nothing"})
        runner = AgentRunner(policy, TOKENIZER, is_42, settings, 4096, stops_on_error=True)

        async def program(task: Task, base_url: str, api_key: str) -> None:
            runner.gate.hold("sleep")
            with runner.gate.hold_during("update"):
                request = asyncio.create_task(ask(client(base_url, api_key), QUESTION))
                await asyncio.sleep(0.5)
            await asyncio.sleep(0.2)
            assert not request.done() and not policy.requests
            runner.gate.release("sleep")
            assert (await request).choices[0].message.content == "42"

        runner._loop._function = program  # type: ignore[attr-defined]
        prompt = Prompt([], 3, {}, messages=QUESTION)
        assert len(await runner.run_all([prompt], SamplingParams())) == 1
        await close(runner)

    asyncio.run(work())


def test_tokens_and_texts_that_cannot_be_are_refused_and_do_not_end_the_run():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        url = base_url.removesuffix("/v1")
        for token in (-1, 10**9):
            body = {"token_ids": [1, token], "sampling_params": {}}
            refused = await post(url, api_key, "inference/v1/generate", body)
            assert refused.status_code == 400 and f"token ids [{token}]" in refused.text
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers, trust_env=False) as raw:
            for route, text in {
                "completions": '{"prompt": "\\ud800"}',
                "chat/completions": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            }.items():
                refused = await raw.post(f"{base_url}/{route}", content=text)
                assert refused.status_code == 400, refused.text
                assert "this cannot be written as tokens" in refused.text
            for text in ("{", "[" * 100_000):
                refused = await raw.post(f"{base_url}/completions", content=text)
                assert refused.status_code == 400
        await ask(client(base_url, api_key), QUESTION, stop=["", "!"])

    [sample], policy = run(["42"], program)
    assert sample.reward == 1 and [sampling.stop for _, sampling, _ in policy.requests] == [("!",)]


@pytest.mark.parametrize("route", ["inference/v1/generate", "v1/chat/completions"])
def test_what_still_runs_when_a_program_ends_is_cancelled_and_not_trained(route):
    policy = Policy(["42", "never"], {1: asyncio.Event()})
    left: list[asyncio.Task[httpx.Response]] = []

    async def program(task: Task, base_url: str, api_key: str) -> None:
        await ask(client(base_url, api_key), QUESTION)
        url, is_chat = base_url.removesuffix("/v1"), route.endswith("completions")
        body = {"messages": QUESTION} if is_chat else {"token_ids": [1], "sampling_params": {}}
        left.append(asyncio.create_task(post(url, api_key, route, body)))
        await until(lambda: len(policy.requests) == 2)

    async def reward(samples: list[Sample], *rest: Any) -> None:
        assert policy.cancelled == [1]  # before anything is trained
        samples[0].reward = 1.0

    [sample], _ = run((), program, policy=policy, reward=reward)
    assert sample.reward == 1 and sum(sample.response_mask) == 3


def test_tokens_may_have_an_idempotency_key():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        url, key = base_url.removesuffix("/v1"), {"Idempotency-Key": "1"}
        body: dict[str, Any] = {"token_ids": [1], "sampling_params": {}}
        route = "inference/v1/generate"
        answers = [(await post(url, api_key, route, body, **key)).json() for _ in range(2)]
        assert answers[0] == answers[1]
        body["token_ids"] = [2]
        assert (await post(url, api_key, route, body, **key)).status_code == 409

    [_], policy = run(["42", "41"], program)
    assert len(policy.requests) == 1


def test_a_trajectory_has_a_number_of_roles():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        await ask(client(base_url, api_key), QUESTION)
        for _ in range(64):
            assert (await post(base_url, api_key, "sessions", {"role": "a"})).status_code == 200
        assert (await post(base_url, api_key, "sessions", {"role": "a"})).status_code == 429
        await post(base_url, api_key, "sessions/finish")
        assert (await post(base_url, api_key, "sessions", {"role": "a"})).status_code == 409

    [sample], _ = run(["42"], program)
    assert sample.reward == 1
