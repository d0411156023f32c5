"""Groups that outlive their driver, and are found by name on their Ray cluster.

Their ranks are Ray actors of lifetime "detached", called NAME[RANK], in a pool that is detached,
too. They end when a driver closes the group, with `end_group`, or with the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    remove_placement_group,
)

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.controller.pending_call import Timeout, WorkerError
from mcore_rl.controller.pool import NAMESPACE
from mcore_rl.controller.rank_actor import Reply, WorkerInfo


@dataclass(frozen=True, slots=True)
class GroupCard:
    """What a later driver has to know of a group; pickled, each rank has it.

    It comes from an actor, as all that Ray pickles: whoever has the cluster's token is trusted.
    """

    worker_class: type
    layout: Layout

    def __bytes__(self) -> bytes:
        data: bytes = ray.cloudpickle.dumps((self.worker_class, self.layout))
        return data

    @classmethod
    def of(cls, data: bytes) -> GroupCard:
        return cls(*ray.cloudpickle.loads(data))


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A detached group of an earlier driver."""

    card: GroupCard
    pool: PlacementGroup
    actors: list[Any]  # handles by world rank
    worker_infos: dict[int, WorkerInfo]

    def end(self) -> None:
        """Gives the pool back; Ray ends what runs in it."""
        if ray.is_initialized():
            remove_placement_group(self.pool)


def actor_options(group: str, rank: int) -> dict[str, str]:
    """Ray's options for a rank of a detached group."""
    return {"name": _actor_name(group, rank), "namespace": NAMESPACE, "lifetime": "detached"}


def find_group(name: str, limit: Timeout) -> FoundGroup:
    """Looks for a detached group. What earlier drivers have called is finished first.

    Raises:
        ConfigError: there is none of that name.
        WorkerError: a rank is gone, or does not answer in time. The group stays as it is.
    """
    pool = _pool(name)
    [card] = _answers(name, _actors(name, [0]), "card", limit)
    found = GroupCard.of(card)
    actors = _actors(name, range(found.layout.world_size))
    infos = _answers(name, actors, "info", limit)
    return FoundGroup(found, pool, actors, dict(enumerate(infos)))


def group_names() -> list[str]:
    """Of the detached groups on this Ray cluster."""
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = (actor["name"] for actor in named if actor["namespace"] == NAMESPACE)
    return sorted({name.rpartition("[")[0] for name in ours})


def end_group(name: str) -> None:
    """Ends the ranks of a detached group, also those that do not answer, and frees its pool.

    Raises:
        ConfigError: there is none of that name.
    """
    remove_placement_group(_pool(name))


def _actor_name(group: str, rank: int) -> str:
    return f"{group}[{rank}]"


def _pool(name: str) -> PlacementGroup:
    try:
        return get_placement_group(name)
    except ValueError as error:
        found = ", ".join(repr(other) for other in group_names()) or "none"
        raise ConfigError(
            f"there is no detached group {name!r} on this Ray cluster; found: {found}"
        ) from error


def _actors(group: str, ranks: Iterable[int]) -> list[Any]:
    found = []
    for rank in ranks:
        try:
            found.append(ray.get_actor(_actor_name(group, rank), NAMESPACE))
        except ValueError as error:
            raise _lost(group, f"rank {rank} is gone") from error
    return found


def _answers(name: str, actors: Sequence[Any], method: str, limit: Timeout) -> list[Any]:
    """What a method of the actors gives, by rank."""
    calls = {getattr(actor, method).remote(): rank for rank, actor in enumerate(actors)}
    _, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit.seconds)
    if late:
        ranks = ", ".join(str(calls[reference]) for reference in late)
        why = "an earlier call has not ended there"
        raise _lost(name, f"rank {ranks} has not answered in {limit}: {why}")
    try:
        replies: list[Reply] = ray.get(list(calls))
    except RayError as error:
        raise _lost(name, f"a rank has died ({type(error).__name__})") from error
    return [reply.value for reply in replies]


def _lost(name: str, why: str) -> WorkerError:
    return WorkerError(
        f"the detached group {name!r} cannot be taken up: {why}. It is ended with "
        f"mcore_rl.controller.detached.end_group({name!r})"
    )
