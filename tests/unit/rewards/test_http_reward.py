"""The reward `http` against a server that is slow, dies, lies, or never ends."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RewardConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from mcore_rl.rewards.remote import HttpSettings, RemoteReward, parse_retry_after
from tests.unit.rewards.answering import (
    Answer,
    Answering,
    answering,
    disconnect,
    drips,
    says,
    stops_half_way,
    streams,
    waits,
)
from tests.unit.rewards.judging import compute_rewards_with, response

RIGHT = says({"reward": 0.5, "steps": 3})
QUICK = {"backoff_s": 0.01, "max_backoff_s": 0.05, "timeout_s": 10.0}


def send(
    script: Sequence[Answer],
    texts: Sequence[str] = ("a",),
    on_error: str = "zero",
    samples: Sequence[Sample] = (),
    **settings: Any,
) -> tuple[list[Sample], Answering]:
    async def run() -> tuple[list[Sample], Answering]:
        async with asyncio.timeout(120), answering(*script) as server:
            given = {"url": server.url, **QUICK, **settings}
            judge = RewardManager(RewardConfig("http", given, on_error=on_error))
            try:
                return await compute_rewards_with(judge, texts, samples), server
            finally:
                await judge.close()

    return asyncio.run(run())


def test_a_server_gets_a_response_and_returns_its_reward(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "Bearer of tokens")
    sample = response()
    sample.messages = [{"role": "user", "content": "3 + 4?"}]
    headers = "Authorization=REWARD_TOKEN"
    [result], server = send([RIGHT], ["#### 7"], samples=[sample], headers=headers)
    assert (result.reward, result.reward_parts, result.reward_error) == (0.5, {"steps": 3.0}, "")
    assert server.requests == [
        {
            "text": "#### 7",
            "fields": {"answer": "7"},
            "finish_reason": "stop",
            "num_tokens": 3,
            "max_tokens": 16,
            "messages": [{"role": "user", "content": "3 + 4?"}],
            "turns": ["#### 7"],
            "turn_token_ids": [[1, 1, 1]],
        }
    ]
    assert server.headers[0]["authorization"] == "bearer of tokens"


def test_a_batch_is_one_request():
    results = [{"reward": 0.0}, {"reward": 1.0, "turn_rewards": [1.0]}, {"reward": 2.0}]
    result, server = send([says({"results": results[::2]})], ["a", "b"], batched=True)
    assert [sample.reward for sample in result] == [0.0, 2.0]
    assert [row["text"] for row in server.requests[0]["responses"]] == ["a", "b"]
    result, server = send([says({"results": results})], ["a", "b"], batched=True)
    for sample in result:
        assert "as 'results' of 2 responses; allowed: a list of as many" in sample.reward_error
    result, _ = send([says({"results": results[:2]})], ["a", "b"], batched=True)
    assert result[0].reward_error == ""
    assert "returned the keys ['reward', 'turn_rewards']" in result[1].reward_error


BROKEN = {
    "500": says({"error": "full"}, 500),
    "503": says(b"", 503, Retry_After="0"),
    "429": says({}, 429),
    "429 with a date": says({}, 429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "429 with an hour": says({}, 429, Retry_After="3600"),  # which is more than max_backoff_s
    "dies": disconnect,
    "stops half way": stops_half_way,
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_may_pass_is_tried_again(name):
    [sample], server = send([BROKEN[name], BROKEN[name], RIGHT])
    assert (sample.reward, sample.reward_error, len(server.requests)) == (0.5, "", 3)


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_pass_marks_its_sample(name):
    [sample], server = send([BROKEN[name]], retries=2)
    assert (sample.reward, len(server.requests)) == (0.0, 3)
    assert sample.reward_error.startswith(
        "reward.name='http' raised RemoteError: http://127.0.0.1:"
    )


def test_nobody_listens():
    [sample], server = send([RIGHT], url="http://127.0.0.1:1/score", retries=1)
    assert "http://127.0.0.1:1/score cannot be reached: ConnectError" in sample.reward_error
    assert server.requests == []


def test_a_server_says_how_long_to_wait():
    started = time.monotonic()
    send([says({}, 429, Retry_After="1"), RIGHT], max_backoff_s=5.0)
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)])
def test_retry_after(header, seconds):
    assert parse_retry_after(header) == seconds


def get_error(answer: Answer, **settings: Any) -> str:
    """Return the error of an answer to a single request."""
    [sample], server = send([answer], **settings)
    assert (sample.reward, sample.reward_parts, len(server.requests)) == (0.0, {}, 1)
    return sample.reward_error


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says(b'{"reward": NaN}'), "returned nan for 'reward', which is no finite number"),
        (says(b'{"reward": 1e999}'), "returned inf for 'reward', which is no finite number"),
        (says(b'{"reward": 1' + b"0" * 400 + b"}"), "for 'reward', which is no finite number"),
        (says(b'{"reward": 1' + b"0" * 5000 + b"}"), "is not valid JSON"),
        (says({"reward": "1"}), "returned '1' for 'reward', which is no finite number"),
        (says({"score": 1}), "returned a dict without 'reward', with the keys ['score']"),
        (says([1.0]), "is a JSON list, not an object"),
        (says(b'{"reward": '), "is not valid JSON"),
        (says(b"\xff\xfe"), "is not valid JSON"),
        (says(b"[" * 100_000), "is not valid JSON"),
        (says({"error": "no such model"}, 404), 'answered 404: b\'{"error": "no such model"}\''),
        (says({}, 401), "answered 401"),
        (streams, "answered with more than 1024 KiB (max_answer_kb)"),
    ],
)
def test_what_is_wrong_is_not_tried_again(answer, message):
    assert message in get_error(answer)


@pytest.mark.parametrize("answer", [waits, drips])
def test_an_answer_has_a_limit_on_time(answer):
    message = get_error(answer, timeout_s=0.5)
    assert message == "reward.name='http' took longer than 0.5 s (reward.settings.timeout_s)"


def test_retries_end_with_the_time_of_the_request():
    [sample], server = send([disconnect], timeout_s=0.5, retries=10_000)
    assert sample.reward_error.endswith("took longer than 0.5 s (reward.settings.timeout_s)")
    assert len(server.requests) > 2


def test_a_request_goes_where_the_settings_say_and_nowhere_else():
    async def run() -> tuple[list[Sample], Answering, Answering]:
        async with answering(RIGHT) as other, answering(says({}, 307, Location=other.url)) as first:
            judge = RewardManager(
                RewardConfig("http", {"url": first.url, **QUICK}, on_error="zero")
            )
            samples = await compute_rewards_with(judge, ["a"])
            await judge.close()
            return samples, first, other

    [sample], first, other = asyncio.run(run())
    assert f"leads to '{other.url}'" in sample.reward_error
    assert (len(first.requests), len(other.requests)) == (1, 0)


def test_an_error_marks_one_sample_or_stops_the_run():
    script = [says({}, 404), says({}, 404), says({}, 404)]
    result, _ = send([says({}, 400), RIGHT], ["a", "b", "c"])
    assert sorted(bool(sample.reward_error) for sample in result) == [False, False, True]
    result, _ = send(script, ["a", "b"], on_error="drop")
    assert all(sample.reward_error for sample in result)
    with pytest.raises(RewardError, match=r"'http' raised RemoteError: .* answered 404"):
        send(script, ["a", "b"], on_error="stop")


def test_requests_wait_for_a_place_which_takes_no_time_of_theirs():
    open_now, most = Counter(), Counter()

    async def slow(writer: asyncio.StreamWriter) -> None:
        open_now["requests"] += 1
        most["requests"] = max(most["requests"], open_now["requests"])
        await asyncio.sleep(0.4)
        open_now["requests"] -= 1
        await RIGHT(writer)

    result, _ = send([slow], ["a"] * 16, concurrent_requests=2, timeout_s=2.4)  # in 3.2 s
    assert [sample.reward_error for sample in result] == [""] * 16
    assert most["requests"] == 2


class SkippedTime(selectors.SelectSelector):
    """Time passes where a loop would wait, at once."""

    time_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        result = super().select(0)
        if not result and timeout:
            self.time_s += timeout
        return result


@pytest.mark.parametrize("rate", [0.5, 4.0, 32.0])
def test_no_second_has_more_requests_than_are_allowed(rate):
    # By a clock that is skipped ahead; each third request fails and is tried again.
    clock, times = SkippedTime(), list[float]()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.time_s  # type: ignore[method-assign]

    async def server(scope: Any, receive: Any, send: Any) -> None:
        times.append(clock.time_s)
        status = 503 if len(times) % 3 == 0 else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"reward": 1}'})

    async def run() -> None:
        settings = HttpSettings(url="http://server/score", requests_per_s=rate, retries=20)
        remote = RemoteReward(settings, limit_s=1000.0)
        remote._client = httpx.AsyncClient(transport=httpx.ASGITransport(app=server))
        await asyncio.gather(*(remote.post({}) for _ in range(100)))
        await remote.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    assert len(times) >= 149
    window = max(1.0, 1 / rate)
    for start in times:
        assert sum(start <= moment < start + window - 1e-6 for moment in times) <= round(
            rate * window
        )
    assert times[-1] <= (len(times) + 1) / rate + 60  # and it is used


WRONG = {
    "url='ftp://host/score'; allowed: http://HOST": {"url": "ftp://host/score"},
    "url='http://...@host/'; allowed": {"url": "http://me:secret@host/"},
    "url='score'; allowed": {"url": "score"},
    "retries=-1; allowed: at least 0": {"retries": -1},
    "requests_per_s=0.0; allowed: above 0": {"requests_per_s": 0},
    "max_backoff_s=0.1; allowed: at least 0.5": {"max_backoff_s": 0.1},
    "concurrent_requests=0; allowed: at least 1": {"concurrent_requests": 0},
    "headers='Authorization: x'; allowed: NAME=VARIABLE": {"headers": "Authorization: x"},
    "headers names the environment variable 'NOT_SET', which is not set": {"headers": "A=NOT_SET"},
    "headers names the environment variable 'TWO_LINES', which is no pr": {
        "headers": "A=TWO_LINES"
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_is_refused_before_a_run(message, monkeypatch):
    monkeypatch.setenv("TWO_LINES", "secret\nB: c")
    settings = {"url": "http://host/", **WRONG[message]}
    with pytest.raises(ConfigError) as raised:
        RewardManager(RewardConfig("http", settings))
    assert str(raised.value).startswith(f"reward.settings.{message}")
    assert "secret" not in str(raised.value)
