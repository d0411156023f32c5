"""The parts of a call as Ray calls: one a rank, and one more for each batch that several get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from mcore_rl.controller.call_parts import AnyBatch, CallPart
from mcore_rl.controller.rank_actor import StoredBatch
from mcore_rl.controller.remote_batch import RemoteBatch


def send(actors: Sequence[Any], method: str, parts: Sequence[CallPart]) -> dict[Any, int]:
    """Calls `RankActor.call` of the ranks of each part; references to their replies, by rank.

    `actors` are handles by world rank. A batch that several ranks get is stored once.
    """
    return {
        reference: rank for part in parts for reference, rank in _send_part(actors, method, part)
    }


def _send_part(actors: Sequence[Any], method: str, part: CallPart) -> list[tuple[Any, int]]:
    stored: list[Any] = []

    def store(value: Any) -> Any:
        if not isinstance(value, AnyBatch):
            return value
        value = value.to_read() if isinstance(value, RemoteBatch) else value
        stored.append(ray.put(value) if len(part.ranks) > 1 else value)
        return StoredBatch(len(stored) - 1)

    args = [store(value) for value in part.args]
    kwargs = {name: store(value) for name, value in part.kwargs.items()}
    counts = {rank: part.output_rank in (None, rank) for rank in part.ranks}
    return [
        (actors[rank].call.remote(method, is_output, args, kwargs, *stored), rank)
        for rank, is_output in counts.items()
    ]
