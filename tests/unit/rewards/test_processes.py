"""Functions of a user in processes of their own: what these get, and what ends them."""

import asyncio
import datetime
import os
import time

import pytest

from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rewards.registry import RewardError
from tests.unit.rewards.judging import compute_rewards, compute_rewards_with, response

USER_FILE = """
import os
import re
import threading
import time

from mcore_rl.rewards.registry import run_in_process, run_in_thread

def where(text, fields, finish_reason):
    is_main = threading.current_thread() is threading.main_thread()
    return {"reward": float(is_main), "process": os.getpid()}

@run_in_thread
def where_in_thread(text, fields, finish_reason):
    return where(text, fields, finish_reason)

def backtracks(text, fields, finish_reason):
    return {"reward": float(re.fullmatch("(a+)+b", text) is not None)}

def long_name(text, fields, finish_reason):
    return {"reward": 1.0, text: 0.0}

def sleeps(text, fields, finish_reason):
    if text == "sleeps":
        time.sleep(20)
    return {"reward": 2.0}

def signals(text, number):
    # Always, or once, where the text is a file that is not there yet.
    if text == "always" or not os.path.exists(text):
        open(text, "w").close()
        os.kill(os.getpid(), number)
    return {"reward": 0.5}

@run_in_process()
def killed(text, fields, finish_reason):
    return signals(text, 9)

@run_in_process()
def stopped(text, fields, finish_reason):
    return signals(text, 19)
"""
ONLY_HERE = """
import sys

if "processes" in sys.argv[0]:
    raise ImportError("no device")

def one(text, fields, finish_reason):
    return {"reward": 1.0}
"""


@pytest.fixture
def user_path(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    return "own.py:{}".format


def test_a_sync_function_of_a_user_is_in_a_process_or_in_a_thread_that_it_asks_for(user_path):
    [sample] = compute_rewards(RewardConfig(user_path("where")), ["a"])
    assert (sample.reward, sample.reward_parts["process"] == os.getpid()) == (1.0, False)
    [sample] = compute_rewards(RewardConfig(user_path("where_in_thread")), ["a"])
    assert (sample.reward, sample.reward_parts["process"] == os.getpid()) == (0.0, True)


def test_a_function_that_lets_no_thread_run_costs_its_sample_and_no_other_work(user_path):
    # A match of Python's re keeps all threads of its process waiting: here, for hours.

    async def run():
        judge = RewardManager(RewardConfig(user_path("backtracks"), on_error="zero", timeout_s=1.0))
        judging = asyncio.create_task(compute_rewards_with(judge, ["ab", "a" * 60, "aab"]))
        gaps, last = [], time.monotonic()
        while not judging.done():
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last += gaps[-1]
        await judge.close()
        return await judging, max(gaps)

    result, longest = asyncio.run(run())
    assert [sample.reward for sample in result] == [1.0, 0.0, 1.0]
    assert result[1].reward_error.endswith("took longer than 1 s (reward.timeout_s)")
    assert longest < 30


def test_an_answer_of_a_process_may_be_long(user_path):
    name = "x" * 200_000
    [sample] = compute_rewards(RewardConfig(user_path("long_name")), [name])
    assert (sample.reward, sample.reward_parts) == (1.0, {name: 0.0})


def test_a_function_that_no_process_can_import_says_so_and_how_to_keep_it_here(tmp_path):
    (tmp_path / "own.py").write_text(ONLY_HERE)
    with pytest.raises(RewardError, match=r"no device\. .* @run_in_thread"):
        compute_rewards(RewardConfig(f"{tmp_path}/own.py:one"), ["a"])


def test_a_process_that_cannot_start_is_no_wrong_answer(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.chdir("/")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RewardError, match=r"'math' raised RuntimeError: the start of its process"):
        compute_rewards(RewardConfig("math"), [r"\boxed{7}"])


def test_a_cancelled_call_leaves_no_process_and_one_that_dies_is_replaced(user_path):
    async def run():
        judge = RewardManager(RewardConfig(user_path("sleeps"), num_processes=1))
        await compute_rewards_with(judge, ["fine"])
        [process] = judge._terms[0].processes._idle
        waiting = asyncio.create_task(compute_rewards_with(judge, ["sleeps"]))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert process.returncode == -9
        await compute_rewards_with(judge, ["fine"])
        [process] = judge._terms[0].processes._idle
        process.kill()  # by the kernel, say, while nobody asks it
        await process.wait()
        await compute_rewards_with(judge, ["fine"])
        await judge.close()
        assert judge._terms[0].processes._idle == []

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("killed", r"killed' ended its process with status -9"),
        ("stopped", r"stopped' took longer than 2 s, stopped by a signal"),
    ],
)
def test_a_process_that_is_killed_or_stopped_in_a_call_loses_no_reward(
    user_path, tmp_path, monkeypatch, name, message
):
    monkeypatch.chdir(tmp_path)
    config = RewardConfig(user_path(name), num_processes=1, timeout_s=2.0)
    (sample,) = compute_rewards(config, ["once"])
    assert (sample.reward, sample.reward_error) == (0.5, "")
    with pytest.raises(RewardError, match=message):
        compute_rewards(config, ["always"])


def test_columns_that_json_lacks_come_to_a_process_as_text(tmp_path):
    (tmp_path / "own.py").write_text(
        "def day(text, fields, finish_reason):\n"
        "    return {'reward': float(fields['answer'] == '2026-01-02')}\n"
    )
    [sample] = compute_rewards(
        RewardConfig(f"{tmp_path}/own.py:day"), ["x"], [response(datetime.date(2026, 1, 2))]
    )
    assert sample.reward == 1.0
