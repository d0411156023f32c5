"""A worker with a real server: groups are begun, collected as they end and abandoned, in streams.

Calls overlap, as on an actor with several threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig, RewardConfig, RolloutConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rewards.registry import RewardError, run_in_thread
from mcore_rl.rollout.routing import Stream
from mcore_rl.rollout.worker import RolloutSpec, RolloutWorker, list_prompts
from tests.e2e.hosting import hosting
from tests.e2e.served import MAX_TOKENS, PROMPT, Model, tiny_families

pytestmark = pytest.mark.server

WAIT_S = 60.0
SAMPLING = SamplingParams(n=2, max_tokens=24, seed=100)
LONG = replace(SAMPLING, n=12, max_tokens=200)


@run_in_thread
def length_or_error(text: str, fields: dict[str, object], finish_reason: str) -> dict[str, float]:
    """Reward by the number of words."""
    if fields.get("fails"):
        raise ValueError("no such answer")
    return {"reward": float(len(text.split()))}


def prompts(*group_ids: int, **fields: object) -> Batch:
    num = len(group_ids)
    return Batch(
        {
            "prompt_ids": Jagged.pack([PROMPT[: 20 + i % 7] for i in group_ids], np.int64),
            "group_ids": np.array(group_ids, np.int64),
            "fields": Jagged.pack_texts([json.dumps(fields)] * num),
            "rows": np.arange(num),
            "messages": Jagged.pack_texts(["[]"] * num),
        }
    )


@dataclass(frozen=True)
class Working:
    worker: RolloutWorker
    models: list[Model]

    @property
    def version(self) -> int:
        return self.worker._server.weight_version

    def update(self, seed: int = 0, *, in_flight: bool = False) -> None:
        path = self.models[seed].path
        self.worker.load_checkpoint(path, self.version + 1, in_flight, recompute_cache=in_flight)

    def run_all(self, requests: Batch, sampling: SamplingParams) -> Batch:
        prompts = list_prompts(requests)
        return Batch.collate(self.worker._wait(self.worker._agent.run_all(prompts, sampling)))

    def collected(self, stream: Stream, *group_ids: int) -> Batch:
        """Return all samples of these groups, in the order in which they came."""
        batches: list[Batch] = []
        missing = set(group_ids)
        while missing:
            batches.append(self.worker.collect(stream, WAIT_S))
            ids = batches[-1].array("group_ids").tolist()
            assert ids and ids == sorted(ids) and set(ids) <= missing
            missing -= set(ids)
        return Batch.concat(batches)


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Working]:
    folder, config = tmp_path_factory.mktemp("worker"), tiny_families.served_config("qwen3")
    models = [Model(folder / str(seed), config, seed) for seed in (0, 1)]
    (folder / "0" / "chat_template.jinja").write_text("a worker looks whether there is one")
    spec = RolloutSpec(
        model_path=models[0].path,
        chat_date="2024-07-26",
        dtype="float32",
        max_model_tokens=MAX_TOKENS,
        rollout=RolloutConfig(max_num_seqs=32, kv_cache_bytes=32 << 20),
        reward=RewardConfig(f"{__file__}:{length_or_error.__name__}", num_processes=1),
        agent=AgentConfig(),
        seed=0,
        timeout_s=2 * WAIT_S,
        can_sleep=True,
    )
    with hosting():
        worker = RolloutWorker(spec)
        worker.start()
        try:
            yield Working(worker, models)
        finally:
            worker.shut_down()


def responses(batch: Batch) -> dict[int, list[list[int]]]:
    """Return responses by group, in order."""
    by_group: dict[int, list[list[int]]] = {}
    for group, ids in zip(batch.array("group_ids"), batch.jagged("response_ids"), strict=True):
        by_group.setdefault(int(group), []).append(ids.tolist())
    return by_group


def test_groups_that_were_begun_are_collected_whole_once_and_as_a_loop_gives_them(working):
    group_ids = [4, 0, 9, 2]
    expected = working.run_all(prompts(*group_ids), SAMPLING)
    working.worker.begin(prompts(*group_ids), SAMPLING, "train")
    batch = working.collected("train", *group_ids)
    assert responses(batch) == responses(expected)
    assert {len(group) for group in responses(batch).values()} == {SAMPLING.n}
    assert batch.array("trajectories").tolist() == [0, 1] * len(group_ids)
    assert len(working.worker.collect("train", 0.01)) == 0


def test_streams_do_not_mix(working):
    worker = working.worker
    worker.begin(prompts(0, 1), SAMPLING, "train")
    worker.begin(prompts(-1, -2), replace(SAMPLING, cache="evaluation"), "evaluation")
    worker.begin(prompts(7), SAMPLING, "train")
    with pytest.raises(ConfigError, match=r"stream 'train': groups \[7\] have been begun already"):
        worker.begin(prompts(3, 7), SAMPLING, "train")
    assert set(working.collected("evaluation", -1, -2).array("group_ids")) == {-1, -2}
    assert set(working.collected("train", 0, 1, 7).array("group_ids")) == {0, 1, 7}
    assert len(worker.collect("evaluation", 0.01)) == 0


def test_an_abandoned_group_never_comes_and_its_request_is_gone(working):
    worker = working.worker
    worker.begin(prompts(1, 2, 3), LONG, "train")
    worker.begin(prompts(-1), SAMPLING, "evaluation")
    working.collected("evaluation", -1)  # so the others run
    worker.abandon("train", [1, 3, 5])
    assert set(working.collected("train", 2).array("group_ids")) == {2}
    assert len(worker.collect("train", 0.3)) == 0
    server = worker._server
    engine = server._started_engine
    assert not server._engine_ids and not engine.output_processor.has_unfinished_requests()
    assert worker._wait(engine.reset_prefix_cache())  # no request has a block
    worker.begin(prompts(1), SAMPLING, "train")  # it may be begun anew
    assert len(working.collected("train", 1)) == SAMPLING.n


def test_what_a_reward_raises_is_raised_as_a_loop_raises_it(working):
    worker, sampling = working.worker, replace(SAMPLING, n=1)
    with pytest.raises(RewardError) as expected:
        working.run_all(prompts(5, fails=1), sampling)
    worker.begin(prompts(5, fails=1), sampling, "train")
    with pytest.raises(RewardError) as caught:
        worker.collect("train", WAIT_S)
    assert str(caught.value) == str(expected.value)
    assert "group 5" in str(caught.value) and "no such answer" in str(caught.value)
    assert len(worker.collect("train", 0.01)) == 0


def test_calls_overlap_and_groups_go_on_with_new_weights(working):
    """Collect waits in a thread while others begin, abandon and update."""
    worker, version = working.worker, working.version
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(working.collected, "train", 1, 2)
        worker.begin(prompts(1, 2, 3), LONG, "train")
        worker.begin(prompts(-1), replace(SAMPLING, max_tokens=3), "evaluation")
        working.collected("evaluation", -1)
        worker.abandon("train", [3])
        working.update(1, in_flight=True)
        batch = waiting.result(WAIT_S)
    assert_scored_by_their_weights(working, batch, version)


def test_groups_go_on_after_a_sleep_and_those_begun_meanwhile_wait(working):
    working.update()
    worker, version = working.worker, working.version
    worker.begin(prompts(1, 2), LONG, "train")
    worker.begin(prompts(-1), replace(SAMPLING, max_tokens=3), "evaluation")
    working.collected("evaluation", -1)
    worker.sleep(keep=True)
    started = time.monotonic()
    worker.begin(prompts(-2), SAMPLING, "evaluation")
    assert time.monotonic() - started < WAIT_S  # else it would wait for the wake
    assert len(worker.collect("evaluation", 0.2)) == 0
    worker.wake("weights")
    working.update(1)
    worker.wake("kv_cache")
    late = working.collected("evaluation", -2)
    assert set(late.jagged("weight_versions").values) == {version + 1}
    assert_scored_by_their_weights(working, working.collected("train", 1, 2), version)


def assert_scored_by_their_weights(working: Working, batch: Batch, version: int) -> None:
    """Check that log-probs of each token are of its version; some samples have two versions."""
    names = ("prompt_ids", "response_ids", "rollout_log_probs", "weight_versions")
    num_both = 0
    for row in range(len(batch)):
        prompt, response, rollout_log_probs, versions = (batch.jagged(name)[row] for name in names)
        by_model = [m.log_probs(prompt.tolist(), response.tolist()) for m in working.models]
        assert set(versions) <= {version, version + 1}
        expected = np.choose(versions - version, np.array(by_model))
        assert np.abs(rollout_log_probs - expected).max() < 1e-4
        num_both += len(set(versions)) == 2
    assert num_both >= 2


def test_a_wait_that_cannot_be_is_refused(working):
    with pytest.raises(ValueError, match="wait_s=120; allowed: 0 to less than 120"):
        working.worker.collect("train", 2 * WAIT_S)
