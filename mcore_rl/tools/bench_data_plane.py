"""Columns from one group's ranks to another's and back: by reference, beside what else there is.

Candidates alternate, so that other load of the machine affects all. Then a run of many small steps
by reference, with the memory that processes and the object store have at its start and at its end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from rich.table import Table

from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.tools.data_plane_candidates import (
    DTYPES,
    WRITTEN,
    BothSides,
    bare_ray,
    batch_of,
    num_bytes,
    transfer_queue,
)

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

    def sizes(self, samples: int, tokens: int) -> list[tuple[int, int, int]]:
        return [(seed, max(samples // self.ranks, 1), tokens) for seed in range(self.ranks)]


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Of a round trip."""

    median_s: float
    fastest_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes."""

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def times_faster(self, other: str) -> float:
        """By reference than another, by the medians."""
        return self.round_trips[other].median_s / self.round_trips["by reference"].median_s


def bench_data_plane(settings: DataPlaneSettings) -> DataPlaneReport:
    """
    Raises:
        ConfigError: the machine has too little room.
        RunFailed: what was read is not what was given.
    """
    sizes = settings.sizes(settings.samples, settings.tokens)
    batch_bytes = sum(num_bytes(batch_of(*one)) for one in sizes)
    store_bytes = max(512 << 20, 12 * batch_bytes)
    with (
        ray_session(num_cpus=16, object_store_bytes=store_bytes, log_to_driver=False),
        ResourcePool(settings.ranks, {"CPU": 1}) as pool,
    ):
        with contextlib.closing(BothSides(pool, sizes)) as groups:
            check(groups, sizes)
            candidates: dict[str, Callable[[], None]] = {
                "by reference": groups.by_reference,
                "by value, inputs come back": groups.by_value_with_inputs,
                "by value": groups.by_value,
                "bare Ray, numpy": bare_ray(sizes),
            }
            missing = (
                ""
                if importlib.util.find_spec("transfer_queue")
                else ("TransferQueue: not installed here")
            )
            if not missing:
                candidates["TransferQueue"] = transfer_queue(sizes)
            round_trips = measured(candidates, settings.repetitions)
        small = settings.sizes(settings.small_samples, _SMALL_TOKENS)
        with contextlib.closing(BothSides(pool, small)) as groups:
            repeat(groups.by_reference, min(_FIRST_STEPS, settings.steps))
            before = memory_of(groups)
            start = time.perf_counter()
            repeat(groups.by_reference, settings.steps)
            took = time.perf_counter() - start
            after = memory_of(groups)
    return DataPlaneReport(settings, batch_bytes, round_trips, missing, took, before, after)


def check(groups: BothSides, sizes: Sequence[tuple[int, int, int]]) -> None:
    """All ways of ours: each value arrives, and comes back doubled."""
    batches = [batch_of(*one) for one in sizes]
    expected = {
        name: sum(float(batch.jagged(name).values.sum(dtype=float)) for batch in batches)
        for name in DTYPES
    }
    for round_trip in (groups.by_reference, groups.by_value, groups.by_value_with_inputs):
        round_trip(is_checked=True)
        seen = {name: sum(one[name] for one in groups.writers.seen()) for name in DTYPES}
        back = sum(one[WRITTEN] for one in groups.givers.seen())
        if seen != expected or back != 2 * expected["advantages"]:
            raise RunFailed(f"sums of columns are {seen} and {back}; they have to be {expected}")


def measured(candidates: dict[str, Callable[[], None]], repetitions: int) -> dict[str, RoundTrip]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for _ in range(_WARM_UPS + repetitions):
        shuffle(order)  # what one leaves behind may slow the next
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            times[name].append(time.perf_counter() - start)
    counted = {name: all_of_it[_WARM_UPS:] for name, all_of_it in times.items()}
    return {name: RoundTrip(statistics.median(one), min(one)) for name, one in counted.items()}


def repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def memory_of(groups: BothSides) -> Memory:
    ranks = [*groups.givers.worker_infos.values(), *groups.writers.worker_infos.values()]
    return Memory(
        driver_rss=psutil.Process().memory_info().rss,
        ranks_rss=sum(psutil.Process(info.pid).memory_info().rss for info in ranks),
        object_store=settled_store_bytes(),
    )


def settled_store_bytes() -> int:
    """What is used once three looks, a second apart, are the same: Ray frees objects in bunches.

    Raises:
        RunFailed: it still changes after 20 s.
    """
    looks = [_store_bytes_used()]
    for _ in range(20):
        time.sleep(1)
        looks.append(_store_bytes_used())
        if len(looks) > 2 and len({*looks[-3:]}) == 1:
            return looks[-1]
    raise RunFailed(f"what the object store holds still changes after 20 s: {looks[-1]} bytes")


def _store_bytes_used() -> int:
    """Of the object stores of all nodes."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    used: int = get_memory_info_reply(state).store_stats.object_store_bytes_used
    return used


def show(report: DataPlaneReport) -> None:
    console = get_stdout_console()
    settings, before, after = report.settings, report.memory_before, report.memory_after
    table = Table(
        title=f"round trip of {report.batch_bytes / 1e6:.0f} MB, {len(DTYPES)} columns, "
        f"{settings.samples} samples; {settings.ranks} rank(s) a group"
    )
    for name in ("", "median", "fastest", "by reference is"):
        table.add_column(name, justify="right" if name else "left")
    for name, timing in report.round_trips.items():
        times = f"{report.times_faster(name):.2f} times faster"
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
