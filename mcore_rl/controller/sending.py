"""The parts of a call as Ray calls: one a rank, and one more for each batch that several get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from mcore_rl.controller.call_parts import CallPart
from mcore_rl.controller.rank_actor import StoredBatch
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.data.batch import Samples

Sent = dict[Any, int]  # references to replies, with the world ranks that they are of


def send(actors: Sequence[Any], method: str, parts: Sequence[CallPart]) -> Sent:
    """Calls `RankActor.call` of the ranks of each part.

    `actors` are handles by world rank. A batch that several ranks get is stored once.
    """
    return {
        actors[rank].call.remote(method, *given): rank
        for part in parts
        for rank, given in _arguments(part).items()
    }


def send_for_samples(
    actors: Sequence[Any],
    method: str,
    parts: Sequence[CallPart],
    num_pieces: int,
    num_parts: int,
) -> tuple[Sent, dict[int, list[Any]]]:
    """The same with `RankActor.make`; with the references to what each rank's batch is made of."""
    sent, of_columns, num_objects = {}, {}, num_pieces * (1 + num_parts)
    for part in parts:
        for rank, given in _arguments(part).items():
            make = actors[rank].make.options(num_returns=1 + num_objects)
            reply, *of_columns[rank] = make.remote(method, num_pieces, num_parts, *given)
            sent[reply] = rank
    return sent, of_columns


def _arguments(part: CallPart) -> dict[int, list[Any]]:
    """Of `RankActor.call`, after the name of the method, by rank."""
    stored: list[Any] = []

    def store(value: Any) -> Any:
        if not isinstance(value, Samples):
            return value
        value = value.to_read() if isinstance(value, RemoteBatch) else value
        stored.append(ray.put(value) if len(part.ranks) > 1 else value)
        return StoredBatch(len(stored) - 1)

    args = [store(value) for value in part.args]
    kwargs = {name: store(value) for name, value in part.kwargs.items()}
    counts = {rank: part.output_rank in (None, rank) for rank in part.ranks}
    return {rank: [is_output, args, kwargs, *stored] for rank, is_output in counts.items()}
