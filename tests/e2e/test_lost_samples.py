"""Samples that die with the node of their server: real servers and objects on two nodes of Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import (
    AlgorithmConfig,
    Layout,
    ReplayConfig,
    RLConfig,
    TimeoutsConfig,
    TrainerConfig,
)
from mcore_rl.controller.batch_ops import find_lost_groups
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.object_columns import LostColumnsError, fetch_columns, find_lost_rows
from mcore_rl.controller.ray_patches import skip_node_services
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rollout.buffer import GroupState
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.trainers.async_rollout import AsyncRollout, RolloutPrefetcher
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.step_samples import StepSampler

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

PER_STEP, GROUP_SIZE, NUM_STEPS = 4, 2, 3
TIMEOUTS = TimeoutsConfig(start_s=900, call_s=60)  # a server is started where no node is
HEALTH = {  # a node that is gone is known to be so after some seconds
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 20,
}


class Server:
    """Answers with tokens that say the group and the seed; the reward is the server's number."""

    def __init__(self, number: int) -> None:
        self.number, self.begun = number, list[tuple[int, SamplingParams]]()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def begin(self, prompts: Batch, sampling: SamplingParams, stream: str) -> None:
        self.begun += [(group, sampling) for group in prompts.array("group_ids").tolist()]

    @register(makes=True)
    def collect(self, stream: str, wait_s: float, at_least: int) -> Batch:
        begun, self.begun = self.begun, []
        return Batch.collate([self.sample(*entry, i) for entry in begun for i in range(entry[1].n)])

    def sample(self, group: int, sampling: SamplingParams, number: int) -> Sample:
        ids = tokens_of(group, number)
        sample = Sample([1], ids, [1] * 2, [0.0] * 2, [0] * 2, "stop", group)
        sample.trajectory, sample.reward = number, float(self.number)
        return sample

    @register(is_start=True)
    def prepare(self) -> None: ...

    @register(is_start=True)
    def start(self, reads_weights: bool) -> None: ...

    @register()
    def shut_down(self) -> None: ...


def tokens_of(group: int, number: int) -> list[int]:
    return [group, 10 * group + number]


class LosesFirst:
    """A pool of servers that answers first with what has been lost meanwhile."""

    def __init__(self, pool: ServerPool, lost: RemoteBatch) -> None:
        self._pool, self._lost, self.calls = pool, [lost], list[list[int]]()

    def begin(self, prompts: Batch, sampling: SamplingParams, stream: str) -> None:
        self.calls.append(prompts.array("group_ids").tolist())
        if not self._lost:
            self._pool.begin(prompts, sampling, stream)

    def num_outstanding(self, stream: str) -> int:
        return len(self._lost) or self._pool.num_outstanding(stream)

    def collect(self, stream: str, wait_s: float, at_least: int) -> list[Any]:
        return [self._lost.pop()] if self._lost else self._pool.collect(stream, wait_s, at_least)


class LosesLate:
    """A pool whose first answers are lost once others come."""

    def __init__(self, pool: RolloutPool, lost: RemoteBatch) -> None:
        self._pool, self._lost = pool, [lost]

    def generate(self, prompts: Batch, n: int) -> Batch:
        if not self._lost:
            return self._pool.generate(prompts, n)
        ids = np.repeat(prompts.array("group_ids"), n)
        return self._lost.pop().with_columns(group_ids=ids)  # type: ignore[return-value]


@dataclass
class Scene:
    """Samples on two nodes, of which the second has died."""

    asynchronous: AsyncRollout  # with all groups of three steps
    prefetcher: RolloutPrefetcher  # with those of step 1
    replay: ReplayBuffer  # with eight groups
    made: RemoteBatch  # groups 100 to 107
    on_second: list[int]  # of them
    rollout: RolloutPool


def settings() -> RLConfig:
    config = RLConfig(output_dir="out")
    config.trainer = TrainerConfig(
        mode="fully_async", staleness=NUM_STEPS - 1, num_steps=NUM_STEPS, prompts_per_step=PER_STEP
    )
    config.algorithm = AlgorithmConfig(group_size=GROUP_SIZE)
    config.placement.rollout = "own"
    config.model.path = config.data.train_file = config.data.test_file = "given"
    validate_rl(config)
    return resolve_for_device_type(config, "cpu")


def prompt_batches() -> PromptBatches:
    return PromptBatches(PromptDataset([PromptRow([row], {}) for row in range(30)]), PER_STEP, 0)


@pytest.fixture(scope="module")
def second_node() -> Iterator[Any]:
    """Beside the one that this process is on, in a session that it has joined."""
    head = {"num_cpus": 1, "resources": {"first": 1}, "include_dashboard": False}
    with skip_node_services(), pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(True, head_node_args=head | {"_system_config": {**HEALTH}})
        try:
            node = cluster.add_node(num_cpus=1, resources={"second": 1})
            patch.setenv("RAY_ADDRESS", cluster.address)
            with ray_session(log_to_driver=False):
                cluster.wait_for_nodes()
                yield node
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def servers(second_node: Any) -> Iterator[ServerPool]:
    """Start one server on each node."""
    with ResourcePool(1, {"first": 1}) as first, ResourcePool(1, {"second": 1}) as second:

        def start(number: int) -> WorkerGroup:
            return WorkerGroup(
                Server, layout=Layout(), pool=(first, second)[number], timeouts=TIMEOUTS,
                wait=False, init_args=(number,), name=f"rollout-{number}",
            )  # fmt: skip

        pool = ServerPool(start, 2, timeouts=TIMEOUTS, max_restarts=1, takes_turns=False)
        wait_until_built(pool.groups)
        pool.mark_started()
        yield pool
        pool.close()


@pytest.fixture(scope="module")
def scene(second_node: Any, servers: ServerPool) -> Iterator[Scene]:
    config = settings()
    rollout = RolloutPool(servers, config.rollout, seed=0)
    replay_config = ReplayConfig(share=1.0, max_age=9, priority="uniform")
    replay, unused = (
        ReplayBuffer(policy, 0, call_s=60) for policy in (replay_config, ReplayConfig())
    )
    asynchronous = AsyncRollout(StepSampler(config, rollout, prompt_batches(), unused))
    asynchronous.fill()
    while asynchronous.queue.num_groups(GroupState.GENERATING):
        asynchronous._take_in(asynchronous._rollout.collect(1.0, 1))
    with ThreadPoolExecutor(1) as thread:
        sampler = StepSampler(config, rollout, prompt_batches(), unused)
        prefetcher = RolloutPrefetcher(sampler, thread)
        prefetcher.begin(2, version=0)
        prefetcher.wait()
        made = rollout.generate(prompts(*range(100, 108)), n=GROUP_SIZE)
        assert isinstance(made, RemoteBatch)
        replay.add(made, 0)
        on_second = groups_of(made, made.array("rewards") == 1)
        assert PER_STEP <= len(on_second) < 8 and find_lost_groups([made]) == []
        raylet = second_node.all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait()
        assert find_lost_groups([made]) == on_second  # also before Ray itself knows
        yield Scene(asynchronous, prefetcher, replay, made, on_second, rollout)


def prompts(*groups: int) -> Batch:
    batch = prompt_batches().take(len(groups))
    return batch.with_columns(group_ids=np.array(groups))


def groups_of(batch: Any, chosen: Any) -> list[int]:
    return sorted({*batch.array("group_ids")[chosen].tolist()})


def assert_whole(batch: Any, groups: Any) -> None:
    """Check that each sample of the groups is there once, with its own tokens."""
    ids = sorted(ids.tolist() for ids in fetch_columns(batch).jagged("response_ids"))
    assert ids == sorted(tokens_of(group, i) for group in groups for i in range(GROUP_SIZE))


def test_what_was_on_the_node_is_lost_and_what_others_have_is_not(scene: Scene):
    """Also once Ray has put an error in its place, which is an object, too."""
    for _ in range(2):
        (is_lost,) = find_lost_rows([scene.made])
        assert groups_of(scene.made, is_lost) == scene.on_second
        assert groups_of(scene.made, ~is_lost) == sorted({*range(100, 108)} - {*scene.on_second})
        with pytest.raises(LostColumnsError):
            fetch_columns(scene.made, 30)
    left = scene.made.take(np.flatnonzero(~is_lost).tolist())
    assert_whole(left, groups_of(left, slice(None)))


def test_an_asynchronous_run_begins_lost_groups_again_and_trains_each_prompt_once(scene, capsys):
    run, trained = scene.asynchronous, list[int]()
    for step in range(1, NUM_STEPS + 1):
        batch, metrics = run.take(step)
        groups = groups_of(batch, slice(None))
        assert len(groups) == PER_STEP
        assert_whole(batch, groups)
        trained += groups
        run.begin_version(step)
    assert sorted(trained) == list(range(NUM_STEPS * PER_STEP))
    assert 0 < metrics["queue/lost_total"] < NUM_STEPS * PER_STEP
    message = f"{metrics['queue/lost_total']:g} groups of samples died with their node: they are"
    assert message in capsys.readouterr().out


def test_samples_that_were_made_ahead_are_made_again_with_the_same_prompts(scene: Scene):
    saved = Batch.load_arrays(scene.prefetcher.state_dict()["samples"])  # of a checkpoint
    assert groups_of(saved, slice(None)) == list(range(PER_STEP))
    batch, _ = scene.prefetcher.take(2, version=1)
    assert_whole(batch, range(PER_STEP))


def test_lost_groups_leave_the_replay_buffer(scene: Scene):
    left = {*range(100, 108)} - {*scene.on_second}
    drawn = scene.replay.draw(8, 1)
    assert drawn is not None
    assert_whole(drawn, left)
    saved = Batch.load_arrays(scene.replay.state_dict()["samples"])
    assert groups_of(saved, slice(None)) == sorted(left)


def test_groups_that_are_lost_while_others_are_generated_are_generated_again(scene: Scene):
    servers = LosesFirst(scene.rollout.servers, scene.made)
    rollout = RolloutPool(servers, scene.rollout.config, seed=0)  # type: ignore[arg-type]
    batch = rollout.generate(prompts(*range(107, 99, -1)), n=GROUP_SIZE)
    assert servers.calls == [list(range(107, 99, -1)), scene.on_second[::-1]]
    assert_whole(batch, range(100, 108))
    assert batch.array("group_ids").tolist() == [g for g in range(107, 99, -1) for _ in range(2)]


def test_a_round_of_a_step_that_is_lost_meanwhile_is_generated_again(scene: Scene):
    ids = scene.made.array("group_ids")
    lost = scene.made.take(np.flatnonzero(np.isin(ids, scene.on_second[:PER_STEP])).tolist())
    rollout: Any = LosesLate(scene.rollout, lost)
    replay = ReplayBuffer(ReplayConfig(), 0, 60)
    batch, metrics = StepSampler(settings(), rollout, prompt_batches(), replay).collect(1)
    assert_whole(batch, range(PER_STEP))
    assert metrics["reward"] == 0  # of the server that is left: metrics are of what came again
