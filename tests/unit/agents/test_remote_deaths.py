"""A frozen model with several servers of which some die, refuse connections or fail."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mcore_rl.agents import frozen_model as module
from mcore_rl.agents.frozen_model import FrozenModel, ModelServerError, make_judge_post
from mcore_rl.config.schema import RewardConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.rewards.manager import RewardManager
from tests.unit.agents.test_loops import TOKENIZER
from tests.unit.agents.test_models import CODEC
from tests.unit.agents.test_remote import SAMPLING, SERVER, Server, run, serving, until


@contextmanager
def refusing() -> Iterator[str]:
    """Yield a URL where nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def a_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the URL of a server that prints "asked" and answers nothing, and its process."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def no_pauses(monkeypatch):
    """A request that waits, as where all servers are gone, does not end."""
    monkeypatch.setattr(module, "_PAUSES_S", (1000.0,))


def test_a_server_that_refuses_connections_is_avoided_for_a_while(no_pauses, monkeypatch, capsys):
    async def work() -> None:
        with refusing() as dead:
            async with serving(dead, Server()) as remote:
                for _ in range(6):
                    assert len(await remote.submit([1], SAMPLING)) == 2
                assert remote._num_sent[dead] == 1
                monkeypatch.setattr(module, "_AVOID_S", 0.0)
                remote._avoid(dead, "as it is in a while")
                await remote.submit([1], SAMPLING)
                assert remote._num_sent[dead] == 2
            reason = f"models.user: the server at {dead} cannot be reached: ConnectError: "
            assert capsys.readouterr().out.count(reason) == 1

    run(work)


@pytest.mark.job
def test_requests_under_which_a_server_dies_go_to_the_other(no_pauses):
    async def work() -> None:
        with a_process() as (url, process):
            living = Server("waits")
            async with serving(url, living) as remote:
                requests = [asyncio.create_task(remote.submit([n], SAMPLING)) for n in range(4)]
                for _ in range(2):
                    assert await asyncio.to_thread(process.stdout.readline) == "asked\n"
                await until(lambda: len(living.requests) == 2)
                process.kill()
                await until(lambda: len(living.requests) == 4)
                living.does = ""
                assert [len(completions) for completions in await asyncio.gather(*requests)] == [
                    2
                ] * 4
                assert sorted(prompt for prompt, *_ in living.requests) == [[0], [1], [2], [3]]

    run(work)


def test_a_server_whose_engine_fails_is_avoided_until_it_answers_again(no_pauses):
    async def work() -> None:
        broken, living = Server("raises"), Server()
        async with serving(broken, living) as remote:
            for _ in range(4):
                await remote.submit([1], SAMPLING)
            assert (len(broken.requests), len(living.requests)) == (1, 4)
            broken.does, living.does = "", "raises"
            await remote.submit([1], SAMPLING)  # the one that is avoided is all that is left
            for _ in range(2):
                await remote.submit([1], SAMPLING)
            assert (len(broken.requests), len(living.requests)) == (4, 5)

    run(work)


def test_a_refused_request_is_not_sent_to_another_server():
    async def work() -> None:
        servers = Server("refuses"), Server("refuses")
        async with serving(*servers) as remote:
            with pytest.raises(ModelServerError, match=r"status 400: .*does not fit"):
                await remote.submit([1], SAMPLING)
            assert [len(server.requests) for server in servers] == [1, 0]

    run(work)


def test_where_all_fail_each_is_named_with_what_it_failed_of(monkeypatch):
    monkeypatch.setattr(module, "_PAUSES_S", (0.01, 0.02))

    async def work() -> None:
        broken = Server("raises")
        with refusing() as dead:
            async with serving(broken, dead) as remote:
                with pytest.raises(ModelServerError) as caught:
                    await remote.submit([1], SAMPLING)
                assert (len(broken.requests), remote._num_sent[dead]) == (1, 3)
        message = str(caught.value)
        first, last = message.split("; ")
        assert first.startswith("models.user: the server at http://127.0.0.1:")
        assert " answered with status 500: " in first and dead not in first
        assert last.startswith(f"the server at {dead} cannot be reached: ConnectError: ")

    run(work)


def test_a_node_that_is_gone_is_noticed_on_a_connection_that_is_silent():
    async def work() -> None:
        async with serving(Server()) as remote:
            body = {"token_ids": [1], "sampling_params": {}}
            url = f"{remote._urls[0]}{module.GENERATE}"
            async with remote._client.stream("POST", url, json=body) as answer:
                connection = answer.extensions["network_stream"].get_extra_info("socket")
                for level, option, value in module._KEEP_ALIVE:
                    assert connection.getsockopt(level, option) == value

    run(work)


class Judging:
    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        ids = TOKENIZER.encode("Score: 6")
        return [Completion(ids, [0.0] * len(ids), "stop", [4] * len(ids))]


@pytest.mark.job
def test_a_judge_one_of_whose_servers_is_killed_goes_on_scoring(no_pauses):
    async def work() -> None:
        settings = {"served_by": "big", "template": "A: {response}", "high": 10.0}
        judge = RewardManager(RewardConfig("judge", settings))
        samples = [Sample([], [1], [1], [0.0], [0], "stop", number) for number in range(4)]
        with a_process() as (url, process):
            async with serving(url, Judging()) as remote:
                judge.models["big"] = make_judge_post(
                    FrozenModel(remote, CODEC, SamplingParams(), 4096)
                )
                verdicts = asyncio.create_task(judge(samples, ["a", "b", "c", "d"], 16, "row 7"))
                assert await asyncio.to_thread(process.stdout.readline) == "asked\n"
                process.kill()
                await verdicts
        assert [sample.reward for sample in samples] == [0.6] * 4

    run(work)
