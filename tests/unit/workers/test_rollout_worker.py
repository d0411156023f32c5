"""A server's worker, without a server that has started."""

import asyncio
import time
from pathlib import Path

import pytest

from mcore_rl.config.agent_schema import AgentConfig
from mcore_rl.config.schema import RewardConfig, RolloutConfig
from mcore_rl.data.tasks import last_digit
from mcore_rl.workers.rollout_worker import RolloutSpec, RolloutWorker


def test_a_worker_does_not_wait_for_its_server_for_ever(tmp_path: Path):
    task = last_digit.prepare(tmp_path / "task", 0, 0.35)
    spec = RolloutSpec(
        model_path=str(task.model_dir),
        dtype="float32",
        max_model_tokens=64,
        rollout=RolloutConfig(),
        reward=RewardConfig(),
        agent=AgentConfig(),
        seed=0,
        timeout_s=1.0,
    )
    worker, cancelled = RolloutWorker(spec), []

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def answer() -> int:
        return 7

    with pytest.raises(TimeoutError, match=r"the server has not answered in 1 s"):
        worker._wait(hang())
    assert worker._wait(answer()) == 7
    deadline = time.monotonic() + 10
    while not cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.01)
