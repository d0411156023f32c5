"""Requests of OpenAI's own client to a session, and the samples that they become."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from mcore_rl.agents.api_server.protocol import parse_chat
from mcore_rl.agents.loops import Task
from mcore_rl.data.sample import Sample
from tests.pages import ROOT
from tests.unit.agents.served import (
    AGAIN,
    CALCULATOR,
    QUESTION,
    Policy,
    ask,
    client,
    post,
    run,
    until,
)
from tests.unit.agents.test_loops import END, TOKENIZER, call, is_42, text_of
from tests.unit.repo.test_docs import write_recipes


def test_a_chat_that_resends_its_history_is_one_sample():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        messages: list[Any] = [*QUESTION]
        for _ in range(2):
            answer = await ask(ai, messages, temperature=0.1, logprobs=True)
            choice = answer.choices[0]
            messages += [{"role": "assistant", "content": choice.message.content}, AGAIN]
        assert choice.message.content == "42" and choice.finish_reason == "stop"
        tokens = choice.logprobs.content
        assert [(token.token, token.logprob) for token in tokens] == [
            ("4", -0.5), ("2", -0.5), ("<|im_end|>", -0.5),
        ]  # fmt: skip
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + 3
        assert [model.id async for model in ai.models.list()] == ["policy"]

    [sample], policy = run(["41 perhaps", "42"], program)
    first, second = (prompt for prompt, _, _ in policy.requests)
    assert sample.prompt_ids == first
    ids = TOKENIZER.encode("41 perhaps")
    assert second[: len(first) + len(ids) + 1] == [*first, *ids, END]
    assert [*sample.prompt_ids, *sample.response_ids[:-3]] == second
    between = len(second) - len(first) - len(ids) - 1
    assert sample.response_mask == [1] * (len(ids) + 1) + [0] * between + [1] * 3
    assert sample.weight_versions == [5] * (len(ids) + 1) + [-1] * between + [6] * 3
    assert sample.rollout_log_probs[-3:] == [-0.5] * 3
    assert (sample.reward, sample.status, sample.fields) == (1.0, "finished", {"answer": "42"})
    assert [sampling.temperature for _, sampling, _ in policy.requests] == [0.7, 0.7]
    seeds = [sampling.seed for _, sampling, _ in policy.requests]
    assert seeds[0] == 103 and seeds[1] not in (None, 103)


def test_what_a_client_says_of_sampling_seeds_and_caches_is_overruled():
    options = {"temperature": 0.1, "top_p": 0.2, "seed": 7}
    more = {"top_k": 3, "cache_salt": "mine", "user": "me", "repetition_penalty": 2.0}

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        await ask(ai, QUESTION)
        await ask(ai, QUESTION, **options, extra_body=more)
        await ai.completions.create(model="any", prompt="So", **options, extra_body=more)
        url = base_url.removesuffix("/v1")
        body = {"token_ids": [1], "sampling_params": {**options, **more}, "cache_salt": "mine"}
        answer = await post(url, api_key, "inference/v1/generate", body)
        assert answer.status_code == 200, answer.text

    _, policy = run(["41"] * 4, program)
    plain, *rest = [sampling for _, sampling, _ in policy.requests]
    assert (plain.temperature, plain.top_p, plain.top_k, plain.cache) == (0.7, 1.0, 0, "")
    alike = [replace(params, seed=plain.seed, max_tokens=plain.max_tokens) for params in rest]
    assert alike == [plain] * 3
    seeds = {params.seed for params in [plain, *rest]}
    assert len(seeds) == 4 and not {7, None} & seeds  # drawn from the trajectory's


def test_calls_of_tools_come_as_the_client_knows_them_and_their_answers_go_on():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await ask(ai, QUESTION, tools=[CALCULATOR])
        [choice] = answer.choices
        [tool_call] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert tool_call.function.name == "calculator"
        assert json.loads(tool_call.function.arguments) == {"expression": "6 * 7"}
        tool_call.id = "an id of the client's own"
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": "42"}
        parts = [{"type": "text", "text": "How much is "}, {"type": "text", "text": "6 * 7?"}]
        messages = [{"role": "user", "content": parts}, choice.message, result]
        answer = await ask(ai, messages, tools=[CALCULATOR])
        assert answer.choices[0].message.content == "42"

    [sample], policy = run([call("6 * 7"), "42"], program)
    assert sample.reward == 1
    first, second = policy.prompts
    assert "<tools>" in first and second.startswith(first + call("6 * 7"))
    assert "<tool_response>\n42\n</tool_response>" in second[len(first) :]
    render = TOKENIZER.apply_chat_template(
        [*QUESTION, {"role": "assistant", "content": call("6 * 7")},
         {"role": "tool", "content": "42"}],
        tools=[CALCULATOR], add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert second == render


def test_the_answer_of_a_tool_has_the_name_of_its_call():
    # Some chat templates show the name, and clients do not send it.
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "yes"}]}
    person = {"role": "user", "name": "Ada", "content": "Look."}
    messages = [person, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    assert [(m.name, m.content) for m in parse_chat(messages)] == [
        ("", "Look."), ("", ""), ("look", "yes"),
    ]  # fmt: skip


def test_a_call_that_is_not_well_formed_is_text():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        [choice] = (await ask(ai, QUESTION, tools=[CALCULATOR])).choices
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert "<tool_call>\n{\n</tool_call>" in choice.message.content
        [choice] = (await ask(ai, [*QUESTION, choice.message, AGAIN], tools=[CALCULATOR])).choices
        assert choice.message.content == "42"
        [choice] = (await ask(ai, QUESTION, tools=[CALCULATOR], tool_choice="none")).choices
        assert choice.message.tool_calls is None

    bad = "Look: <tool_call>\n{\n</tool_call>"
    samples, policy = run([bad, "42", call("1")], program)
    assert [sample.segment for sample in samples] == [0, 1]  # the first is gone on from as it is
    assert "Look: <tool_call>\n{\n</tool_call><|im_end|>" in policy.prompts[1]


def test_each_of_n_choices_is_a_branch_that_can_be_gone_on_from():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await ask(ai, QUESTION, n=3)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        assert answer.usage.completion_tokens == 6
        await ask(ai, [*QUESTION, answer.choices[1].message, AGAIN], n=2)

    samples, policy = run(["a", "b", "c", "d", "e"], program)
    assert len({sampling.seed for _, sampling, _ in policy.requests}) == 5
    shown = [[text_of([token]) for token in sample.response_ids] for sample in samples]
    assert [(s[0], s[-2]) for s in shown] == [("a", "a"), ("c", "c"), ("b", "d"), ("b", "e")]
    masks = [sum(sample.response_mask) for sample in samples]
    assert masks == [2, 2, 4, 2]  # "b" is trained once
    assert [sample.segment for sample in samples] == [0, 1, 2, 3]


def test_branches_have_the_rest_of_the_response_each():
    length = len(TOKENIZER.encode("b")) + 1

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await ask(ai, QUESTION, n=2)
        for choice in answer.choices:
            await ask(ai, [*QUESTION, choice.message, AGAIN])
        await ask(ai, [AGAIN])  # another conversation

    _, policy = run(["a", "b", "c", "d", "e"], program)
    limits = [sampling.max_tokens for _, sampling, _ in policy.requests]
    assert limits == [1000, 1000, 1000 - length, 1000 - length, 1000]


def test_a_response_that_is_used_up_is_refused_and_cut_off():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await ask(ai, QUESTION)
        assert answer.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="1000 of 1000 response tokens") as caught:
            await ask(ai, [*QUESTION, answer.choices[0].message, AGAIN])
        assert caught.value.code == "context_length_exceeded"

    [sample], _ = run(["x " * 1000], program)
    assert (sample.status, sum(sample.response_mask)) == ("truncated", 1000)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_reward_reads_the_answer_whose_tokens_it_is_given(last):
    # Of three choices the one that ends last is any of them.
    waits = [asyncio.Event() for _ in range(3)]
    policy = Policy(["a", "bb bb", "42"], dict(enumerate(waits)))
    seen: list[Any] = []

    async def reward(samples: list[Sample], texts: list[str], *rest: Any) -> None:
        [sample] = samples
        seen.extend([*texts, sample.turn_texts, text_of(sample.response_ids[:-1])])
        await is_42(samples, texts, *rest)

    async def program(task: Task, base_url: str, api_key: str) -> None:
        answering = asyncio.create_task(ask(client(base_url, api_key), QUESTION, n=3))
        await until(lambda: len(policy.requests) == 3)
        for number in sorted(range(3), key=lambda number: number == last):
            waits[number].set()
            await asyncio.sleep(0.05)
        assert (await answering).choices[2].message.content == "42"

    samples, _ = run((), program, policy=policy, reward=reward)
    assert seen == ["42", ["a", "bb bb", "42"], "42"]
    assert [sample.reward for sample in samples] == [1.0] * 3
    assert [text_of(sample.response_ids[:-1]) for sample in samples] == ["a", "bb bb", "42"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("key", ["turn_rewards", "token_rewards"])
def test_rewards_posted_while_a_turn_is_in_flight_are_of_the_turns_that_were_answered(key, n):
    waits = asyncio.Event()
    policy = Policy(["40", "41", "42"], {n: waits})  # with n=2 the first choice has ended
    earned = {"turn_rewards": [0.25], "token_rewards": [[0.0, 0.25, 0.0]]}[key]

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        first = (await ask(ai, QUESTION)).choices[0].message
        answering = asyncio.create_task(ask(ai, [*QUESTION, first, AGAIN], n=n))
        await until(lambda: len(policy.requests) == 1 + n)
        await asyncio.sleep(0.05)
        refused = await post(
            base_url, api_key, "sessions/reward", {"reward": 1.0, key: [*earned, *earned]}
        )
        assert refused.status_code == 400
        posted = await post(base_url, api_key, "sessions/reward", {"reward": 1.0, key: earned})
        assert posted.status_code == 200, posted.text
        waits.set()
        await answering

    samples, _ = run((), program, policy=policy)
    paid = [reward for sample in samples for reward in sample.process_rewards if reward]
    assert paid == [0.25] and {sample.reward for sample in samples} == {1.0}
    assert sum(sum(sample.response_mask) for sample in samples) == 3 * (1 + n)


def test_a_stop_text_ends_an_answer_and_is_not_in_it():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        answer = await ask(ai, QUESTION, stop=["END", "!"])
        assert answer.choices[0].message.content == "41"
        assert answer.choices[0].finish_reason == "stop"
        await ask(ai, [*QUESTION, answer.choices[0].message, AGAIN], stop="!", max_tokens=7)

    turns: list[str] = []

    async def reward(samples: list[Sample], *rest: Any) -> None:
        turns.extend(samples[0].turn_texts)

    [sample], policy = run(["41! or 42", "42"], program, reward=reward)
    assert turns == ["41!", "42"]
    assert [sampling.stop for _, sampling, _ in policy.requests] == [("END", "!"), ("!",)]
    assert [sampling.max_tokens for _, sampling, _ in policy.requests] == [1000, 7]
    assert "41!<|im_end|>\n<|im_start|>user\nAre you sure?" in policy.prompts[1]
    assert sample.response_mask[:4] == [1, 1, 1, 0]  # "41!", and the end that was not sampled


def test_a_stream_says_the_same_in_chunks(monkeypatch):
    monkeypatch.setattr("mcore_rl.agents.api_server.app.COMMENTS_S", 0.05)
    waits = asyncio.Event()
    comments = 0

    async def program(task: Task, base_url: str, api_key: str) -> None:
        nonlocal comments
        ai = client(base_url, api_key)
        options = {"include_usage": True}
        stream = await ask(ai, QUESTION, stream=True, stream_options=options, tools=[CALCULATOR])
        chunks = [chunk async for chunk in stream]
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Well."
        [tool_call] = [part for delta in deltas for part in delta.tool_calls or ()]
        assert (tool_call.index, tool_call.function.name) == (0, "calculator")
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.total_tokens > 0
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=headers, trust_env=False) as raw:
            body = {"messages": QUESTION, "stream": True}
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


def test_requests_at_the_same_time_are_turns_of_one_trajectory():
    waits = asyncio.Event()
    policy = Policy(["a", "b", "c"], {0: waits})

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        first = asyncio.create_task(ask(ai, QUESTION))
        await until(lambda: len(policy.requests) == 1)
        second = await ask(ai, QUESTION)
        await ask(ai, [*QUESTION, second.choices[0].message, AGAIN])
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
        answer = await ask(ai, QUESTION)
        reply: dict[str, Any] = {"role": "assistant", "content": answer.choices[0].message.content}
        messages, options = [*QUESTION, reply, AGAIN], {}
        if change == "content":
            reply["content"] = "43"
        elif change == "tools":
            options["tools"] = [CALCULATOR]
        else:
            messages.insert(0, {"role": "developer", "content": "Be brief."})
        await ask(ai, messages, **options)

    samples, policy = run(["41", "42"], program)
    assert [sample.segment for sample in samples] == [0, 1]
    assert [sum(sample.response_mask) for sample in samples] == [3, 3]
    first_content = "43" if change == "content" else "41"
    assert first_content in text_of(samples[1].prompt_ids)
    assert "Be brief." in policy.prompts[1] or change != "system"
    assert not any(text in policy.prompts[1] for text in ["41"] if change == "content")


def test_tokens_in_and_out_with_versions_and_both_forms_of_log_probs():
    first = TOKENIZER.encode("6 * 7 = ")

    async def program(task: Task, base_url: str, api_key: str) -> None:
        url = base_url.removesuffix("/v1")
        sampling = {"stop_token_ids": [END], "logprobs": 1, "max_tokens": 9, "temperature": 1.0}
        body = {"token_ids": first, "sampling_params": sampling, "model": "any"}
        answer = await post(url, api_key, "inference/v1/generate", body)
        [choice] = answer.json()["choices"]
        ids = [*TOKENIZER.encode("41"), END]
        assert choice["token_ids"] == ids and choice["finish_reason"] == "stop"
        assert choice["logprobs"]["content"] == [
            {"token": f"token_id:{token}", "token_id": token, "logprob": -0.25} for token in ids
        ]
        assert choice["weight_versions"] == [{"version": "5", "start": 0, "end": 3}]
        body["token_ids"] = [*first, *ids, *TOKENIZER.encode("Sure?")]
        await post(url, api_key, "inference/v1/generate", body)
        body["sampling_params"] = {"stop_token_ids": [1]}
        refused = await post(url, api_key, "inference/v1/generate", body)
        assert refused.status_code == 400 and "those that end turns anyway" in refused.text

    [sample], policy = run(["41", "42"], program)
    assert sample.prompt_ids == first and sample.reward == 1
    mask = sample.response_mask
    assert mask == [1] * 3 + [0] * len(TOKENIZER.encode("Sure?")) + [1] * 3
    assert [params.temperature for _, params, _ in policy.requests] == [0.7] * 2


def test_a_program_may_open_sessions_of_roles_with_rewards_of_their_own():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        for role, reward in (("asks", 1.0), ("answers", -1.0)):
            opened = (await post(base_url, api_key, "sessions", {"role": role})).json()
            assert opened["base_url"] == base_url
            await ask(client(base_url, opened["api_key"]), QUESTION)
            await post(base_url, opened["api_key"], "sessions/reward", {"reward": reward})
        assert (await post(base_url, api_key, "sessions", {"role": ""})).status_code == 400

    samples, _ = run(["Why?", "So."], program)
    assert [(s.role, s.reward) for s in samples] == [("asks", 1.0), ("answers", -1.0)]
    assert samples[0].trajectory != samples[1].trajectory


def test_the_client_of_renderers_reads_what_tokens_give():
    from renderers import config_from_name, create_renderer
    from renderers.client import generate

    async def program(task: Task, base_url: str, api_key: str) -> None:
        completions = await generate(
            client=client(base_url, api_key),
            renderer=create_renderer(TOKENIZER, config_from_name("qwen3")),
            messages=[{"role": "user", "content": "How much is 6 * 7?"}],
            model="policy",
            sampling_params={"temperature": 1.0, "max_tokens": 50},
            extra_headers={"X-Session-ID": "a trace"},
        )
        ids = [*TOKENIZER.encode("42"), END]
        assert completions["completion_ids"] == ids and completions["content"] == "42"
        assert completions["completion_logprobs"] == [-0.25] * 3

    [sample], _ = run(["42"], program)
    assert (sample.reward, sum(sample.response_mask)) == (1.0, 3)


def test_the_code_of_the_page_runs(tmp_path):
    write_recipes((ROOT / "docs" / "endpoint.md").read_text(), tmp_path)
    function = {"function": f"{tmp_path}/here/asked.py:asked"}
    [sample], _ = run(["42"], None, settings=function, reward=None)
    assert (sample.reward, sample.status) == (1.0, "finished")
    command = {"command": f"{sys.executable} {tmp_path}/here/agent.py"}
    [sample], policy = run(["41", "42"], None, settings=command)
    assert "Check that" in policy.prompts[1] and sample.reward == 1
