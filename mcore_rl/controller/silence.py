"""Ranks that have not answered in time: a look at their processes, on their nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.controller.rank_actor import WorkerInfo
from mcore_rl.observability.stacks import (
    STUCK_STATES,
    ProcessState,
    format_stacks,
    inspect_process,
    summarize_states,
)

_LOOK_S = 60.0  # how long the looks may take, on all nodes together
_MOST_NAMED = 4  # ranks whose state is in the first line


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank that has not answered a call."""

    call: str  # "actor.update"
    rank: int
    info: WorkerInfo | None  # None when its process has not come up

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" ({self.info})" if self.info else "")


def report(silent: Sequence[Silent], limit: str) -> str:
    """One line on the ranks that have not answered in time and what they do; then their stacks.

    The first is the rank that is likeliest to hold up the others: it is gone, or stopped, or runs
    while they wait. `limit` is how long was waited, and the setting that says so.
    """
    looks = _looks([rank.info for rank in silent if rank.info is not None])

    def urgency(rank: Silent) -> int:
        look = looks.get(rank.info) if rank.info else None
        return min(process.urgency for process in look) if look else -1

    first, *others = sorted(silent, key=urgency)
    line = f"{first.call}: {first} has not answered in {limit}: {_doing(first, looks)}"
    named = [
        f"{'' if rank.call == first.call else f'{rank.call} '}{rank}: {_doing(rank, looks)}"
        for rank in others[: _MOST_NAMED - 1]
    ]
    if others[_MOST_NAMED - 1 :]:
        named.append(f"ranks {', '.join(str(rank.rank) for rank in others[_MOST_NAMED - 1 :])}")
    if named:
        line += f". Nor has {'; nor has '.join(named)}"
    stacks = [
        f"{rank.call}, {rank}:\n{format_stacks(looks[rank.info])}"
        for rank in (first, *others)
        if rank.info in looks
    ]
    return "\n\n".join([line, *stacks])


def find_stopped(silent: Sequence[Silent]) -> list[Silent]:
    """Return the ranks whose process, or one that it has started, is stopped by a signal or gone.

    What the others wait for is no riddle then.
    """
    looks = _looks([rank.info for rank in silent if rank.info is not None])
    states = {info: {look.state for look in found} for info, found in looks.items()}
    return [rank for rank in silent if rank.info and states.get(rank.info, set()) & STUCK_STATES]


def _doing(rank: Silent, looks: dict[WorkerInfo, list[ProcessState]]) -> str:
    if rank.info is None:
        return "its process has not come up"
    look = looks.get(rank.info)
    return summarize_states(look) if look else f"no look at it in {_LOOK_S:g} s"


def _looks(worker_infos: Iterable[WorkerInfo]) -> dict[WorkerInfo, list[ProcessState]]:
    """By a task on each node; without those of a node that does not answer in time."""
    by_node: dict[str, list[WorkerInfo]] = defaultdict(list)
    for info in worker_infos:
        by_node[info.node_id].append(info)
    if not by_node:  # Ray would start for the wait
        return {}
    tasks = {
        _look_at_all.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote([info.pid for info in born]): born
        for node, born in by_node.items()
    }
    found: dict[WorkerInfo, list[ProcessState]] = {}
    done, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=_LOOK_S)
    for task in done:
        try:
            found |= zip(tasks[task], ray.get(task), strict=True)
        except RayError:  # the node is gone
            continue
    for task in late:
        ray.cancel(task, force=True)
    return found


@ray.remote(num_cpus=0, max_retries=0)
def _look_at_all(pids: list[int]) -> list[list[ProcessState]]:
    return [inspect_process(pid) for pid in pids]
