"""One worker per rank, called as one object: WorkerGroup -> Ray actor -> worker.

    group = WorkerGroup(ModelWorker, layout=layout, pool=pool, timeouts=config.timeouts)
    batch = group.call(ModelWorker.compute_log_probs, batch, temperature=1.0)
    pending = group.submit(ModelWorker.update, batch)  # returns immediately
    metrics = pending.result()

A worker class is a plain class; a group calls the methods that are marked with `register`. A call
fans out, waits and gathers. A worker reads its rank from RANK, WORLD_SIZE, LOCAL_RANK and
RENDEZVOUS_*, which join_world of parallel/store.py reads. The columns of a batch are views of
shared memory in a worker, so they are read-only there.

A group in a detached pool outlives its driver, and later drivers find it by name. Its ranks are Ray
actors of lifetime "detached", called NAME[RANK]. They end when a driver closes the group, with
`end_detached_group`, or with the cluster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.python_objects import export_objects
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import (
    CallPart,
    Registration,
    RemoteMethod,
    add_input_columns,
    get_registered_methods,
)
from mcore_rl.controller.object_columns import count_objects
from mcore_rl.controller.pending_call import (
    RUNNING_GROUPS,
    PendingCall,
    Timeout,
    WorkerError,
    gather_results,
)
from mcore_rl.controller.ray_session import NAMESPACE
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_process import (
    MethodCall,
    Reply,
    StoredBatch,
    WorkerInfo,
    WorkerProcess,
    WorkerSpec,
)
from mcore_rl.data.batch import Samples
from mcore_rl.parallel.mesh import Mesh

SentCalls = dict[ray.ObjectRef, int]  # world rank of each reference to a reply


class WorkerGroup:
    """The workers of one layout. A rank that fails, or does not answer in time, ends the group."""

    def __init__(
        self,
        worker_class: type,
        *,
        layout: Layout,
        pool: ResourcePool,
        timeouts: TimeoutsConfig,
        init_args: Sequence[Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "",
        share: float = 1.0,
        bundles_per_rank: int = 1,
        first_bundle: int = 0,
        threads_per_rank: int = 1,
        max_concurrency: int = 1,
        wait: bool = True,
        num_parts: int = 0,
    ) -> None:
        """Start the ranks and build every worker, in parallel.

        In a detached pool the group is detached, and has the name of the pool.

        Args:
            share: The share of each of its bundles that the group takes.
            bundles_per_rank: A rank starts in the first of so many bundles, and may use them all.
            first_bundle: The group takes the bundles of the pool from this one on.
            max_concurrency: Calls that run on one rank at a time, each in a thread.
            wait: Return when all workers are built. Otherwise methods may be submitted at once, and
                `wait_until_built` has to be called before the first result is read.
            num_parts: Most columns NAME/PART of new samples.

        Raises:
            ConfigError: the pool is too small or used up, or a worker cannot be built.
            WorkerError: a worker cannot be built, or not within timeouts.start_s.
        """
        if pool.detached and (name or pool.detached, share) != (pool.detached, 1.0):
            raise ConfigError(
                f"a group {name!r} asks for a share of {share:g} of the detached pool "
                f"{pool.detached!r}; such a pool has one group of its own name, with a share of 1"
            )
        needed = layout.world_size * bundles_per_rank
        bundles = range(first_bundle, first_bundle + needed)
        release = functools.partial(pool.release, share, bundles)
        give_back = pool.close if pool.detached else release
        self._set_up(pool.detached or name, worker_class, layout, timeouts, give_back)
        self._num_parts = num_parts
        self._detached, self._share = bool(pool.detached), share
        if pool.num_ranks < bundles.stop:
            start = f" from bundle {first_bundle} on" if first_bundle else ""
            raise ConfigError(
                f"{self.name}: the layout {layout} needs {needed} bundles{start}; its pool has "
                f"{pool.num_ranks}"
            )
        self._first_bundle, self._bundles_per_rank = first_bundle, bundles_per_rank
        pool.reserve(share, bundles, self.name)
        try:
            self._start(pool, threads_per_rank, dict(env or {}), max_concurrency)
            self._build((worker_class, tuple(init_args), dict(init_kwargs or {})))
            RUNNING_GROUPS.add(self)
            if wait:
                wait_until_built([self])
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, name: str, *, timeouts: TimeoutsConfig) -> Self:
        """Return the detached group of that name, whose driver has ended or let it go.

        One driver at a time may use a group. Calls of an earlier one are finished first.

        Raises:
            ConfigError: there is none of that name.
            WorkerError: a rank is gone, or does not answer within timeouts.start_s. The group
                stays: `end_detached_group` ends it.
        """
        timeout = Timeout(timeouts.start_s, "timeouts.start_s")
        pool = _get_detached_pool(name)
        rank_zero = _get_detached_actors(name, [0])
        [spec] = _call_detached(name, rank_zero, "get_group_spec", timeout)
        worker_class, layout = ray.cloudpickle.loads(spec)
        actors = _get_detached_actors(name, range(layout.world_size))
        infos = _call_detached(name, actors, "get_info", timeout)

        def give_back() -> None:
            if ray.is_initialized():  # else the driver has shut Ray down first
                remove_placement_group(pool)

        group = cls.__new__(cls)
        group._set_up(name, worker_class, layout, timeouts, give_back)
        group._detached = True
        group._actors, group.worker_infos = actors, dict(enumerate(infos))
        RUNNING_GROUPS.add(group)
        return group

    def _set_up(
        self,
        name: str,
        worker_class: type,
        layout: Layout,
        timeouts: TimeoutsConfig,
        give_back: Callable[[], None],
    ) -> None:
        self.name = name or worker_class.__name__
        self._layout, self.mesh = layout, Mesh(layout)
        self.worker_infos: dict[int, WorkerInfo] = {}
        self.end_reason = ""
        self._actors: list[Any] = []
        self._start_timeout = Timeout(timeouts.start_s, "timeouts.start_s")
        self._call_timeout = Timeout(timeouts.call_s, "timeouts.call_s")
        self._detached = False
        self._give_back = give_back  # releases what the group has of its pool
        self._num_parts = 0
        self._worker_class, self._registered = worker_class, get_registered_methods(worker_class)

    def call[**P, T](self, method: RemoteMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the workers on the ranks; wait for the result.

        Raises:
            ConfigError, WorkerError: as `PendingCall.result`.
        """
        return self.submit(method, *args, **kwargs).result()

    def submit[**P, T](
        self, method: RemoteMethod[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[T]:
        """Call a method of the workers without waiting.

        Raises:
            TypeError: the worker class has no registered method of that name.
        """
        if method.name not in self._registered:
            name = self._worker_class.__name__
            raise TypeError(f"{name} has no registered method {method.name!r}")
        # A class that overrides the method may have another registration for it.
        registration = self._registered[method.name]
        return self._submit(method.name, registration, args, kwargs, method.result_bytes)

    def rebuild(self, name: str, layout: Layout, *init_args: Any) -> None:
        """Build new workers of the same class in the same processes, without waiting for them.

        A worker's `close` frees what it has; process groups stay.

        Raises:
            ConfigError: the layout has more or fewer ranks.
        """
        if self.end_reason or self._detached:
            why = self.end_reason or "a detached group keeps its name and layout"
            raise RuntimeError(f"{self.name} cannot be rebuilt: {why}")
        if len(self._actors) != layout.world_size:
            raise ConfigError(
                f"{name}: the layout {layout} has {layout.world_size} ranks; {self.name} has "
                f"{len(self._actors)}"
            )
        self.name, self.mesh = name, Mesh(layout)
        for actor in self._actors:
            actor.rename.remote(name)
        self._build((self._worker_class, init_args, {}))

    def ping(self) -> dict[ray.ObjectRef, int]:
        """Call each rank; return its world rank by Ray's reference to the reply."""
        return {actor.get_info.remote(): rank for rank, actor in enumerate(self._actors)}

    @property
    def build_calls(self) -> list[PendingCall[Any]]:
        """The calls that `wait_until_built` waits for."""
        return [self._info_call, self._rendezvous_call, self._build_call]

    def close(self, reason: str = "") -> None:
        """End the workers immediately. May be called twice."""
        if self.end_reason:
            return
        self.end_reason = reason or "the group has been closed"
        self._kill_actors()
        self._give_back()

    def _kill_actors(self) -> None:
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)

    def detach(self) -> None:
        """Let go of a detached group: its workers stay, this object takes no more calls."""
        if not self._detached:
            raise RuntimeError(f"{self.name} ends with this driver: its pool is not detached")
        self.end_reason = self.end_reason or "it has been let go"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach() if self._detached else self.close()

    def _start(
        self, pool: ResourcePool, threads: int, env: dict[str, str], max_concurrency: int
    ) -> None:
        common = {
            "WORLD_SIZE": str(self.mesh.world_size),
            "LOCAL_RANK": "0",  # Ray shows a rank its own device only
            "OMP_NUM_THREADS": str(threads),
            # Threads of a rank that wait for each other do not spin: where anything else runs on
            # the cores, spinning takes several times what is computed.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        actor_class = ray.remote(WorkerProcess)
        spec = (self._worker_class, self._layout) if self._detached else None
        pickled_spec = b"" if spec is None else ray.cloudpickle.dumps(spec)
        for rank in range(self.mesh.world_size):
            options = pool.get_actor_options(self._share) | {
                "scheduling_strategy": self._get_scheduling(pool, rank),
                "runtime_env": {"env_vars": common | {"RANK": str(rank)} | env},
                "max_concurrency": max_concurrency,
            }
            if self._detached:
                actor_name = _get_actor_name(self.name, rank)
                options |= {"name": actor_name, "namespace": NAMESPACE, "lifetime": "detached"}
            args = self.name, rank, pool.log_dir, pickled_spec, self._call_timeout.seconds
            self._actors.append(actor_class.options(**options).remote(*args))

    def _get_scheduling(self, pool: ResourcePool, rank: int) -> PlacementGroupSchedulingStrategy:
        """Schedule a rank on its first bundle; all its bundles have to be on one node."""
        first = self._first_bundle + rank * self._bundles_per_rank
        nodes = {pool.get_node(bundle) for bundle in range(first, first + self._bundles_per_rank)}
        if len(nodes) > 1:
            raise ConfigError(
                f"{self.name}: rank {rank} needs {self._bundles_per_rank} devices of one node; "
                f"the pool has them on {', '.join(sorted(nodes))}. Allowed: nodes with a multiple "
                "of that, and rollout.nodes_per_server for a server that spans several"
            )
        index = pool.bundles[first]
        return PlacementGroupSchedulingStrategy(
            pool.placement_group, placement_group_bundle_index=index
        )

    def _build(self, spec: WorkerSpec) -> None:
        """Start to build the workers, whose rendezvous is on the node of rank 0."""
        # Before `build`, whose errors name host and stderr of a rank.
        infos = {actor.get_info.remote(): rank for rank, actor in enumerate(self._actors)}
        # Its reply is an argument of `build`, which Ray resolves: the driver does not wait for it.
        rendezvous = self._actors[0].open_rendezvous.remote()
        # Once for all ranks, and pickled here: `build` unpickles it where its errors are caught.
        stored, objects = ray.put(ray.cloudpickle.dumps(spec)), ray.put(export_objects())
        built = {
            actor.build.remote(rendezvous, stored, objects): rank
            for rank, actor in enumerate(self._actors)
        }
        self._info_call, self._rendezvous_call, self._build_call = (
            PendingCall(self, "__init__", calls, dict, self._start_timeout)
            for calls in (infos, {rendezvous: 0}, built)
        )

    def _submit(
        self,
        method: str,
        registration: Registration,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result_bytes: int,
    ) -> PendingCall[Any]:
        if self.end_reason:
            raise RuntimeError(f"{self.name}.{method} was called, but {self.end_reason}")
        read = tuple(map(registration.select_columns, args))
        read_kwargs = {name: registration.select_columns(value) for name, value in kwargs.items()}
        parts = registration.scatter(self.mesh, read, read_kwargs)
        gather, objects = registration.dispatch_mode.gather, dict[int, list[Any]]()
        if registration.makes:
            sizes = count_objects(result_bytes), self._num_parts
            sent, objects = send_for_samples(self._actors, method, parts, *sizes)
        else:
            sent = send_parts(self._actors, method, parts)

        def finish(results: Mapping[int, Any]) -> Any:
            if registration.makes:
                batches = {
                    rank: None if batch is None else batch.with_references(objects[rank])
                    for rank, batch in results.items()
                }
                return gather(parts, batches)
            return add_input_columns(args, kwargs, gather(parts, results))

        timeout = self._start_timeout if registration.is_start else self._call_timeout
        return PendingCall(self, method, sent, finish, timeout)


def wait_until_built(groups: Sequence[WorkerGroup]) -> None:
    """Wait for groups that were created with wait=False. The first rank that fails ends its group.

    Raises:
        ConfigError, WorkerError: as a group's constructor.
    """
    gather_results(
        [call for group in groups for call in (group._info_call, group._rendezvous_call)]
    )
    for group in groups:
        group.worker_infos = group._info_call.result()
    gather_results([group._build_call for group in groups])


def send_parts(actors: Sequence[Any], method: str, parts: Sequence[CallPart]) -> SentCalls:
    """Call `WorkerProcess.call` of the ranks of each part.

    `actors` are handles by world rank. A batch that several ranks get is stored once.
    """
    return {
        actors[rank].call.remote(call, *stored): rank
        for part in parts
        for rank, call, stored in _iterate_calls(method, part)
    }


def send_for_samples(
    actors: Sequence[Any],
    method: str,
    parts: Sequence[CallPart],
    num_objects: int,
    num_parts: int,
) -> tuple[SentCalls, dict[int, list[Any]]]:
    """Call `WorkerProcess.call_for_samples`; return also the references to objects, by rank."""
    sent, objects, num_results = {}, {}, num_objects * (1 + num_parts)
    for part in parts:
        for rank, call, stored in _iterate_calls(method, part):
            remote_method = actors[rank].call_for_samples.options(num_returns=1 + num_results)
            reply, *objects[rank] = remote_method.remote(call, num_objects, num_parts, *stored)
            sent[reply] = rank
    return sent, objects


def _iterate_calls(method: str, part: CallPart) -> Iterator[tuple[int, MethodCall, list[Any]]]:
    """Yield rank, call and stored batches of each rank of a part."""
    stored: list[Any] = []

    def store(value: Any) -> Any:
        value = value.drop_lengths() if isinstance(value, RemoteBatch) else value
        if len(part.ranks) == 1 or not isinstance(value, Samples):
            return value
        stored.append(ray.put(value))
        return StoredBatch(len(stored) - 1)

    args = [store(value) for value in part.args]
    kwargs = {name: store(value) for name, value in part.kwargs.items()}
    for rank in part.ranks:
        yield rank, (method, part.output_rank in (None, rank), args, kwargs), stored


def list_detached_groups() -> list[str]:
    """Return the names of the detached groups on this Ray cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = (actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return sorted({name.rpartition("[")[0] for name in names})


def end_detached_group(name: str) -> None:
    """End the ranks of a detached group, also those that do not answer, and free its pool.

    Raises:
        ConfigError: there is none of that name.
    """
    remove_placement_group(_get_detached_pool(name))  # Ray kills the actors in its bundles


def _get_actor_name(group: str, rank: int) -> str:
    return f"{group}[{rank}]"


def _get_detached_pool(name: str) -> PlacementGroup:
    try:
        return get_placement_group(name)
    except ValueError as error:
        names = ", ".join(map(repr, list_detached_groups())) or "none"
        raise ConfigError(
            f"there is no detached group {name!r} on this Ray cluster; found: {names}"
        ) from error


def _get_detached_actors(group: str, ranks: Iterable[int]) -> list[Any]:
    actors = []
    for rank in ranks:
        try:
            actors.append(ray.get_actor(_get_actor_name(group, rank), NAMESPACE))
        except ValueError as error:
            raise _create_attach_error(group, f"rank {rank} is gone") from error
    return actors


def _call_detached(name: str, actors: Sequence[Any], method: str, timeout: Timeout) -> list[Any]:
    """Return the values of a method of the actors, by rank."""
    calls = {getattr(actor, method).remote().future(): r for r, actor in enumerate(actors)}
    late = wait(calls, timeout=timeout.seconds).not_done
    if late:
        ranks = ", ".join(sorted(str(calls[call]) for call in late))
        why = "an earlier call has not ended there"
        raise _create_attach_error(name, f"rank {ranks} has not answered in {timeout}: {why}")
    try:
        replies: list[Reply] = [call.result() for call in calls]
    except RayError as error:
        why = f"a rank has died ({type(error).__name__})"
        raise _create_attach_error(name, why) from error
    return [reply.value for reply in replies]


def _create_attach_error(name: str, why: str) -> WorkerError:
    return WorkerError(
        f"the detached group {name!r} cannot be taken up: {why}. It is ended with "
        f"mcore_rl.controller.worker_group.end_detached_group({name!r})"
    )
