"""Models of ranks: training ranks that take the predicted time, and servers that decode by it.

A response is known by its group and number alone: a group that begins again has the same lengths. A
server decodes all of its responses together, a token of each at a time, and fewer take less time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from mcore_rl.config.schema import Layout
from mcore_rl.controller.simulated_group import RankCall
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.inference.protocol import DraftCounts, SamplingParams, ServerMemory
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.tools.simulate.times import Workload
from mcore_rl.tools.simulate.virtual_time import VirtualClock
from mcore_rl.weight_sync.spec import TransferSpec

Cause = Literal["generate", "weight_sync", "sleep", "restart", "idle"]
_EPSILON = 1e-6  # tokens
_NOWHERE = RendezvousEndpoint("127.0.0.1", 9, "")  # nobody waits there


@dataclass(slots=True)
class Ledger:
    """Record what ranks did, by the clock.

    Attributes:
        spans: Start, end and kind of what training ranks did.
        server_s: Seconds of all servers by cause.
        response_s: Seconds of all responses while they were decoded.
        tokens: Decoded tokens: those that were collected, and those that were lost, by cause.
        running: Decoding and waiting responses of all servers, whenever they change.
    """

    spans: list[tuple[float, float, str]] = field(default_factory=list)
    server_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    response_s: float = 0.0
    tokens: Counter[str] = field(default_factory=Counter)
    num_decoding: int = 0
    num_waiting: int = 0
    running: list[tuple[float, int, int]] = field(default_factory=lambda: [(0.0, 0, 0)])
    num_failures: int = 0

    def add_running(self, now_s: float, decoding: int, waiting: int) -> None:
        self.num_decoding += decoding
        self.num_waiting += waiting
        if self.running[-1][0] == now_s:
            self.running.pop()
        self.running.append((now_s, self.num_decoding, self.num_waiting))


class SimulatedRanks:
    """All ranks of the actor: a call takes the time of the slowest rank where they wait for it."""

    def __init__(
        self, clock: VirtualClock, workload: Workload, ledger: Ledger, layout: Layout
    ) -> None:
        self._clock, self._workload, self._ledger, self._layout = clock, workload, ledger, layout
        self._busy_until_s = 0.0

    def close(self) -> None:
        """Do nothing: a run ends with them."""

    def execute(self, calls: Sequence[RankCall]) -> None:
        for method, sent in itertools.groupby(calls, key=lambda call: call.method):
            self._execute_method(method, list(sent))

    def _execute_method(self, method: str, calls: list[RankCall]) -> None:
        """Answer a call of all ranks, one after another with others that were sent."""
        times = self._workload.times
        start_s = max(self._clock.now_s, self._busy_until_s) + times.call_s / 2
        outputs: dict[int, tuple[float, Any, Sequence[Batch]]] = {}  # by the id of a part's args
        for call in calls:
            if id(call.args) not in outputs or call.is_output:
                outputs[id(call.args)] = self._run(call)
        longest_s = max(seconds for seconds, *_ in outputs.values())
        if method != "compute_log_probs":  # an update and a sync of weights end together
            outputs = {key: (longest_s, *rest) for key, (_, *rest) in outputs.items()}
        if kind := _KINDS.get(method):
            self._ledger.spans.append((start_s, start_s + longest_s, kind))
        self._busy_until_s = start_s + longest_s
        ends: dict[float, list[RankCall]] = {}
        for call in calls:
            ends.setdefault(outputs[id(call.args)][0], []).append(call)
        for seconds, answered in ends.items():

            def answer(answered: list[RankCall] = answered) -> None:
                for call in answered:
                    _, value, inputs = outputs[id(call.args)]
                    call.answer(value, inputs)

            delay_s = start_s + seconds + times.call_s / 2 - self._clock.now_s
            self._clock.schedule(delay_s, answer)

    def _run(self, call: RankCall) -> tuple[float, Any, Sequence[Batch]]:
        """Return seconds, value, and the batches that the call was given."""
        if not call.is_output:
            return 0.0, None, ()
        args, kwargs = call.fetch_arguments()
        times, inputs = self._workload.times, [arg for arg in args if isinstance(arg, Batch)]
        match call.method:
            case "compute_log_probs":
                scores = _make_scores(inputs[0])
                seconds = self._count_tokens(inputs[0]) * times.log_prob_token_s
                return seconds + times.log_prob_s, scores, inputs
            case "update":
                sizes = kwargs.get("sizes") or [len(inputs[0])]
                seconds = self._count_tokens(inputs[0]) * times.train_token_s
                metrics = [{"loss": 0.0} for _ in sizes]
                return seconds + len(sizes) * times.optimizer_s, metrics, inputs
            case "update_with_scores":
                seconds = self._count_tokens(inputs[0]) * times.train_token_s + times.optimizer_s
                return seconds, (_make_scores(inputs[0]), {}, {"loss": 0.0}), inputs
            case "apply":
                function, batch, *rest = args
                return 0.0, function(batch, *rest), inputs
            case "open_weights":
                generation, settings = args[:2]
                spec = TransferSpec(self._layout, 0, generation, "bfloat16", settings)
                return 0.0, (_NOWHERE, spec), ()
            case "send_weights":
                return times.weight_sync_s, None, ()
            case "initialize" | "connect_weights" | "to":
                return 0.0, None, ()
        raise NotImplementedError(f"a simulated training rank has no {call.method}")

    def _count_tokens(self, batch: Batch) -> int:
        return int(batch.num_tokens.sum()) * self._workload.tokens_per_entry


_KINDS = {
    "compute_log_probs": "log_probs", "update": "update", "update_with_scores": "update",
    "send_weights": "weight_sync",
}  # fmt: skip


def _make_scores(batch: Batch) -> Batch:
    """Return the batch with the log-probs that simulated servers have given, and no entropy."""
    ids = batch.jagged("response_ids")
    scores = {"log_probs": -1.0, "entropy": 0.0}
    columns = {
        n: ids.with_values(np.full(len(ids.values), v, np.float32)) for n, v in scores.items()
    }
    return Batch({**batch.columns, **columns})


@dataclass(eq=False, slots=True)
class _Response:
    """A response that a server generates."""

    group: _Group
    number: int
    num_tokens: int
    is_truncated: bool
    start: float = -1.0  # tokens that the server had decoded when it began; -1: it waits

    def __lt__(self, other: _Response) -> bool:  # of a heap: equal ends are in the order of begin
        return (self.group.group_id, self.number) < (other.group.group_id, other.number)


@dataclass(eq=False, slots=True)
class _Group:
    group_id: int
    stream: str
    prompt_entries: int
    responses: list[_Response] = field(default_factory=list)
    num_left: int = 0
    is_done: bool = False  # has its rewards


class SimulatedServer:
    """The one rank of a server: it takes one call after another, and decodes meanwhile."""

    def __init__(
        self,
        clock: VirtualClock,
        workload: Workload,
        ledger: Ledger,
        number: int,
        restart: int,
    ) -> None:
        self._clock, self._workload, self._ledger = clock, workload, ledger
        self._calls: deque[RankCall] = deque()
        self._current: RankCall | None = None
        self._open: list[RankCall] = []  # without a reply
        self._is_dead = False
        self._groups: dict[tuple[str, int], _Group] = {}
        self._waiting: deque[_Response] = deque()
        self._decoding: list[tuple[float, _Response]] = []  # a heap, by decoded tokens at the end
        self._decoded = 0.0  # tokens that each response has got which has been there all the time
        self._since_s = clock.now_s  # up to when that is known
        self._stalled_until_s = 0.0  # by prefills
        self._pauses: set[str] = {"restart"}
        self._timer = 0  # of the next end of a response; earlier ones do not count
        self._versions = [(0.0, 0)]  # decoded tokens when each version came
        self._collect_at_least = 0
        self._idle_s = 0.0
        self._restart_s = workload.times.server_start_s if restart else 0.0
        lives_s = workload.draw_failure_s(number, restart)
        if lives_s < float("inf"):
            clock.schedule(self._restart_s + lives_s, self._die)

    # Calls.

    def execute(self, calls: Sequence[RankCall]) -> None:
        for call in calls:
            if self._is_dead:
                call.fail("it has died before this call")
                continue
            self._open.append(call)
            self._calls.append(call)
        self._take_call()

    def close(self) -> None:
        self._end("")

    def _die(self) -> None:
        if not self._is_dead:
            self._ledger.num_failures += 1
            self._end("its server has died")

    def _end(self, message: str) -> None:
        if self._is_dead:
            return
        self._advance()
        self._is_dead = True
        self._timer += 1
        for group in self._groups.values():
            self._count_tokens(group, "died")
        self._ledger.add_running(self._clock.now_s, -len(self._decoding), -len(self._waiting))
        for call in self._open:
            if message:
                call.fail(message)

    def _take_call(self) -> None:
        while self._calls and self._current is None and not self._is_dead:
            self._current = call = self._calls.popleft()
            args, kwargs = call.fetch_arguments()
            getattr(self, f"_call_{call.method}")(*args, **kwargs)

    def _answer(self, value: Any = None, after_s: float = 0.0) -> None:
        """Reply to the current call in so many seconds, and take the next one."""
        call = self._current

        def answer() -> None:
            if call is None or self._is_dead:
                return
            self._open.remove(call)
            call.answer(value)
            self._current = None
            self._take_call()

        self._clock.schedule(after_s + self._workload.times.call_s, answer)

    def _call_prepare(self) -> None:
        self._answer()

    def _call_start(self, reads_weights: bool = True) -> None:
        self._call_later(self._restart_s, lambda: self._resume("restart"))
        self._answer(after_s=self._restart_s)

    def _call_connect_models(self, addresses: Any) -> None:
        self._answer()

    def _call_begin(self, prompts: Batch, sampling: SamplingParams, stream: str) -> None:
        self._advance()
        entries = prompts.lengths("prompt_ids").tolist()
        for group_id, num in zip(prompts.array("group_ids").tolist(), entries, strict=True):
            group = _Group(group_id, stream, num, num_left=sampling.n)
            drawn = self._workload.lengths.draw(
                [self._workload.seed, 1, group_id + 2**32], sampling.n
            )
            group.responses = [
                _Response(group, n, min(tokens, sampling.max_tokens), tokens >= sampling.max_tokens)
                for n, tokens in enumerate(drawn.tolist())
            ]
            self._groups[stream, group_id] = group
            self._waiting.extend(group.responses)
            self._ledger.add_running(self._clock.now_s, 0, sampling.n)
        self._fill()
        self._answer()

    def _call_collect(self, stream: str, wait_s: float, at_least: int = 1) -> None:
        call = self._current
        self._collect_at_least = max(at_least, 1)

        def give_up() -> None:
            if self._current is call and self._collect_at_least and not self._is_dead:
                self._answer_collect(stream)

        if self._may_collect(stream):
            self._answer_collect(stream)
        else:
            self._clock.schedule(wait_s, give_up)

    def _may_collect(self, stream: str) -> bool:
        groups = [group for group in self._groups.values() if group.stream == stream]
        num_done = sum(group.is_done for group in groups)
        return num_done >= min(self._collect_at_least, len(groups))

    def _answer_collect(self, stream: str) -> None:
        done = [g for g in self._groups.values() if g.stream == stream and g.is_done]
        for group in done:
            del self._groups[stream, group.group_id]
            self._count_tokens(group, "collected")
        self._collect_at_least = 0
        done.sort(key=lambda group: group.group_id)
        batches = [self._make_samples(group) for group in done]
        self._answer(Batch.concat(batches) if batches else Batch({}))

    def _collect_if_due(self) -> None:
        call = self._current
        if call is not None and call.method == "collect" and self._collect_at_least:
            stream = call.args[0]
            if self._may_collect(stream):
                self._answer_collect(stream)

    def _call_abandon(self, stream: str, group_ids: Sequence[int]) -> None:
        self._advance()
        for group_id in group_ids:
            if (group := self._groups.pop((stream, group_id), None)) is None:
                continue
            self._count_tokens(group, "abandoned")
            ended = {id(response) for response in group.responses}
            before = len(self._decoding), len(self._waiting)
            self._decoding = [entry for entry in self._decoding if id(entry[1]) not in ended]
            self._waiting = deque(r for r in self._waiting if id(r) not in ended)
            after = len(self._decoding), len(self._waiting)
            changes = (new - old for new, old in zip(after, before, strict=True))
            self._ledger.add_running(self._clock.now_s, *changes)
        heapq.heapify(self._decoding)
        self._fill()
        self._answer()

    def _call_list_parameters(self) -> None:
        self._answer([])

    def _call_connect_weights(self, endpoint: Any, spec: TransferSpec, first_rank: int) -> None:
        self._answer()

    def _call_receive_weights(
        self, version: int, in_flight: bool = False, recompute_cache: bool = False
    ) -> None:
        seconds = self._workload.times.weight_sync_s
        self._pause("weight_sync")

        def resume() -> None:
            self._versions.append((self._decoded, version))
            if recompute_cache:
                self._stall(self._count_cached())
            self._resume("weight_sync")

        self._call_later(seconds, resume)
        self._answer(after_s=seconds)

    def _call_sleep(self, keep: bool = False) -> None:
        self._pause("sleep")
        self._answer()

    def _call_wake(self, tag: str) -> None:
        if tag == "kv_cache":
            self._stall(self._count_cached())
            self._resume("sleep")
        self._answer()

    def _call_memory(self) -> None:
        self._answer(ServerMemory(0, 0))

    def _call_take_draft_counts(self) -> None:
        self._answer(DraftCounts())

    def _call_idle_s(self) -> None:
        self._advance()
        self._answer(self._idle_s)

    def _call_shut_down(self) -> None:
        self._answer()

    # Decoding.

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        def call() -> None:
            if not self._is_dead:
                callback()

        self._clock.schedule(seconds, call)

    def _pause(self, cause: str) -> None:
        self._advance()
        self._pauses.add(cause)
        self._timer += 1

    def _resume(self, cause: str) -> None:
        self._advance()
        self._pauses.discard(cause)
        self._fill()

    def _stall(self, num_tokens: float) -> None:
        """Let the server fill the KV cache of so many tokens, and decode nothing meanwhile."""
        seconds = num_tokens * self._workload.times.prefill_token_s
        self._stalled_until_s = max(self._stalled_until_s, self._clock.now_s) + seconds

    def _count_cached(self) -> float:
        return sum(self._decoded - response.start for _, response in self._decoding)

    @property
    def _token_s(self) -> float:
        times = self._workload.times
        return times.decode_s + times.decode_response_s * len(self._decoding)

    def _advance(self) -> None:
        """Decode up to the present."""
        now_s, since_s = self._clock.now_s, self._since_s
        self._since_s = now_s
        if self._is_dead:
            return
        cause: Cause = "idle"
        if self._pauses:
            cause = next(c for c in ("restart", "weight_sync", "sleep") if c in self._pauses)
        elif self._decoding:
            cause = "generate"
            decode_s = max(now_s - max(since_s, self._stalled_until_s), 0.0)
            self._decoded += decode_s / self._token_s
            self._ledger.response_s += (now_s - since_s) * len(self._decoding)
        elif not self._groups:  # else rewards are computed
            self._idle_s += now_s - since_s
        self._ledger.server_s[cause] += now_s - since_s

    def _fill(self) -> None:
        """Begin waiting responses, and wait for the next one to end."""
        self._timer += 1
        if self._pauses:
            return
        times, num = self._workload.times, 0
        while self._waiting and len(self._decoding) < times.responses_per_server:
            response = self._waiting.popleft()
            if response.number == 0:  # the prefix cache has it for the others of the group
                self._stall(response.group.prompt_entries * self._workload.tokens_per_entry)
            response.start = self._decoded
            heapq.heappush(self._decoding, (self._decoded + response.num_tokens, response))
            num += 1
        if num:
            self._ledger.add_running(self._clock.now_s, num, -num)
        if not self._decoding:
            return
        timer, left = self._timer, self._decoding[0][0] - self._decoded
        stalled_s = max(self._stalled_until_s - self._clock.now_s, 0.0)

        def end() -> None:
            if timer == self._timer:
                self._advance()
                self._end_responses()

        self._clock.schedule(stalled_s + max(left, 0.0) * self._token_s, end)

    def _end_responses(self) -> None:
        num = 0
        while self._decoding and self._decoding[0][0] <= self._decoded + _EPSILON:
            _, response = heapq.heappop(self._decoding)
            num += 1
            group = response.group
            group.num_left -= 1
            if not group.num_left:
                self._call_later(self._workload.times.reward_s, partial(self._reward, group))
        self._ledger.add_running(self._clock.now_s, -num, 0)
        self._fill()

    def _reward(self, group: _Group) -> None:
        self._advance()
        group.is_done = True
        self._collect_if_due()

    def _count_tokens(self, group: _Group, outcome: str) -> None:
        """Count the tokens that a group has got so far."""
        decoded = sum(
            min(self._decoded - response.start, response.num_tokens)
            for response in group.responses
            if response.start >= 0
        )
        self._ledger.tokens[outcome] += round(decoded)

    def _make_samples(self, group: _Group) -> Batch:
        """Return the samples of a group; an entry stands for `tokens_per_entry` tokens."""
        workload, num = self._workload, len(group.responses)
        lengths = np.array([response.num_tokens for response in group.responses])
        is_truncated = [response.is_truncated for response in group.responses]
        ids = Jagged.pack([np.arange(n) for n in workload.count_entries(lengths)], np.int64)
        decoded = np.concatenate(
            [
                response.start + row * workload.tokens_per_entry
                for response, row in zip(group.responses, ids, strict=True)
            ]
        )
        starts, numbers = (np.array(column) for column in zip(*self._versions, strict=True))
        versions = ids.with_values(numbers[np.searchsorted(starts, decoded, side="right") - 1])
        filled = np.ones(len(ids.values))
        rng = np.random.default_rng([workload.seed, 3, group.group_id + 2**32])
        return Batch(
            {
                "group_ids": np.full(num, group.group_id),
                "prompt_ids": Jagged.pack([np.zeros(group.prompt_entries)] * num, np.int64),
                "response_ids": ids,
                "response_mask": ids.with_values(filled.astype(np.int8)),
                "rollout_log_probs": ids.with_values(-filled.astype(np.float32)),
                "weight_versions": versions,
                "oldest_versions": np.array([row.min() for row in versions]),
                "newest_versions": np.array([row.max() for row in versions]),
                "rewards": rng.integers(0, 2, num).astype(np.float32),
                "reward_errors": np.array([""] * num),
                "finish_reasons": np.where(is_truncated, "length", "stop"),
            }
        )
