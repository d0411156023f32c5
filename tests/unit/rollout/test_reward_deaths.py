"""Groups are collected once although processes of their rewards are killed.

Two servers run in this process, as in tests/unit/trainers/test_driver_bytes.py. Their rewards have
processes of their own.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from mcore_rl.agents.single_turn import SingleTurnLoop
from mcore_rl.config.schema import Layout, RewardConfig, RLConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.rollout.server_pool import ServerPool
from tests.unit.agents.test_loops import TOKENIZER
from tests.unit.trainers.test_driver_bytes import Ray, Server, group, ray  # noqa: F401

KILLED = """
import os
from mcore_rl.rewards.registry import run_in_process

@run_in_process()
def killed(text, fields, finish_reason):
    # Once for each name that is given.
    name = fields["once"]
    if name and not os.path.exists(name):
        open(name, "w").close()
        os.kill(os.getpid(), 9)
    return {"reward": float(fields["worth"])}
"""
NUM_SAMPLES = 2


class Scoring(Server):
    """A server whose samples have the rewards of a run."""

    def __init__(self, reward: RewardConfig) -> None:
        super().__init__(TOKENIZER, apart_s=0.0)
        self.judge = RewardManager(reward)
        self._agent = SingleTurnLoop(self._server, TOKENIZER, self.judge)

    def kill_idle(self) -> int:
        """Kill the idle processes; return their number."""
        processes = self.judge._terms[0].processes
        assert processes is not None
        for process in processes._idle:
            process.kill()
            self._wait(process.wait())
        return len(processes._idle)


def make_prompts(groups: range, killing: Callable[[int], bool] = lambda group: False) -> Batch:
    fields = [{"once": f"group {g}" if killing(g) else "", "worth": g} for g in groups]
    return Batch(
        {
            "prompt_ids": Jagged.pack([[5]] * len(groups), np.int64),
            "group_ids": np.array(groups),
            "fields": Jagged.pack_texts(map(json.dumps, fields)),
            "messages": Jagged.pack_texts(["[]"] * len(groups)),
            "rows": np.array(groups),
        }
    )


def collect_all(pool: ServerPool) -> list[Batch]:
    batches, deadline = list[Batch](), time.monotonic() + 120
    while pool.num_outstanding("train"):
        assert time.monotonic() < deadline
        batches += pool.collect("train", 1.0)
    return batches


def test_groups_are_collected_once_with_rewards_after_reward_processes_were_killed(
    ray: Ray,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    (tmp_path / "own.py").write_text(KILLED)
    monkeypatch.chdir(tmp_path)
    config, reward = RLConfig(), RewardConfig("own.py:killed", num_processes=1)
    servers = [Scoring(reward), Scoring(reward)]

    def start(number: int) -> Any:
        return group(ray, config, f"rollout-{number}", Layout(), lambda: servers[number])

    pool = ServerPool(start, 2, max_restarts=0, takes_turns=False, timeouts=config.timeouts)
    pool.mark_started()
    sampling = SamplingParams(n=NUM_SAMPLES, max_tokens=20)
    pool.begin(make_prompts(range(4), killing=lambda group: group < 2), sampling)
    batches = collect_all(pool)
    assert sum(name.name.startswith("group ") for name in tmp_path.iterdir()) == 2
    assert [server.kill_idle() for server in servers] == [1, 1]
    pool.begin(make_prompts(range(4, 6)), sampling)
    batches += collect_all(pool)
    ids, rewards = (np.concatenate([b.array(n) for b in batches]) for n in ("group_ids", "rewards"))
    assert Counter(ids.tolist()) == dict.fromkeys(range(6), NUM_SAMPLES)
    np.testing.assert_array_equal(rewards, ids)
    assert {error for batch in batches for error in batch.array("reward_errors")} == {""}
    for server in servers:
        server._wait(server.judge.close())
