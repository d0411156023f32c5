"""Servers that die, join and leave: on a real Ray, with servers that count in place of a model."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from mcore_rl.config.errors import ConfigError, DiedError
from mcore_rl.config.schema import Layout, RolloutConfig, TimeoutsConfig, WeightSyncConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.pending_call import PendingCall, Timeout, WorkerError
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rewards.registry import RewardError
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.weight_updater import TransportSync
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import StreamError
from tests.nightly import nightly

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

SAMPLING, LIMIT = SamplingParams(n=2, max_tokens=3, seed=100), Timeout(60, "weight_sync.timeout_s")


class Server:
    """Answers a group with what its seed says, and with the version of its weights.

    What the prompts' column `does` names happens once, where `once` has no such file.
    """

    def __init__(self, number: int, once: Path) -> None:
        self.number, self.once, self.version = number, once, 0
        self.running: dict[str, dict[int, tuple[int, str]]] = {"train": {}, "evaluation": {}}
        self.connected: tuple[int, ...] = ()

    def happens(self, what: str) -> bool:
        """Return whether this is the first call for it."""
        try:
            (self.once / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @register(is_start=True)
    def prepare(self) -> None: ...

    @register(is_start=True)
    def start(self, reads_weights: bool) -> None:
        self.version = 0

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def begin(self, prompts: Batch, sampling: SamplingParams, stream: str) -> None:
        columns = prompts.array("group_ids").tolist(), prompts.array("does").tolist()
        for group, does in zip(*columns, strict=True):
            assert group not in self.running[stream]
            self.running[stream][group] = sampling.n, does

    @register()
    def collect(self, stream: str, wait_s: float, at_least: int = 1) -> Batch:
        """Return one group a call, those with something to do last."""
        running = self.running[stream]
        for group, (n, does) in sorted(running.items(), key=lambda item: (item[1][1], item[0])):
            if does == "hang":
                time.sleep(wait_s)
                break
            if does and self.happens(f"{does}-{group}"):
                self.act(does)
            del running[group]
            return Batch.collate([self.sample(group, i) for i in range(n)])
        return Batch.collate([])

    def act(self, does: str) -> None:
        if does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if does == "loses its engine":
            raise DiedError("vLLM's engine has died")
        if does == "raises":
            raise RewardError("reward 'mine' raised KeyError")

    def sample(self, group: int, number: int) -> Sample:
        ids = [group, 10 * group + number]
        sample = Sample([1], ids, [1, 1], [0.0, 0.0], [self.version] * 2, "stop", group)
        sample.trajectory, sample.reward = number, float(self.number)
        return sample

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def abandon(self, stream: str, group_ids: list[int]) -> None:
        for group in group_ids:
            self.running[stream].pop(group, None)

    @register()
    def list_parameters(self) -> list[object]:
        return []

    @register()
    def connect_weights(
        self, endpoint: RendezvousEndpoint, spec: TransferSpec, first_rank: int
    ) -> None:
        self.connected = spec.generation.dp, first_rank

    @register()
    def receive_weights(self, version: int, in_flight: bool, recompute_cache: bool) -> None:
        """Die of versions from 10 on; others then lack their peer."""
        self.version = -1
        if version >= 10 and self.happens(f"push {version}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if version >= 10 and self.happens(f"push {version} fails"):
            raise StreamError("a peer is gone")
        self.version = version

    @register()
    def sleep(self, keep: bool = False) -> None:
        self.version = -1

    @register()
    def idle_s(self) -> float:
        return 5.0

    @register()
    def get_pushes(self) -> tuple[int, ...]:
        return self.connected

    @register()
    def shut_down(self) -> None: ...


class Trainer:
    """Counts connections, and misses a peer at the first try of a version from 10 on."""

    def __init__(self) -> None:
        self.failed: set[int] = set()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def open_weights(
        self,
        layout: GenerationLayout,
        settings: WeightSyncConfig,
        weight_format: str,
        worker_lists: object,
    ) -> tuple[RendezvousEndpoint, TransferSpec]:
        self.rendezvous = RendezvousServer("127.0.0.1")
        return self.rendezvous.endpoint, TransferSpec(Layout(), 0, layout, "bfloat16", settings)

    @register()
    def connect_weights(self, endpoint: RendezvousEndpoint, spec: TransferSpec) -> None: ...

    @register()
    def send_weights(self, version: int) -> None:
        if version >= 10 and version not in self.failed:
            self.failed.add(version)
            raise StreamError("a generation rank went away")


@pytest.fixture(scope="module")
def bundles() -> Iterator[ResourcePool]:
    with (
        ray_session(num_cpus=1, object_store_bytes=100 << 20, log_to_driver=False),
        ResourcePool(4, {"CPU": 0.1}) as pool,
    ):
        yield pool


@contextlib.contextmanager
def started_servers(
    bundles: ResourcePool,
    once: Path,
    num_servers: int,
    first_bundle: int = 0,
    call_s: float = 60,
    **settings: object,
) -> Iterator[ServerPool]:
    timeouts = TimeoutsConfig(start_s=120, call_s=call_s)

    def start(number: int) -> WorkerGroup:
        return WorkerGroup(
            Server, layout=Layout(), pool=bundles, timeouts=timeouts, wait=False,
            init_args=(number, once), name=f"rollout-{number}", first_bundle=first_bundle + number,
        )  # fmt: skip

    pool = ServerPool(
        start, num_servers, timeouts=timeouts,
        **{"max_restarts": 1, "takes_turns": False} | settings,
    )  # fmt: skip
    try:
        wait_until_built(pool.groups)
        pool.mark_started()
        yield pool
    finally:
        pool.close()


@pytest.fixture
def pool_of(bundles: ResourcePool, tmp_path: Path) -> Iterator[Callable[..., ServerPool]]:
    """pool_of(num_servers, ...) has started."""
    with contextlib.ExitStack() as pools:
        yield lambda number, **settings: pools.enter_context(
            started_servers(bundles, tmp_path, number, **settings)
        )


@pytest.fixture(scope="module")
def steady_pool(bundles: ResourcePool, tmp_path_factory) -> Iterator[ServerPool]:
    """Start a server for all tests in which it does not end."""
    with started_servers(bundles, tmp_path_factory.mktemp("once"), 1, first_bundle=3) as pool:
        yield pool


def prompts(*groups: int, **does: int) -> Batch:
    """Build prompts; `does` names what the group of an id does."""
    texts = {group: name.replace("_", " ") for name, group in does.items()}
    return Batch(
        {
            "prompt_ids": Jagged.pack([[1] for _ in groups], np.int64),
            "group_ids": np.array(groups),
            "does": np.array([texts.get(group, "") for group in groups]),
        }
    )


def pushed(pool: ServerPool, version: int) -> None:
    pool.admit()

    def receive(group: WorkerGroup, _: int) -> PendingCall[list[None]]:
        return group.submit(Server.receive_weights, version, False, False)

    assert pool.attempt(receive, [], LIMIT)
    pool.mark_updated(version)


def all_of(pool: ServerPool, stream: str = "train") -> Batch:
    batches: list[Batch] = []
    while pool.num_outstanding(stream):
        batches += pool.collect(stream, 1.0)
    return Batch.concat(batches)


def wait_until_up(pool: ServerPool, num: int) -> None:
    deadline = time.monotonic() + 60
    while pool.num_up < num:
        assert time.monotonic() < deadline
        pool.admit()
        time.sleep(0.05)


def assert_whole(batch: Batch, *groups: int) -> None:
    """Check that each sample of the groups is there once, as an undisturbed server makes it."""
    ids = sorted(ids.tolist() for ids in batch.jagged("response_ids"))
    assert ids == sorted([group, 10 * group + i] for group in groups for i in range(2))


def versions(batch: Batch) -> set[int]:
    return set(batch.jagged("weight_versions").values.tolist())


def servers(batch: Batch) -> set[int]:
    return {int(number) for number in batch.array("rewards")}


@pytest.mark.parametrize("how", ["dies", nightly("loses_its_engine")])
def test_a_server_that_dies_loses_no_group_and_serves_again_with_the_weights_of_all(
    pool_of, capsys, how
):
    pool = pool_of(2)
    pushed(pool, 1)
    assert pool.idle_s() == [5, 5]
    pool.begin(prompts(*range(12), **{how: 5}), SAMPLING)
    first = all_of(pool)
    assert_whole(first, *range(12))
    assert versions(first) == {1} and servers(first) == {0, 1}
    assert "rollout-1.collect: rank 0" in (output := capsys.readouterr().out)
    assert "It is started again: 1, rollout.max_restarts=1\n" in output
    deadline = time.monotonic() + 60
    while any(server.starting for server in pool._servers.values()):  # it is up, and not the same
        assert time.monotonic() < deadline
        pool.begin(prompts(0, 1), SAMPLING)
        assert servers(all_of(pool)) == {0}
        time.sleep(0.05)
    pool.begin(prompts(20, 21), SAMPLING)  # that no server has in its cache
    batch = all_of(pool)
    assert servers(batch) == {0} and versions(batch) == {1}
    pushed(pool, 2)
    pool.begin(prompts(0, 1), SAMPLING)
    last = all_of(pool)
    assert servers(last) == {0, 1} and versions(last) == {2}
    assert pool.idle_s() == [0, 5]  # since it was asked, and since a start


def test_the_only_server_gets_its_weights_again_and_then_its_groups(pool_of):
    pool, calls = pool_of(1), []
    pushed(pool, 3)

    def resend() -> None:
        calls.append(pool.version)
        pushed(pool, pool.version)

    pool.resend = resend
    pool.begin(prompts(0, 1, 2, dies=1), SAMPLING)
    batch = all_of(pool)
    assert_whole(batch, 0, 1, 2)
    assert calls == [3] and versions(batch) == {3}


def test_without_anybody_to_send_them_again_the_run_ends_with_one_error(pool_of):
    pool = pool_of(1)
    pushed(pool, 3)
    pool.begin(prompts(0, dies=0), SAMPLING)
    with pytest.raises(WorkerError, match=r"^rollout: no server is left that has version 3 "):
        all_of(pool)


def test_a_server_that_has_died_too_often_ends_the_run(pool_of):
    pool = pool_of(2, max_restarts=0)
    pool.begin(prompts(0, 1, 2, 3, dies=1), SAMPLING)
    lost = r"(?s)^server 1 on host \S+ is lost: rollout-1\.collect: rank 0 .* died\..*restarts=0"
    with pytest.raises(WorkerError, match=lost):
        all_of(pool)


@pytest.mark.nightly  # tests/unit/rollout/test_worker.py has a reward that raises
def test_what_a_reward_raises_ends_the_run_and_starts_nothing(pool_of, capsys):
    pool = pool_of(2)
    pool.begin(prompts(0, 1, raises=1), SAMPLING)
    with pytest.raises(WorkerError, match=r"rank 0 raised RewardError: reward 'mine' raised Key"):
        all_of(pool)
    assert "started again" not in capsys.readouterr().out  # Ray may yet tell of an earlier death


def test_groups_that_never_end_are_an_error_that_names_the_ranks(pool_of):
    pool = pool_of(1, call_s=2)
    pool.begin(prompts(0, hang=0), SAMPLING)
    message = r"^no group has come back: rollout-0\.collect: rank 0 .* in 2 s \(timeouts\.call_s\)"
    with pytest.raises(WorkerError, match=message):
        all_of(pool)


def test_abandoned_groups_never_come_and_streams_are_apart(steady_pool):
    pool = steady_pool
    pool.begin(prompts(0, 1, 2, hang=1), SAMPLING)
    pool.begin(prompts(1), SAMPLING, "evaluation")
    with pytest.raises(ValueError, match=r"'train' among \[1\] would be generated twice"):
        pool.begin(prompts(1), SAMPLING)
    assert_whole(all_of(pool, "evaluation"), 1)
    assert pool.num_outstanding("train") == 3
    pool.abandon("train", [1])
    assert_whole(all_of(pool), 0, 2)
    pool.begin(prompts(1), SAMPLING)
    assert_whole(all_of(pool), 1)


def test_a_group_that_has_ended_and_is_abandoned_before_it_is_collected_does_not_come(
    steady_pool,
):
    pool = steady_pool
    pool.begin(prompts(0, 1), SAMPLING)
    assert pool.collect("train", 0) == []  # the server is asked
    time.sleep(1)
    pool.abandon("train", [0])
    assert_whole(all_of(pool), 1)


def test_servers_leave_and_join_while_groups_run(pool_of):
    pool = pool_of(2)
    pushed(pool, 1)
    pool.begin(prompts(*range(6), hang=1), SAMPLING)
    pool.abandon("train", [1])
    with pytest.raises(ConfigError, match=r"server 2 cannot be removed; allowed: \[0, 1\]"):
        pool.remove(2)
    pool.remove(1)
    batch = all_of(pool)
    assert_whole(batch, 0, 2, 3, 4, 5)
    assert servers(batch) == {0}
    for refused, allowed in ((0, r"\[1\]"), (2, r"\[1\]")):
        with pytest.raises(ConfigError, match=f"server {refused} cannot be added; .*{allowed}"):
            pool.add(refused)
    with pytest.raises(ConfigError, match=r"server 0 cannot be removed; .*one has to stay"):
        pool.remove(0)
    pool.add(1)
    wait_until_up(pool, 2)
    pushed(pool, 2)
    pool.begin(prompts(0, 1), SAMPLING)
    assert servers(all_of(pool)) == {0, 1}


def test_a_push_in_which_a_server_dies_is_done_again_by_those_left(pool_of, bundles, monkeypatch):
    monkeypatch.setattr("mcore_rl.controller.pending_call.GRACE_S", 30.0)  # Ray may be slow to tell
    pool = pool_of(2)
    with (
        ResourcePool(1, {"CPU": 0.1}) as actor_pool,
        WorkerGroup(Trainer, layout=Layout(), pool=actor_pool, timeouts=TimeoutsConfig()) as actor,
    ):
        sync = TransportSync(actor, pool, LIMIT, RolloutConfig(tp=4), WeightSyncConfig())
        sync.push(1)
        assert [group.call(Server.get_pushes) for group in pool.groups] == [[(2, 0)], [(2, 4)]]
        sync.push(10)
        (alive,) = [server for server in pool._servers.values() if server.is_up]
        assert alive.version == 10 and alive.group.call(Server.get_pushes) == [(1, 0)]
        pool.begin(prompts(0, 1), SAMPLING)
        assert versions(all_of(pool)) == {10}
        wait_until_up(pool, 2)
        sync.push(2)
        assert [group.call(Server.get_pushes) for group in pool.groups] == [[(2, 0)], [(2, 4)]]
        pool.begin(prompts(0, 1), SAMPLING)
        batch = all_of(pool)
        assert versions(batch) == {2} and servers(batch) == {0, 1}


@pytest.mark.nightly  # tests/unit/rollout/test_server_pool.py has starts on shared devices
def test_on_shared_devices_a_server_waits_with_its_start_for_its_turn(pool_of):
    pool = pool_of(2, takes_turns=True)
    pool.begin(prompts(0, 1, 2, 3, dies=1), SAMPLING)
    assert_whole(all_of(pool), 0, 1, 2, 3)
    pool.sleep()
    assert pool.has_joining
    pool.start_asleep()
    assert not pool.has_joining
    pushed(pool, 1)
    pool.begin(prompts(0, 1), SAMPLING)
    batch = all_of(pool)
    assert servers(batch) == {0, 1} and versions(batch) == {1}


def test_samples_come_in_the_order_of_the_prompts_however_they_end(pool_of):
    rollout = RolloutPool(pool_of(3), RolloutConfig(max_response_tokens=3), seed=0)
    batch = rollout.generate(prompts(5, -2, 9, 0, 7, dies=9), n=2)
    assert batch.array("group_ids").tolist() == [5, 5, -2, -2, 9, 9, 0, 0, 7, 7]
    assert batch.array("trajectories").tolist() == [0, 1] * 5
