"""The ways of columns from one group's ranks to another's, each as one round trip.

A round trip: the ranks of one group give what they hold, those of another read all of it and write
a column, and the first group's ranks read that column.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Column, Jagged

# Nine columns along tokens, with the dtypes that a run has.
DTYPES = {
    "prompt_ids": np.int64, "response_ids": np.int64, "response_mask": np.int8,
    "rollout_log_probs": np.float32, "weight_versions": np.int64, "turn_numbers": np.int32,
    "log_probs": np.float32, "advantages": np.float32, "values": np.float32,
}  # fmt: skip
WRITTEN, SOURCE = "returns", "advantages"  # the column that is written, and of what it is made
PROMPT_TOKENS = 64


def batch_of(seed: int, num_samples: int, mean_tokens: int) -> Batch:
    """Random columns along responses of half to one and a half times as many tokens."""
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0.5, 1.5, num_samples)
    lengths = np.maximum(spread * mean_tokens / spread.mean(), 1).astype(np.int64)
    columns: dict[str, Column] = {}
    for name, dtype in DTYPES.items():
        is_prompt = name == "prompt_ids"
        rows = np.full(num_samples, PROMPT_TOKENS) if is_prompt else lengths
        offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        columns[name] = Jagged(rng.integers(0, 100, offsets[-1]).astype(dtype), offsets)
    return Batch(columns)


def num_bytes(batch: Batch) -> int:
    return sum(batch.jagged(name).values.nbytes for name in DTYPES)


def written(batch: Batch) -> Jagged:
    """What the second group makes of what it reads."""
    source = batch.jagged(SOURCE)
    return source.with_values(source.values * np.float32(2))


def sums_of(batch: Batch, *names: str) -> dict[str, float]:
    return {name: float(batch.jagged(name).values.sum(dtype=np.float64)) for name in names}


class Peer:
    """A rank of either group."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]] = ()) -> None:
        """`sizes`: of the batch that each rank gives, as arguments of `batch_of`."""
        self._batches = [batch_of(*one) for one in sizes]
        self._seen: dict[str, float] = {}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, makes=True)
    def give(self, number: int) -> Batch:
        return self._batches[number]

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def give_by_value(self, number: int) -> Batch:
        return self._batches[number]

    @register(dispatch_mode=Dispatch.DP_COMPUTE, reads=(*DTYPES,), writes=(WRITTEN,))
    def write(self, batch: Batch, is_checked: bool) -> Batch:
        """Alone, the column that is written goes back."""
        self._seen = sums_of(batch, *DTYPES) if is_checked else {}
        return Batch({WRITTEN: written(batch)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def add(self, batch: Batch, is_checked: bool) -> Batch:
        """All columns go back with the one that is written."""
        self._seen = sums_of(batch, *DTYPES) if is_checked else {}
        return batch.with_columns(**{WRITTEN: written(batch)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE, reads=(WRITTEN,))
    def read(self, batch: Batch, is_checked: bool) -> int:
        self._seen = sums_of(batch, WRITTEN) if is_checked else {}
        return len(batch)

    @register()
    def seen(self) -> dict[str, float]:
        """The sums of what was read last."""
        return self._seen


class BareActor:
    """The same without anything of ours: columns in Ray's object store, their reference passed."""

    def __init__(self, sizes: tuple[int, int, int] | None = None) -> None:
        self._batch = batch_of(*sizes) if sizes else None

    def give(self) -> list[Any]:
        assert self._batch is not None
        columns = {name: self._batch.jagged(name) for name in DTYPES}
        return [ray.put({name: (c.values, c.offsets) for name, c in columns.items()})]

    def write(self, given: list[Any]) -> list[Any]:
        values, offsets = ray.get(given[0])[SOURCE]
        return [ray.put((values * np.float32(2), offsets))]

    def read(self, given: list[Any]) -> int:
        _, offsets = ray.get(given[0])
        return len(offsets) - 1


class QueueActor:
    """The same through TransferQueue's key-value interface, as rows of nested tensors."""

    def __init__(self, sizes: tuple[int, int, int] | None = None) -> None:
        import tensordict
        import torch

        self._queue: Any = importlib.import_module("transfer_queue")
        self._queue.init()
        self._torch, self._dict = torch, tensordict.TensorDict
        self._columns = self._nested(batch_of(*sizes)) if sizes else {}

    def give(self, partition: str, keys: list[str]) -> Any:
        fields = self._dict(self._columns, batch_size=len(keys))
        return self._queue.kv_batch_put(keys=keys, partition_id=partition, fields=fields)

    def write(self, meta: Any) -> Any:
        source = self._queue.kv_batch_get_by_meta(meta)[SOURCE]
        column = self._torch.nested.nested_tensor_from_jagged(source.values() * 2, source.offsets())
        fields = self._dict({WRITTEN: column}, batch_size=len(meta.keys))
        return self._queue.kv_batch_put(
            keys=meta.keys, partition_id=meta.partition_id, fields=fields
        )

    def read(self, meta: Any) -> int:
        return len(self._queue.kv_batch_get_by_meta(meta, select_fields=[WRITTEN])[WRITTEN])

    def _nested(self, batch: Batch) -> dict[str, Any]:
        def one(column: Jagged) -> Any:
            values, offsets = map(self._torch.from_numpy, (column.values, column.offsets))
            return self._torch.nested.nested_tensor_from_jagged(values, offsets)

        return {name: one(batch.jagged(name)) for name in DTYPES}


class BothSides:
    """Two worker groups of ours."""

    def __init__(self, pool: ResourcePool, sizes: Sequence[tuple[int, int, int]]) -> None:
        layout = Layout(dp=len(sizes))
        timeouts = TimeoutsConfig()
        common: dict[str, Any] = {"layout": layout, "pool": pool, "timeouts": timeouts}
        self.givers = WorkerGroup(Peer, init_args=(sizes,), share=0.5, name="givers", **common)
        self.writers = WorkerGroup(Peer, share=0.5, name="writers", **common)
        self._numbers = list(range(len(sizes)))

    def close(self) -> None:
        self.givers.close()
        self.writers.close()

    def by_reference(self, is_checked: bool = False) -> None:
        batch = RemoteBatch.concat(self.givers.give(self._numbers))
        self.givers.read(self.writers.write(batch, is_checked).select(WRITTEN), is_checked)

    def by_value(self, is_checked: bool = False) -> None:
        batch = Batch.concat(self.givers.give_by_value(self._numbers))
        self.givers.read(self.writers.write(batch, is_checked).select(WRITTEN), is_checked)

    def by_value_with_inputs(self, is_checked: bool = False) -> None:
        """As calls were before batches went by reference."""
        batch = Batch.concat(self.givers.give_by_value(self._numbers))
        self.givers.read(self.writers.add(batch, is_checked).select(WRITTEN), is_checked)


def bare_ray(sizes: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
    actor = ray.remote(BareActor).options(num_cpus=0)
    givers = [actor.remote(one) for one in sizes]
    writers = [actor.remote() for _ in sizes]

    def round_trip() -> None:
        given = ray.get([one.give.remote() for one in givers])
        back = ray.get([one.write.remote(g) for one, g in zip(writers, given, strict=True)])
        ray.get([one.read.remote(b) for one, b in zip(givers, back, strict=True)])

    return round_trip


def transfer_queue(sizes: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
    """
    Raises:
        ConfigError: TransferQueue cannot be imported here.
    """
    try:
        queue: Any = importlib.import_module("transfer_queue")
    except ImportError as error:
        raise ConfigError(f"TransferQueue cannot be imported: {error}") from error
    queue.init()
    actor = ray.remote(QueueActor).options(num_cpus=0)
    givers = [actor.remote(one) for one in sizes]
    writers = [actor.remote() for _ in sizes]
    keys = [[f"{number}/{row}" for row in range(one[1])] for number, one in enumerate(sizes)]

    def round_trip() -> None:
        calls = [one.give.remote(str(number), keys[number]) for number, one in enumerate(givers)]
        given = ray.get(calls)
        back = ray.get([one.write.remote(g) for one, g in zip(writers, given, strict=True)])
        ray.get([one.read.remote(b) for one, b in zip(givers, back, strict=True)])
        for number, names in enumerate(keys):
            queue.kv_clear(keys=names, partition_id=str(number))

    return round_trip
