"""Benchmark of columns sent from one worker group to another and back: by reference and otherwise.

A round trip: the ranks of one group give their batches, those of another read all of it and write a
column, and the ranks of the first group read that column.

Candidates alternate, so that other load of the machine affects all. Then a run of many small steps
by reference, with the memory that processes and the object store have at its start and at its end.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from rich.table import Table

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Column, Jagged
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.observability.console import get_stdout_console

# Nine columns along tokens, with the dtypes that a run has.
DTYPES = {
    "prompt_ids": np.int64, "response_ids": np.int64, "response_mask": np.int8,
    "rollout_log_probs": np.float32, "weight_versions": np.int64, "turn_numbers": np.int32,
    "log_probs": np.float32, "advantages": np.float32, "values": np.float32,
}  # fmt: skip
WRITTEN, SOURCE = "returns", "advantages"  # the column that is written, and its source
PROMPT_TOKENS = 64
_WARM_UPS = 2  # round trips of each that do not count
_SMALL_TOKENS = 64
_FIRST_STEPS = 200  # small ones, before memory is looked at


@dataclass(frozen=True, slots=True)
class DataPlaneSettings:
    ranks: int = 1  # of either group
    samples: int = 512
    tokens: int = 3900  # a response, on average
    repetitions: int = 11
    steps: int = 5000  # small ones
    small_samples: int = 64

    def split(self, samples: int, tokens: int) -> list[tuple[int, int, int]]:
        """Return the arguments of make_batch for each rank."""
        return [(seed, max(samples // self.ranks, 1), tokens) for seed in range(self.ranks)]


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Seconds of a round trip."""

    median_s: float
    fastest_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes."""

    driver_rss: int
    ranks_rss: int  # of both groups
    object_store: int


@dataclass(frozen=True, slots=True)
class DataPlaneReport:
    settings: DataPlaneSettings
    batch_bytes: int
    round_trips: dict[str, RoundTrip]
    missing: str  # why a candidate was not measured
    small_steps_s: float
    memory_before: Memory
    memory_after: Memory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def compute_speedup(self, other: str) -> float:
        """Return how many times faster than `other` the way by reference is, by the medians."""
        return self.round_trips[other].median_s / self.round_trips["by reference"].median_s


def make_batch(seed: int, num_samples: int, mean_tokens: int) -> Batch:
    """Return random columns along responses of 0.5 to 1.5 times `mean_tokens`."""
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


def count_bytes(batch: Batch) -> int:
    return sum(batch.jagged(name).values.nbytes for name in DTYPES)


def compute_written(batch: Batch) -> Jagged:
    """Return the column that the second group writes."""
    source = batch.jagged(SOURCE)
    return source.with_values(source.values * np.float32(2))


def sum_columns(batch: Batch, *names: str) -> dict[str, float]:
    return {name: float(batch.jagged(name).values.sum(dtype=np.float64)) for name in names}


class Peer:
    """A rank of either group."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]] = ()) -> None:
        """`sizes`: arguments of `make_batch` for the batch that each rank gives."""
        self._batches = [make_batch(*size) for size in sizes]
        self._sums: dict[str, float] = {}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, makes=True)
    def give(self, number: int) -> Batch:
        return self._batches[number]

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def give_by_value(self, number: int) -> Batch:
        return self._batches[number]

    @register(dispatch_mode=Dispatch.DP_COMPUTE, reads=(*DTYPES,), writes=(WRITTEN,))
    def write(self, batch: Batch, is_checked: bool) -> Batch:
        """Return the written column alone."""
        self._sums = sum_columns(batch, *DTYPES) if is_checked else {}
        return Batch({WRITTEN: compute_written(batch)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def add(self, batch: Batch, is_checked: bool) -> Batch:
        """Return all columns with the written one."""
        self._sums = sum_columns(batch, *DTYPES) if is_checked else {}
        return batch.with_columns(**{WRITTEN: compute_written(batch)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE, reads=(WRITTEN,))
    def read(self, batch: Batch, is_checked: bool) -> int:
        self._sums = sum_columns(batch, WRITTEN) if is_checked else {}
        return len(batch)

    @register()
    def get_sums(self) -> dict[str, float]:
        """Return the sums of the columns that were read last."""
        return self._sums


class BareActor:
    """Rank of either group with bare Ray: columns in its object store, references passed."""

    def __init__(self, sizes: tuple[int, int, int] | None = None) -> None:
        self._batch = make_batch(*sizes) if sizes else None

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
    """Rank of either group with TransferQueue's key-value interface, as rows of nested tensors."""

    def __init__(self, sizes: tuple[int, int, int] | None = None) -> None:
        import tensordict
        import torch

        self._queue: Any = importlib.import_module("transfer_queue")
        self._queue.init()
        self._torch, self._dict = torch, tensordict.TensorDict
        self._columns = self._nest(make_batch(*sizes)) if sizes else {}

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

    def _nest(self, batch: Batch) -> dict[str, Any]:
        def convert(column: Jagged) -> Any:
            values, offsets = map(self._torch.from_numpy, (column.values, column.offsets))
            return self._torch.nested.nested_tensor_from_jagged(values, offsets)

        return {name: convert(batch.jagged(name)) for name in DTYPES}


class WorkerGroupPair:
    """Two worker groups of this framework."""

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

    def pass_by_reference(self, is_checked: bool = False) -> None:
        batch = RemoteBatch.concat(self.givers.call(Peer.give, self._numbers))
        self.givers.call(
            Peer.read, self.writers.call(Peer.write, batch, is_checked).select(WRITTEN), is_checked
        )

    def pass_by_value(self, is_checked: bool = False) -> None:
        batch = Batch.concat(self.givers.call(Peer.give_by_value, self._numbers))
        self.givers.call(
            Peer.read, self.writers.call(Peer.write, batch, is_checked).select(WRITTEN), is_checked
        )

    def pass_by_value_with_inputs(self, is_checked: bool = False) -> None:
        """Return the inputs of a call, too, as calls did before batches went by reference."""
        batch = Batch.concat(self.givers.call(Peer.give_by_value, self._numbers))
        self.givers.call(
            Peer.read, self.writers.call(Peer.add, batch, is_checked).select(WRITTEN), is_checked
        )


def make_bare_ray(sizes: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
    actor = ray.remote(BareActor).options(num_cpus=0)
    givers = [actor.remote(size) for size in sizes]
    writers = [actor.remote() for _ in sizes]

    def round_trip() -> None:
        batches = ray.get([giver.give.remote() for giver in givers])
        columns = ray.get(
            [writer.write.remote(b) for writer, b in zip(writers, batches, strict=True)]
        )
        ray.get([giver.read.remote(c) for giver, c in zip(givers, columns, strict=True)])

    return round_trip


def make_transfer_queue(sizes: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
    """Return a round trip through TransferQueue.

    Raises:
        ConfigError: TransferQueue cannot be imported.
    """
    try:
        queue: Any = importlib.import_module("transfer_queue")
    except ImportError as error:
        raise ConfigError(f"TransferQueue cannot be imported: {error}") from error
    queue.init()
    actor = ray.remote(QueueActor).options(num_cpus=0)
    givers = [actor.remote(size) for size in sizes]
    writers = [actor.remote() for _ in sizes]
    keys = [[f"{number}/{row}" for row in range(size[1])] for number, size in enumerate(sizes)]

    def round_trip() -> None:
        batches = ray.get([g.give.remote(str(n), keys[n]) for n, g in enumerate(givers)])
        columns = ray.get(
            [writer.write.remote(b) for writer, b in zip(writers, batches, strict=True)]
        )
        ray.get([giver.read.remote(c) for giver, c in zip(givers, columns, strict=True)])
        for number, names in enumerate(keys):
            queue.kv_clear(keys=names, partition_id=str(number))

    return round_trip


def bench_data_plane(settings: DataPlaneSettings) -> DataPlaneReport:
    """Time all ways, then look at memory before and after many small steps.

    Raises:
        ConfigError: The machine has too little memory.
        RunFailed: A batch was read with other values than it was given.
    """
    sizes = settings.split(settings.samples, settings.tokens)
    batch_bytes = sum(count_bytes(make_batch(*size)) for size in sizes)
    store_bytes = max(512 << 20, 12 * batch_bytes)
    with (
        ray_session(num_cpus=16, object_store_bytes=store_bytes, log_to_driver=False),
        ResourcePool(settings.ranks, {"CPU": 1}) as pool,
    ):
        with contextlib.closing(WorkerGroupPair(pool, sizes)) as groups:
            check_round_trips(groups, sizes)
            candidates: dict[str, Callable[[], None]] = {
                "by reference": groups.pass_by_reference,
                "by value, inputs come back": groups.pass_by_value_with_inputs,
                "by value": groups.pass_by_value,
                "bare Ray, numpy": make_bare_ray(sizes),
            }
            missing = (
                ""
                if importlib.util.find_spec("transfer_queue")
                else ("TransferQueue: not installed here")
            )
            if not missing:
                candidates["TransferQueue"] = make_transfer_queue(sizes)
            round_trips = measure_round_trips(candidates, settings.repetitions)
        small = settings.split(settings.small_samples, _SMALL_TOKENS)
        with contextlib.closing(WorkerGroupPair(pool, small)) as groups:
            repeat(groups.pass_by_reference, min(_FIRST_STEPS, settings.steps))
            before = read_memory(groups)
            start = time.perf_counter()
            repeat(groups.pass_by_reference, settings.steps)
            small_steps_s = time.perf_counter() - start
            after = read_memory(groups)
    return DataPlaneReport(
        settings, batch_bytes, round_trips, missing, small_steps_s, before, after
    )


def check_round_trips(groups: WorkerGroupPair, sizes: Sequence[tuple[int, int, int]]) -> None:
    """Check that each value arrives and comes back doubled, by all ways of this framework."""
    batches = [make_batch(*size) for size in sizes]
    expected = {
        name: sum(float(batch.jagged(name).values.sum(dtype=float)) for batch in batches)
        for name in DTYPES
    }
    for round_trip in (
        groups.pass_by_reference,
        groups.pass_by_value,
        groups.pass_by_value_with_inputs,
    ):
        round_trip(is_checked=True)
        seen = {
            name: sum(sums[name] for sums in groups.writers.call(Peer.get_sums)) for name in DTYPES
        }
        back = sum(sums[WRITTEN] for sums in groups.givers.call(Peer.get_sums))
        if seen != expected or back != 2 * expected["advantages"]:
            raise RunFailed(f"sums of columns are {seen} and {back}; they have to be {expected}")


def measure_round_trips(
    candidates: dict[str, Callable[[], None]], repetitions: int
) -> dict[str, RoundTrip]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for _ in range(_WARM_UPS + repetitions):
        shuffle(order)  # what one leaves behind may slow the next
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            times[name].append(time.perf_counter() - start)
    timed = {name: seconds[_WARM_UPS:] for name, seconds in times.items()}
    return {name: RoundTrip(statistics.median(s), min(s)) for name, s in timed.items()}


def repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def read_memory(groups: WorkerGroupPair) -> Memory:
    ranks = [*groups.givers.worker_infos.values(), *groups.writers.worker_infos.values()]
    return Memory(
        driver_rss=psutil.Process().memory_info().rss,
        ranks_rss=sum(psutil.Process(info.pid).memory_info().rss for info in ranks),
        object_store=read_settled_store_bytes(),
    )


def read_settled_store_bytes() -> int:
    """Return the used bytes when three readings, a second apart, agree: Ray frees in bunches.

    Raises:
        RunFailed: They still change after 20 s.
    """
    readings = [_read_store_bytes()]
    for _ in range(20):
        time.sleep(1)
        readings.append(_read_store_bytes())
        if len(readings) > 2 and len({*readings[-3:]}) == 1:
            return readings[-1]
    raise RunFailed(f"what the object store holds still changes after 20 s: {readings[-1]} bytes")


def _read_store_bytes() -> int:
    """Return the used bytes in the object stores of all nodes."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    used: int = get_memory_info_reply(state).store_stats.object_store_bytes_used
    return used


def print_report(report: DataPlaneReport) -> None:
    console = get_stdout_console()
    settings, before, after = report.settings, report.memory_before, report.memory_after
    table = Table(
        title=f"round trip of {report.batch_bytes / 1e6:.0f} MB, {len(DTYPES)} columns, "
        f"{settings.samples} samples; {settings.ranks} rank(s) a group"
    )
    for name in ("", "median", "fastest", "by reference is"):
        table.add_column(name, justify="right" if name else "left")
    for name, timing in report.round_trips.items():
        times = f"{report.compute_speedup(name):.2f} times faster"
        table.add_row(name, f"{timing.median_s:.4f} s", f"{timing.fastest_s:.4f} s", times)
    console.print(table)
    if report.missing:
        console.print(report.missing)
    console.print(
        f"{settings.steps} steps of {settings.small_samples} samples in {report.small_steps_s:.1f} "
        "s; memory in MB at their start and end: "
        + ", ".join(
            f"{name} {getattr(before, field) / 1e6:.1f} and {getattr(after, field) / 1e6:.1f}"
            for name, field in (
                ("driver", "driver_rss"),
                ("ranks", "ranks_rss"),
                ("object store", "object_store"),
            )
        )
    )
