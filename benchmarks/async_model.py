"""Models of servers and an actor with a simulated clock, for benchmarks of the loops."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.inference.protocol import SamplingParams

TOKENS_PER_ENTRY = 32  # tokens that one of a batch stands for, to keep the loops' work small


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of responses, and rates of the devices."""

    median: int = 1000  # tokens of a response, log-normal
    sigma: float = 0.8
    longest: int = 8192
    slots: int = 512  # responses that all servers of a pool generate at once; others wait
    tokens_per_s: float = 50.0  # of each of these
    log_probs_per_s: float = 30_000.0  # tokens whose log-probs a trainer's pool finds
    trained_per_s: float = 10_000.0  # tokens that it trains on
    recomputed_per_s: float = 200_000.0  # tokens whose KV cache servers fill again after a sleep
    push_s: float = 5.0  # for new weights to be in all servers


@dataclass(slots=True)
class Clock:
    """Simulated time of a run, with spans (from, to, kind) of the trainer and of pushes."""

    now_s: float = 0.0
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    def pass_time(self, seconds: float, kind: str) -> None:
        self.spans.append((self.now_s, self.now_s + seconds, kind))
        self.now_s += seconds

    def sum_spans(self, *kinds: str) -> float:
        return sum(end - start for start, end, kind in self.spans if kind in kinds)


class BackgroundExecutor(Executor):
    """Runs functions at once, but as if in a thread, while time continues for the caller."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        start_s = self._clock.now_s
        future: Future[Any] = _ClockedFuture(self._clock)
        future.set_result(fn(*args, **kwargs))
        self._clock.now_s = start_s
        return future


class _ClockedFuture(Future[Any]):
    """Future whose `result` advances the clock to its end."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._ended = clock, 0.0

    def set_result(self, result: Any) -> None:
        self._ended = self._clock.now_s
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        self._clock.now_s = max(self._clock.now_s, self._ended)
        return super().result(timeout)


class Servers:
    """All servers of a pool: each response has a slot until its last token, or waits for one.

    Responses differ by their group and number alone. Their own time stands still while the servers
    sleep, take weights, or fill a KV cache again.
    """

    def __init__(self, clock: Clock, load: Workload, slots: int) -> None:
        self._clock, self._load, self.slots = clock, load, slots
        self._still_s = 0.0  # in which their time has stood still
        self._done_s = 0.0  # of their own time, up to which all is known
        self._asleep_at: float | None = None
        self._held: list[tuple[float, float]] = []  # from when to when they took weights or slept
        self._reported_idle_s = 0.0
        self._pushes = [(0.0, 0)]  # in their own time: when each version came
        self._waiting: deque[tuple[int, int]] = deque()  # (group, number) without a slot
        self._running: list[tuple[float, int, int]] = []  # a heap: (end, group, number)
        self._starts: dict[int, list[float]] = {}  # of all responses of a group, in their own time
        self._left: dict[int, int] = {}  # responses of a group that have not ended
        self._ended: list[int] = []  # groups nobody has collected
        self.used: list[tuple[float, int]] = [(0.0, 0)]  # slots from a time of the clock on

    def begin(self, prompts: Batch, sampling: SamplingParams, stream: str) -> None:
        self._advance()
        for group in prompts.array("group_ids").tolist():
            self._starts[group], self._left[group] = [0.0] * sampling.n, sampling.n
            self._waiting.extend((group, number) for number in range(sampling.n))
        self._fill_slots()

    def collect(self, stream: str, wait_s: float, at_least: int = 1) -> list[Batch]:
        """Return ended groups as real servers do; waiting advances the clock."""
        self._advance()
        until = self._clock.now_s + wait_s
        while not self._ended and self._running:
            next_s = self._running[0][0]
            if next_s + self._still_s > until:
                self._clock.now_s = until
                self._advance()
                break
            self._clock.now_s = max(next_s + self._still_s, self._clock.now_s)
            self._advance(next_s)
        groups, self._ended = sorted(self._ended), []
        return [Batch.concat([self._build_samples(group) for group in groups])] if groups else []

    def num_outstanding(self, stream: str) -> int:
        return len(self._starts)

    def abandon(self, stream: str, group_ids: Collection[int]) -> None:
        self._advance()
        ended = set(group_ids)
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in ended)
        self._running = [entry for entry in self._running if entry[1] not in ended]
        heapq.heapify(self._running)
        self._ended = [group for group in self._ended if group not in ended]
        for group in ended:
            del self._starts[group]
            self._left.pop(group, None)
        self._fill_slots()

    has_joining, resend, num_up, takes_turns = False, None, 1, False

    def follow_desired(self) -> None: ...

    def poll(self, stream: str) -> list[Batch]:
        """Return nothing: no real second passes while the modelled trainer computes."""
        return []

    def pop_rerouted(self, stream: str) -> list[int]:
        """Return no groups: modelled servers never die."""
        return []

    def push(self, version: int) -> None:
        with self._pause():
            self._clock.pass_time(self._load.push_s, "push")
        self._pushes.append((self._done_s, version))

    def sleep(self, keep: bool) -> None:
        self._advance()
        if self._left and not keep:
            raise RuntimeError("servers were told to sleep while they answer")
        self._asleep_at = self._clock.now_s
        self.used.append((self._clock.now_s, 0))

    def wake(self, tag: str) -> None:
        if tag != "kv_cache" or self._asleep_at is None:
            return
        cached_s = sum(self._done_s - self._starts[group][n] for _, group, n in self._running)
        again_s = cached_s * self._load.tokens_per_s / self._load.recomputed_per_s
        asleep_s = self._clock.now_s - self._asleep_at
        self._held.append((self._asleep_at, self._clock.now_s))
        self._still_s += asleep_s + again_s
        self._asleep_at = None
        self.used.append((self._clock.now_s, len(self._running)))

    def idle_s(self) -> list[float]:
        """Return the idle seconds since the last call, as real servers do."""
        before, self._reported_idle_s = self._reported_idle_s, self.all_idle_s
        return [self._reported_idle_s - before]

    @property
    def all_idle_s(self) -> float:
        """Seconds without a response in a slot, without a push and awake."""
        self._advance()
        now_s = self._clock.now_s
        ends = [when for when, _ in self.used[1:]] + [now_s]
        used = [(start, end) for (start, num), end in zip(self.used, ends, strict=True) if num]
        asleep = [] if self._asleep_at is None else [(self._asleep_at, now_s)]
        return now_s - _sum_covered_s([*used, *self._held, *asleep], now_s)

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self._advance()
        start_s = self._clock.now_s
        yield
        self._held.append((start_s, self._clock.now_s))
        if self._asleep_at is None:
            self._still_s += self._clock.now_s - start_s

    def _advance(self, until_s: float = 0.0) -> None:
        """Advance the servers' own time to the present, or to `until_s`, perhaps rounded down."""
        if self._asleep_at is not None:
            return
        own_time_s = max(self._clock.now_s - self._still_s, self._done_s, until_s)
        while self._running and self._running[0][0] <= own_time_s:
            self._done_s, group, _ = heapq.heappop(self._running)
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group]
                self._ended.append(group)
            self._fill_slots()
        self._done_s = own_time_s

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            group, number = self._waiting.popleft()
            self._starts[group][number] = self._done_s
            num_tokens = self._draw_lengths(group)[0][number]
            end = self._done_s + float(num_tokens) / self._load.tokens_per_s
            heapq.heappush(self._running, (end, group, number))
        self.used.append((self._done_s + self._still_s, len(self._running)))

    def _draw_lengths(self, group: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return tokens of each response, and whether it is truncated: [responses]."""
        load, num = self._load, len(self._starts[group])
        drawn = load.median * np.exp(load.sigma * np.random.default_rng(group).standard_normal(num))
        return np.minimum(drawn, load.longest), drawn >= load.longest

    def _build_samples(self, group: int) -> Batch:
        lengths, is_cut = self._draw_lengths(group)
        starts = self._starts.pop(group)
        ids = Jagged.pack((np.arange(1, 2 + int(n) // TOKENS_PER_ENTRY) for n in lengths), np.int64)
        entry_s = TOKENS_PER_ENTRY / self._load.tokens_per_s
        times = np.concatenate([a + row * entry_s for a, row in zip(starts, ids, strict=True)])
        pushed, pushed_versions = (np.array(column) for column in zip(*self._pushes, strict=True))
        token_versions = pushed_versions[np.searchsorted(pushed, times - entry_s, side="right") - 1]
        versions, rng = ids.with_values(token_versions), np.random.default_rng([1, group])
        mask = np.ones(len(ids.values))
        return Batch(
            {
                "group_ids": np.full(len(starts), group),
                "prompt_ids": Jagged.pack([[1]] * len(starts), np.int64),
                "response_ids": ids,
                "response_mask": ids.with_values(mask.astype(np.int8)),
                "rollout_log_probs": ids.with_values(-mask.astype(np.float32)),
                "weight_versions": versions,
                "oldest_versions": np.array([row.min() for row in versions]),
                "newest_versions": np.array([row.max() for row in versions]),
                "rewards": rng.integers(0, 2, len(starts)).astype(np.float32),
                "reward_errors": np.array([""] * len(starts)),
                "finish_reasons": np.where(is_cut, "length", "stop"),
            }
        )


def _sum_covered_s(spans: Sequence[tuple[float, float]], until_s: float) -> float:
    """Return the seconds that at least one of the spans covers."""
    total_s = covered_until = 0.0
    for start, end in sorted(spans):
        total_s += max(min(end, until_s) - max(start, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return total_s


class ModelledActor:
    """A trainer on `share` times the devices of its own pool."""

    def __init__(self, clock: Clock, load: Workload, share: float) -> None:
        self._clock, self._load, self._share = clock, load, share
        self.updates: list[Batch] = []

    def to(self, place: str, model: bool = True) -> None:
        """Move the model in no time."""

    def apply(self, function: Callable[..., Any], batch: Batch, *args: object) -> Any:
        """Apply a function in no time."""
        return function(batch, *args)

    def compute_log_probs(self, batch: Batch, *, temperature: float) -> Batch:
        self._spend(batch, self._load.log_probs_per_s, "log-probs")
        return batch.with_columns(log_probs=batch.jagged("rollout_log_probs"))

    def update(
        self, batch: Batch, *, sizes: Sequence[int], temperature: float
    ) -> list[list[dict[str, float]]]:
        self._spend(batch, self._load.trained_per_s, "update")
        self.updates.append(batch)
        return [[{"loss": 0.0}] * len(sizes)]

    def _spend(self, batch: Batch, tokens_per_s: float, kind: str) -> None:
        num_tokens = len(batch.jagged("response_ids").values) * TOKENS_PER_ENTRY
        self._clock.pass_time(num_tokens / (tokens_per_s * self._share), kind)
