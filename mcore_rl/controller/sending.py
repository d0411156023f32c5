"""The parts of a call as Ray calls: one a rank, and one more for each batch that several get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray

from mcore_rl.controller.dispatch import CallPart
from mcore_rl.controller.rank_actor import Call, StoredBatch
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.data.batch import Samples

Sent = dict[Any, int]  # references to replies, with the world ranks that they are of


def send(actors: Sequence[Any], method: str, parts: Sequence[CallPart]) -> Sent:
    """Call `RankActor.call` of the ranks of each part; return replies by world rank.

    `actors` are handles by world rank. A batch that several ranks get is stored once.
    """
    return {
        actors[rank].call.remote(call, *stored): rank
        for part in parts
        for rank, call, stored in _calls(method, part)
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
        for rank, call, stored in _calls(method, part):
            make = actors[rank].make.options(num_returns=1 + num_objects)
            reply, *of_columns[rank] = make.remote(call, num_pieces, num_parts, *stored)
            sent[reply] = rank
    return sent, of_columns


def _calls(method: str, part: CallPart) -> Iterator[tuple[int, Call, list[Any]]]:
    """Yield rank, call and stored batches of each rank of a part."""
    stored: list[Any] = []

    def store(value: Any) -> Any:
        value = value.to_read() if isinstance(value, RemoteBatch) else value
        if len(part.ranks) == 1 or not isinstance(value, Samples):
            return value
        stored.append(ray.put(value))
        return StoredBatch(len(stored) - 1)

    args = [store(value) for value in part.args]
    kwargs = {name: store(value) for name, value in part.kwargs.items()}
    for rank in part.ranks:
        yield rank, (method, part.output_rank in (None, rank), args, kwargs), stored
