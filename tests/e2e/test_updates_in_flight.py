"""Weights change while a real vLLM server generates: nothing is lost, each token has its version.

The reference is transformers in float32 on the checkpoints of before and after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.config.errors import StateError
from mcore_rl.config.schema import AgentConfig
from mcore_rl.inference.protocol import Completion, SamplingParams, ServerMemory
from tests.e2e.served import MAX_TOKENS, PROMPT, Model, Served
from tests.e2e.test_agent_updates import no_reward, tokenizer_of_characters

pytestmark = pytest.mark.server

LONG = [1, *range(20, 59)]  # more than a block of the prefix cache
MANY = SamplingParams(n=12, max_tokens=200, seed=3)  # the longest run for most of a second
Action = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Straddling:
    """Answers of a server while its weights changed."""

    served: Served
    version: int  # of before
    early: list[Completion]  # of LONG, asked for before
    late: Completion  # of PROMPT, asked for meanwhile

    def gaps(self, model: Model, *, of_new: bool) -> list[float]:
        """Return the largest differences to a model's log-probs, of old or new tokens."""
        largest = []
        for completion in self.both_versions:
            expected = model.log_probs(LONG, completion.token_ids)
            largest.append(
                max(
                    abs(a - b)
                    for a, b, version in zip(
                        completion.log_probs, expected, completion.weight_versions, strict=True
                    )
                    if (version > self.version) == of_new
                )
            )
        return largest

    @property
    def both_versions(self) -> list[Completion]:
        return [c for c in self.early if len(set(c.weight_versions)) == 2]


def answered_across(served: Served, change: Action) -> Straddling:
    """Run requests for some tokens, await `change`, and make another one meanwhile."""
    served.take(0)
    server, version = served.server, served.server.weight_version

    async def work() -> tuple[list[Completion], list[Completion]]:
        running = asyncio.create_task(server.submit(LONG, MANY))
        await tokens_of_another(served)
        changing = asyncio.create_task(change())
        await asyncio.sleep(0)  # so it has begun
        late = asyncio.create_task(server.submit(PROMPT, SamplingParams(max_tokens=24, seed=1)))
        await changing
        return await running, await late

    early, [late] = served.run(work())
    straddling = Straddling(served, version, early, late)
    assert len(early) == MANY.n and len(straddling.both_versions) >= 2
    for completion in straddling.both_versions:
        assert completion.weight_versions == sorted(completion.weight_versions)
        assert set(completion.weight_versions) == {version, version + 1}
        assert completion.finish_reason == "stop" or len(completion.token_ids) == MANY.max_tokens
    assert max(straddling.gaps(served.models[0], of_new=False)) < 1e-4
    return straddling


async def tokens_of_another(served: Served) -> None:
    """Wait until a request that came after the others has had some tokens."""
    await served.server.submit([5, 6, 7], SamplingParams(max_tokens=5, seed=4))


def update(served: Served, seed: int = 1, **how: Any) -> Awaitable[None]:
    version = served.server.weight_version + 1
    return served.server.load_checkpoint(served.models[seed].path, version, **how)


def cached(served: Served, prompt: list[int], cache: str = "") -> int:
    """Return how many tokens of a prompt a new request reads from the prefix cache."""

    async def ask() -> int:
        async for output in served.server._generate(prompt, max_tokens=1, cache=cache):
            num_cached = int(output.num_cached_tokens)
        return num_cached

    return served.run(ask())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_running_requests_go_on_with_the_new_weights(shared_server, recompute):
    straddling = answered_across(
        shared_server, lambda: update(shared_server, in_flight=True, recompute_cache=recompute)
    )
    new, gaps = shared_server.models[1], straddling.gaps(shared_server.models[1], of_new=True)
    assert set(straddling.late.weight_versions) == {straddling.version + 1}
    assert new.gap(PROMPT, straddling.late) < 1e-4
    assert straddling.late.token_ids == whole_of(shared_server)
    if recompute:
        assert max(gaps) < 1e-4
    else:  # older keys and values are there still
        print(f"largest gaps with kept keys and values: {[round(gap, 3) for gap in gaps]}")
        assert min(gaps) > 0.01


def whole_of(served: Served) -> list[int]:
    """Return the tokens of the late request, with the weights that are there now."""
    [completion] = served.run(served.server.submit(PROMPT, SamplingParams(max_tokens=24, seed=1)))
    return completion.token_ids


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_no_new_request_reads_what_older_weights_have_cached(shared_server, recompute):
    shared_server.take(0)
    num_tokens = 32
    for cache in ("", "evaluation"):
        assert [cached(shared_server, LONG, cache) for _ in range(2)] == [0, num_tokens]

    async def across() -> None:
        running = asyncio.create_task(shared_server.server.submit(LONG, MANY))
        await tokens_of_another(shared_server)
        await update(shared_server, in_flight=True, recompute_cache=recompute)
        await running

    shared_server.run(across())
    for cache in ("", "evaluation"):
        # A prompt that was computed again has keys and values of the new weights, for others too.
        first = num_tokens if recompute and not cache else 0
        assert [cached(shared_server, LONG, cache) for _ in range(2)] == [first, num_tokens]


def test_after_an_update_in_flight_that_failed_nothing_is_generated_until_a_whole_one(
    shared_server,
):
    # Requests stand still meanwhile; they can be aborted, or go on with a whole update.
    #
    # A new one waits for that.
    server = shared_server.server

    async def fail() -> None:
        number = server.weight_version + 1
        with pytest.raises(RuntimeError, match=f"weight update to version {number} failed"):
            await server.update(number, in_flight=True, recompute_cache=True)
        with pytest.raises(StateError, match=r"while it generates: \d requests run"):
            await update(shared_server)
        assert server.weight_version == number - 1

    async def work() -> tuple[list[Completion], list[Completion], list[Completion]]:
        ended = asyncio.create_task(server.submit(LONG, MANY, request_id="ended"))
        goes_on = asyncio.create_task(server.submit(LONG, MANY))
        await tokens_of_another(shared_server)
        await fail()
        new = asyncio.create_task(server.submit(PROMPT, SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in (goes_on, ended, new))
        await server.abort("ended")
        partial = await ended
        await update(shared_server, in_flight=True, recompute_cache=True)
        return partial, await goes_on, await new

    shared_server.take(0)
    number = server.weight_version
    partial, complete, new = shared_server.run(work())
    assert "abort" in {c.finish_reason for c in partial}
    assert {version for c in partial for version in c.weight_versions} == {number}
    assert new[0].weight_versions == [number + 1]
    straddling = Straddling(shared_server, number, complete, complete[0])
    assert len(straddling.both_versions) >= 2
    assert max(straddling.gaps(shared_server.models[0], of_new=False)) < 1e-4
    assert max(straddling.gaps(shared_server.models[1], of_new=True)) < 1e-4


def test_requests_that_run_when_it_falls_asleep_go_on_with_the_weights_that_it_wakes_with(
    shared_server,
):
    server = shared_server.server

    async def through_sleep() -> None:
        await server.sleep(keep=True)
        assert await server.memory() == ServerMemory(0, 0)
        ended = asyncio.create_task(server.submit(LONG, MANY, request_id="meanwhile"))
        await asyncio.sleep(0)
        ended.cancel()
        await server.wake("weights")
        await update(shared_server)
        await server.wake("kv_cache")

    straddling = answered_across(shared_server, through_sleep)
    assert max(straddling.gaps(shared_server.models[1], of_new=True)) < 1e-4
    assert set(straddling.late.weight_versions) == {straddling.version + 1}
    assert shared_server.models[1].gap(PROMPT, straddling.late) < 1e-4


def test_a_request_that_is_aborted_during_sleep_leaves_nothing_behind(shared_server):
    shared_server.take(0)
    server = shared_server.server

    async def work() -> Completion:
        aborted = asyncio.create_task(server.submit(LONG, MANY, request_id="aborted"))
        cancelled = asyncio.create_task(server.submit(LONG, MANY))
        await tokens_of_another(shared_server)
        await server.sleep(keep=True)
        await server.abort("aborted")
        cancelled.cancel()
        completions = await aborted
        assert "abort" in {completion.finish_reason for completion in completions}
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await server.wake("weights")
        await update(shared_server)
        await server.wake("kv_cache")
        [last] = await server.submit(PROMPT, SamplingParams(max_tokens=24))
        return last

    assert shared_server.models[1].gap(PROMPT, shared_server.run(work())) < 1e-4
    shared_server.take(0)  # which is refused while a request has a block of the cache


def test_requests_that_are_held_start_together_whatever_the_weights_do(shared_server):
    # Those of two callers at once, and one whose moment comes in the middle of an update.
    shared_server.take(0)
    server = shared_server.server

    async def ask(started: list[asyncio.Task[Any]], seed: int) -> None:
        async with server.start_together():
            sampling = SamplingParams(max_tokens=10, seed=seed)
            started.append(asyncio.create_task(server.submit(PROMPT, sampling)))
            await asyncio.sleep(0.2 * seed)  # a token takes some 10 ms
            assert not started[-1].done()

    async def work() -> list[Completion]:
        started: list[asyncio.Task[Any]] = []
        callers = [asyncio.create_task(ask(started, seed)) for seed in (1, 2)]
        while len(started) < 2:
            await asyncio.sleep(0.01)
        updating = asyncio.create_task(update(shared_server, in_flight=True))
        await asyncio.sleep(0)
        callers.append(asyncio.create_task(ask(started, 3)))
        await asyncio.gather(*callers, updating)
        return [c for completions in await asyncio.gather(*started) for c in completions]

    number = server.weight_version
    completions = shared_server.run(work())
    assert len(completions) == 3
    assert set(completions[-1].weight_versions) == {number + 1}


class Waiting:
    """Two turns; after the first one it waits until it is told to go on."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: dict[str, Any]) -> None:
        self._reached, self._goes_on = fields["reached"], fields["goes_on"]
        self._turns = 0

    async def reset(self) -> Sequence[ChatMessage]:
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        self._turns += 1
        if self._turns == 2:
            return EnvironmentStep(reward=1.0, is_done=True)
        self._reached.set()
        await self._goes_on.wait()
        return EnvironmentStep((ChatMessage("user", "And?"),))

    async def close(self) -> None:
        pass


def test_a_turn_that_comes_while_the_server_sleeps_waits_and_its_time_stands_still(shared_server):
    shared_server.take(0)
    server, number = shared_server.server, shared_server.server.weight_version

    async def work() -> Any:
        reached, goes_on = asyncio.Event(), asyncio.Event()
        config = AgentConfig("environment", environment=f"{__file__}:Waiting", max_turn_tokens=40)
        config = replace(config, timeout_s=10.0)
        runner = AgentRunner(
            server, tokenizer_of_characters(), no_reward, config, MAX_TOKENS, stops_on_error=True
        )
        conversation = [{"role": "user", "content": "Add."}]
        prompt = Prompt([], 0, {"reached": reached, "goes_on": goes_on}, messages=conversation)
        [group] = runner.start([prompt], SamplingParams(n=1, seed=5, max_tokens=MAX_TOKENS))
        await reached.wait()
        runner.hold("sleep")
        await server.sleep(keep=True)
        left_s = runner._running[0, 0].timeout._remaining_s
        goes_on.set()
        await asyncio.sleep(0.3)
        assert not group.done()
        await server.wake("weights")
        await update(shared_server)
        assert not group.done()
        await server.wake("kv_cache")
        assert runner._running[0, 0].timeout.when() is None
        get_time_s = asyncio.get_running_loop().time
        before = get_time_s()
        runner.release("sleep")
        ends = runner._running[0, 0].timeout.when()
        assert before - 1e-6 <= ends - left_s <= get_time_s() + 1e-6
        [sample] = await group
        await runner.close()
        return sample

    sample = shared_server.run(work())
    assert (sample.status, sample.reward, len(sample.turn_spans)) == ("finished", 1.0, 2)
    for turn, (span, model) in enumerate(zip(sample.turn_spans, shared_server.models, strict=True)):
        assert set(sample.weight_versions[span.start : span.end]) == {number + turn}
        before = sample.prompt_ids + sample.response_ids[: span.start]
        expected = model.log_probs(before, sample.response_ids[span.start : span.end])
        served = sample.rollout_log_probs[span.start : span.end]
        assert served == pytest.approx(expected, abs=1e-4)
