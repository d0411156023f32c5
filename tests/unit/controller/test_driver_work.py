"""The cost of one call of a thousand ranks for the driver: seconds, bytes, calls of Ray."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from mcore_rl.config.schema import Layout
from mcore_rl.controller.dispatch import Dispatch, Registration, get_registered_methods, register
from mcore_rl.controller.remote_batch import RemoteBatch, RemoteColumn, RowLocations
from mcore_rl.controller.worker_group import send_parts
from mcore_rl.controller.worker_process import Reply
from mcore_rl.data.batch import Batch
from mcore_rl.parallel.mesh import Mesh

REFERENCE_BYTES = 163  # that Ray 2.60 pickles of a reference, beyond the first


class Reference:
    """A reference as long as Ray's in a pickle: an id of 28 bytes, and its owner's address."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        object_id = self.number.to_bytes(28, "little")
        return _reference, (object_id, "", self.number.to_bytes(REFERENCE_BYTES - 42, "big"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


def _reference(object_id: bytes, *_: object) -> Reference:
    return Reference(int.from_bytes(object_id, "little"))


class Worker:
    @register(
        dispatch_mode=Dispatch.MEGATRON_COMPUTE,
        reads=("prompt_ids", "response_ids"),
        writes=("log_probs",),
    )
    def compute_log_probs(self, batch: Batch) -> Batch: ...


# What the driver does for one call, without Ray: 32 servers have made 8,192 samples of up to 16,384
# tokens, and each rank of a group reads two columns and writes one.

NUM_SAMPLES, NUM_SERVERS = 8192, 32


def make_samples() -> RemoteBatch:
    """Return samples, six an object: 4 MiB of the columns that a server makes of 16,384 tokens."""
    rng, number = np.random.default_rng(0), NUM_SAMPLES // NUM_SERVERS
    made = []
    for server in range(NUM_SERVERS):
        count, row = -(-number // 6), np.arange(number, dtype=np.int32)
        references = tuple(Reference(server * 1000 + index) for index in range(count))
        locations = RowLocations(references, row // 6, row % 6)
        local = {
            "prompt_tokens": rng.integers(64, 2048, number),
            "response_tokens": rng.integers(1024, 16384, number),
            "rewards": rng.random(number).astype(np.float32),
            "group_ids": row.astype(np.int64) // 8,
        }
        names = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
        columns = {name: RemoteColumn(locations, name, np.zeros(0)) for name in names}
        made.append(RemoteBatch(Batch({**local}), columns))
    return RemoteBatch.concat(made)


MARK: Registration = get_registered_methods(Worker)["compute_log_probs"]


def measure_call(batch: RemoteBatch, num_ranks: int) -> tuple[float, int, int]:
    """Return CPU seconds, bytes that travel, and calls of Ray."""
    calls: list[bytes] = []

    def remote(*arguments: Any) -> int:
        calls.append(pickle.dumps(arguments))
        return len(calls) - 1

    actors = [SimpleNamespace(call=SimpleNamespace(remote=remote))] * num_ranks
    start = time.process_time()
    read = MARK.select_columns(batch)
    parts = MARK.scatter(Mesh(Layout(dp=num_ranks)), (read,), {})
    sent = send_parts(actors, "compute_log_probs", parts)
    took = time.process_time() - start
    assert sorted(sent.values()) == list(range(num_ranks))
    replies = [pickle_reply(number, len(part.rows or ())) for number, part in enumerate(parts)]
    start = time.process_time()
    results = {rank: pickle.loads(replies[number]).value for number, rank in sent.items()}
    joined = batch.union(MARK.dispatch_mode.gather(parts, results))
    took += time.process_time() - start
    rows = joined.remote["log_probs"].locations
    for number in (0, num_ranks // 2, num_ranks - 1):  # each rank's rows are where it has put them
        for index, row in enumerate(parts[number].rows or ()):
            assert rows.references[rows.objects[row]].number == number
            assert rows.rows[row] == index
    return took, sum(map(len, calls)) + sum(map(len, replies)), len(calls)


def pickle_reply(number: int, num_rows: int) -> bytes:
    rows = np.arange(num_rows, dtype=np.int32)
    locations = RowLocations((Reference(number),), np.zeros_like(rows), rows)
    column = RemoteColumn(locations, "log_probs", np.zeros(0, np.float32))
    return pickle.dumps(Reply(RemoteBatch(Batch({}), {"log_probs": column})))


def test_a_driver_of_1024_ranks_moves_few_bytes_a_sample():
    batch = make_samples()
    sizes = [len(pickle.dumps([Reference(n) for n in range(count)])) for count in (1, 11)]
    assert (sizes[1] - sizes[0]) // 10 == REFERENCE_BYTES
    took, num_bytes, num_calls = measure_call(batch, 1024)
    assert num_calls == 1024
    assert num_bytes / NUM_SAMPLES <= 256
    assert took < 5


def test_cpu_time_of_a_call_is_linear_in_ranks():
    batch = make_samples()
    times = {ranks: min(measure_call(batch, ranks)[0] for _ in range(3)) for ranks in (256, 1024)}
    assert times[1024] < 8 * times[256]  # 4 times where it is linear, 16 where it is quadratic
    few = batch.take(range(1024))
    assert measure_call(few, 512)[2] == measure_call(batch, 512)[2] == 512
