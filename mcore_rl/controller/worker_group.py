"""One worker per rank, called as one object: WorkerGroup -> Ray actor -> worker.

    group = WorkerGroup(ModelWorker, layout=layout, pool=pool, timeouts=config.timeouts)
    batch = group.compute_log_probs(batch, temperature=1.0)  # fans out, waits, gathers
    pending = group.update.submit(batch)                     # returns immediately
    metrics = pending.result()

A worker class is a plain class; methods marked with `register` become attributes of the group. A
worker reads its rank from RANK, WORLD_SIZE, LOCAL_RANK and RENDEZVOUS_*, which join_world of
parallel/store.py reads. The columns of a batch are views of shared memory in a worker, so they are
read-only there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.detached import GroupCard, actor_options, find_group
from mcore_rl.controller.dispatch import Registration, add_input_columns, get_registered_methods
from mcore_rl.controller.object_columns import NUM_PIECES, num_pieces
from mcore_rl.controller.pending_call import PendingCall, Timeout, gather_results
from mcore_rl.controller.pool import ResourcePool
from mcore_rl.controller.rank_actor import RankActor, Recipe, WorkerInfo
from mcore_rl.controller.sending import send, send_for_samples
from mcore_rl.parallel.mesh import Mesh


class Method:
    """A registered method of a group: call it, or `submit` it and continue."""

    def __init__(
        self, group: WorkerGroup, name: str, registration: Registration, pieces: int = NUM_PIECES
    ) -> None:
        self._group, self._name, self._registration = group, name, registration
        self._pieces = pieces  # that a call returns which makes samples

    def making(self, num_bytes: int) -> Method:
        """For a call that may return new samples of so many bytes, in objects of the usual size."""
        return Method(self._group, self._name, self._registration, num_pieces(num_bytes))

    def submit(self, *args: Any, **kwargs: Any) -> PendingCall:
        return self._group._submit(self._name, self._registration, args, kwargs, self._pieces)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pending = self.submit(*args, **kwargs)
        return pending.result() if self._registration.blocking else pending


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
        """Starts the ranks and builds every worker, in parallel; returns when all are built.

        Without `wait` it returns immediately. Methods may be submitted then, and are called on
        workers that have been built; `wait_until_built` has to come before the first result is
        asked for.

        `share` is the part that the group takes of each of its bundles, which are those of the
        pool from `first_bundle` on; a rank starts in the first of its `bundles_per_rank` and may
        use them all. `max_concurrency` above 1 runs calls on one rank in as many threads.
        `num_parts` says how many columns NAME/PART new samples of it may have. Raises
        ConfigError when the pool is too small or used up, and WorkerError (or ConfigError) when a
        worker cannot be built, or not within timeouts.start_s.

        In a detached pool the group is detached, and has the name of the pool.
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
            if wait:
                wait_until_built([self])
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, name: str, *, timeouts: TimeoutsConfig) -> Self:
        """The detached group of that name, whose driver has ended or let it go.

        One driver at a time may use a group. What an earlier one has called is finished first.

        Raises:
            ConfigError: there is none of that name.
            WorkerError: a rank is gone, or does not answer within timeouts.start_s. The group
                stays: `end_group` of controller/detached.py ends it.
        """
        found = find_group(name, Timeout(timeouts.start_s, "timeouts.start_s"))
        group = cls.__new__(cls)
        card = found.card
        group._set_up(name, card.worker_class, card.layout, timeouts, found.end)
        group._detached = True
        group._actors, group.worker_infos = found.actors, found.worker_infos
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
        self._start_limit = Timeout(timeouts.start_s, "timeouts.start_s")
        self._call_limit = Timeout(timeouts.call_s, "timeouts.call_s")
        self._give_back = give_back  # what the group has of its pool
        self._num_parts = 0
        self._worker_class, self._methods = worker_class, self._bind(worker_class)

    def __getattr__(self, name: str) -> Method:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        raise AttributeError(f"the group has no registered method {name!r}; it has {[*methods]}")

    def rebuild(self, name: str, layout: Layout, *init_args: Any) -> None:
        """New workers of the same class in the same processes, under another name and layout.

        A worker's `close` frees what it has; process groups stay. Returns immediately, as the
        constructor without `wait` does. Raises ConfigError when the layout has more or fewer ranks.
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

    @property
    def building(self) -> list[PendingCall]:
        """Of a group that was made without waiting: `wait_until_built` waits for these."""
        return [self._born, self._met, self._built]

    def close(self, reason: str = "") -> None:
        """Ends the workers immediately. May be called twice."""
        if self.end_reason:
            return
        self.end_reason = reason or "the group has been closed"
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._give_back()

    def detach(self) -> None:
        """Lets go of a detached group: its workers stay, this object takes no more calls."""
        if not self._detached:
            raise RuntimeError(f"{self.name} ends with this driver: its pool is not detached")
        self.end_reason = self.end_reason or "it has been let go"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """A detached group stays."""
        self.detach() if self._detached else self.close()

    def _bind(self, worker_class: type) -> dict[str, Method]:
        registered = get_registered_methods(worker_class)
        hidden = sorted(name for name in registered if name in {*dir(type(self)), *vars(self)})
        if hidden:
            raise TypeError(f"{worker_class.__name__}: a group has its own {hidden}; rename them")
        return {name: Method(self, name, mark) for name, mark in registered.items()}

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
        host = ray.remote(RankActor)
        card = bytes(GroupCard(self._worker_class, self._layout)) if self._detached else b""
        for rank in range(self.mesh.world_size):
            options = pool.actor_options(self._share) | {
                "scheduling_strategy": self._on(pool, rank),
                "runtime_env": {"env_vars": common | {"RANK": str(rank)} | env},
                "max_concurrency": max_concurrency,
            }
            if self._detached:
                options |= actor_options(self.name, rank)
            made = self.name, rank, pool.log_dir, card, self._call_limit.seconds
            self._actors.append(host.options(**options).remote(*made))

    def _on(self, pool: ResourcePool, rank: int) -> PlacementGroupSchedulingStrategy:
        """The first bundle of a rank, all of whose bundles have to be on one node."""
        first = self._first_bundle + rank * self._bundles_per_rank
        nodes = {pool.node(bundle) for bundle in range(first, first + self._bundles_per_rank)}
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

    def _build(self, recipe: Recipe) -> None:
        """Starts building the workers, whose rendezvous is on the node of rank 0; does not wait."""
        born = {actor.info.remote(): rank for rank, actor in enumerate(self._actors)}
        rendezvous = self._actors[0].open_rendezvous.remote()
        stored = ray.put(ray.cloudpickle.dumps(recipe))
        built = {
            actor.build.remote(rendezvous, stored): rank for rank, actor in enumerate(self._actors)
        }
        self._born = PendingCall(self, "__init__", born, dict, self._start_limit)
        self._met = PendingCall(self, "__init__", {rendezvous: 0}, dict, self._start_limit)
        self._built = PendingCall(self, "__init__", built, dict, self._start_limit)

    def _submit(
        self,
        method: str,
        registration: Registration,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pieces: int,
    ) -> PendingCall:
        if self.end_reason:
            raise RuntimeError(f"{self.name}.{method} was called, but {self.end_reason}")
        read = tuple(map(registration.select_columns, args))
        read_kwargs = {name: registration.select_columns(value) for name, value in kwargs.items()}
        parts = registration.scatter(self.mesh, read, read_kwargs)
        gather, of_columns = registration.dispatch_mode.gather, dict[int, list[Any]]()
        if registration.makes:
            made = self._actors, method, parts, pieces, self._num_parts
            sent, of_columns = send_for_samples(*made)
        else:
            sent = send(self._actors, method, parts)

        def finish(results: Mapping[int, Any]) -> Any:
            if registration.makes:
                made = {
                    r: None if one is None else one.at(of_columns[r]) for r, one in results.items()
                }
                return gather(parts, made)
            return add_input_columns(args, kwargs, gather(parts, results))

        limit = self._start_limit if registration.is_start else self._call_limit
        return PendingCall(self, method, sent, finish, limit)


def wait_until_built(groups: Sequence[WorkerGroup]) -> None:
    """Waits for groups that were made without waiting. The first rank that fails ends its group.

    Raises:
        ConfigError, WorkerError: as a group's constructor.
    """
    gather_results([call for group in groups for call in (group._born, group._met)])
    for group in groups:
        group.worker_infos = group._born.result()
    gather_results([group._built for group in groups])
