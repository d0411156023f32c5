"""All generation servers of a run: groups of samples are routed to them; servers die, join, leave.

Groups are routed when they begin. A group stays on its server, whose agent loops hold its
conversations. Groups of a server that has died, or was removed, begin again on others, with the
same seeds.

Each server is a worker group of its own. A server that has died is started again in the background.
It is up when it has started, and gets groups after the next push of weights. On devices that roles
share, starting takes the memory of a whole server: it waits until the servers have the devices
(`start_asleep`).

Long because: each call may show that a server has died, which changes the state of the pool.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Self

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import TimeoutsConfig
from mcore_rl.controller.dispatch import RemoteMethod
from mcore_rl.controller.object_columns import store_columns
from mcore_rl.controller.object_store import GENERATED_BYTES_PER_TOKEN
from mcore_rl.controller.pending_call import (
    CalledGroup,
    PendingCall,
    ReplyQueue,
    Timeout,
    UnansweredCall,
    WorkerError,
    describe_unanswered,
    find_stopped,
    gather_results,
    wait_for_survivors,
)
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.controller.worker_process import WorkerInfo
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.inference.protocol import DraftCounts, SamplingParams, ServerMemory, SleepTag
from mcore_rl.rollout.routing import GroupRouter, Stream, gather_prompts
from mcore_rl.rollout.worker import RolloutWorker
from mcore_rl.weight_sync.spec import WorkerLists

if TYPE_CHECKING:
    from mcore_rl.agents.frozen_model import ModelAddress

LoadFormat = Literal["auto", "checkpoint", "dummy"]
StartServer = Callable[[int], WorkerGroup]  # from a server's number; its workers are being built
POLL_S = 0.25  # the longest wait for an answer before the pool looks at its state again
CHECK_S = 1.0  # how often calls are compared with their time limits
# How long a server waits for all of its groups. Their samples are lost if it dies meanwhile.
COLLECT_ALL_S = 5.0
# Servers that are polled for samples every second; with more of them each may wait longer with its
# answer, up to a limit: for its share of the groups, and for all of them.
_SERVERS_PER_S, _MAX_COLLECT_S, _MAX_COLLECT_ALL_S = 32, 2.0, 10.0
# Prompt bytes per sample that are sent by value. Larger prompts go by reference, for which Ray
# takes 0.7 ms more of the driver's time.
BY_VALUE_BYTES = 128


class NoServersError(WorkerError):
    """No server is left that has the weights to serve, or that could take them now."""


@dataclass(eq=False, slots=True)
class Server:
    """A server that is up, or is being started."""

    number: int
    group: WorkerGroup
    restarts: int = 0
    starting: list[PendingCall[Any]] = field(default_factory=list)
    is_up: bool = False
    reads_weights: bool = True  # of the checkpoint, at its start
    version: int | None = None  # of its weights; None if it has none, or an incomplete version
    sent: list[PendingCall[Any]] = field(default_factory=list)  # calls without a result to wait for
    collecting: dict[Stream, PendingCall[list[Samples | None]]] = field(
        default_factory=dict
    )  # by stream
    last_collect_s: float = -math.inf  # when it was last called for samples, by time.monotonic
    # Groups abandoned since the call in `collecting`, whose result may have them; by stream.
    abandoned: dict[Stream, set[int]] = field(default_factory=dict)
    idle_s: float = 0.0  # since its last start, at the last call of ServerPool.idle_s

    def describe(self) -> str:
        """Return the number of the server, and its host once its processes have come up."""
        hosts = dict.fromkeys(info.host for info in self.group.worker_infos.values())
        return f"server {self.number}" + (f" on host {', '.join(hosts)}" if hosts else "")

    def is_late(self) -> bool:
        """Return whether a call has not been answered within its time limit."""
        calls = (*self.sent, *self.collecting.values(), *self.starting)
        return any(call.is_late() for call in calls)


class ServerPool:
    """All servers of a run. Not thread-safe, except for `close`.

    After the constructor, call `submit_prepare`, `submit_start`, then `mark_started`.

    Args:
        max_restarts: Maximum restarts per server.
        takes_turns: Whether servers share devices with other roles.
        desired: Returns the servers that the run is to have, read by `follow_desired`. None: all.
        load_format: See RolloutConfig. With "auto" a server that starts after the first push reads
            no weights.
    """

    name = "rollout"

    def __init__(
        self,
        start: StartServer,
        num_servers: int,
        *,
        max_restarts: int,
        takes_turns: bool,
        timeouts: TimeoutsConfig,
        desired: Callable[[], Collection[int]] | None = None,
        load_format: LoadFormat = "checkpoint",
    ) -> None:
        self._start, self._num_servers = start, num_servers
        self._max_restarts, self.takes_turns = max_restarts, takes_turns
        self._call_timeout = Timeout(timeouts.call_s, "timeouts.call_s")
        self._read_desired, self._load_format = desired, load_format
        self._lock = threading.RLock()  # held to start a server, and to close
        self._closed = False
        self._models: Mapping[str, ModelAddress] | None = None  # frozen models
        self.version = 0  # of the weights that a server needs to get groups
        self.membership = 0  # changes whenever a server joins or leaves those that are up
        # Sends the weights of `version` again, when no server is left that has them. None while
        # the trainer has already updated its weights.
        self.resend: Callable[[], None] | None = None
        self._router = GroupRouter()
        # Without a group, or a server fewer: before this call of `collect`, and its start.
        self._waited_s, self._wait_start_s = 0.0, time.monotonic()
        self._servers: dict[int, Server] = {}
        self._by_group: dict[CalledGroup, Server] = {}
        self._up: list[Server] = []  # by number
        self._serving: list[Server] = []  # those of `_up` that may get groups
        # Nothing that follows looks at all servers for an answer of one: those with new answers to
        # `sent` and `starting`, and those that may have samples or be without a call, by stream.
        self._replies, self._next_check_s = ReplyQueue(), 0.0
        self._answered: set[Server] = set()
        self._to_collect: defaultdict[str, set[Server]] = defaultdict(set)
        try:
            for number in range(num_servers):
                self._add_server(number)
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> list[WorkerGroup]:
        """Worker groups of all servers."""
        return [server.group for server in self._servers.values()]

    @property
    def worker_infos(self) -> dict[int, WorkerInfo]:
        """Host and process of each node of all servers, numbered in a row."""
        infos = [g.worker_infos[rank] for g in self.groups for rank in sorted(g.worker_infos)]
        return dict(enumerate(infos))

    @property
    def num_up(self) -> int:
        return len(self._up)

    @property
    def has_joining(self) -> bool:
        """True if a server is not up yet."""
        return len(self._up) < len(self._servers)

    def _add_server(self, number: int) -> Server:
        server = self._servers[number] = Server(number, self._start(number))
        self._by_group[server.group] = server
        return server

    def _start_again(self, server: Server) -> None:
        """Replace the worker group of a server, which has ended, and launch the new one."""
        del self._by_group[server.group]
        server.group = self._start(server.number)
        self._by_group[server.group] = server
        self._launch(server)

    def submit_prepare(self) -> list[PendingCall[list[None]]]:
        """Prepare all servers before the run; a server's death fails the call."""
        return [group.submit(RolloutWorker.prepare) for group in self.groups]

    def submit_start(self) -> list[PendingCall[list[None]]]:
        """Start all servers before the run; a server's death fails the call."""
        return [self._submit_start(server) for server in self._servers.values()]

    def _submit_start(self, server: Server) -> PendingCall[list[None]]:
        """Start a server; without weights if load_format lets the next push bring them."""
        formats = ("checkpoint",) if self.version else ("checkpoint", "auto")
        server.reads_weights = self._load_format in formats
        return server.group.submit(RolloutWorker.start, server.reads_weights)

    def mark_started(self) -> None:
        """Mark all servers as up.

        Those that read the checkpoint that the run begins with have version 0, others none.
        """
        self._mark_up([*self._servers.values()])

    def connect_models(self, addresses: Mapping[str, ModelAddress]) -> None:
        """Pass the addresses of frozen models to the servers, and to those that will join."""
        self._models = addresses
        self._call_servers(self._up, RolloutWorker.connect_models, addresses)

    def sleep(self, keep: bool = False) -> None:
        """Call RolloutWorker.sleep of the servers that are up."""
        self._call_servers(self._up, RolloutWorker.sleep, keep)

    def wake(self, tag: SleepTag) -> None:
        """Call RolloutWorker.wake of the servers that are up."""
        self._call_servers(self._up, RolloutWorker.wake, tag)

    def memory(self) -> list[ServerMemory]:
        """Return the memory of each node of the servers that are up."""
        return self._call_servers(self._up, RolloutWorker.memory)

    def take_draft_counts(self) -> DraftCounts:
        """Return the counts of drafts since the last call, of the servers that are up."""
        counts = self._call_servers(self._up, RolloutWorker.take_draft_counts)
        return sum(counts, DraftCounts())

    def list_parameters(self) -> WorkerLists:
        """Return what the parameters of a server's workers are made of (GenerationServer)."""
        lists = self._call_servers(self._up[:1], RolloutWorker.list_parameters)
        return next(filter(None, lists), [])

    def idle_s(self) -> list[float]:
        """Return each server's idle seconds (`IdleTimer`) since the last call, or since its start.

        Only of servers that are up.
        """
        servers = self._up
        answers = self._call_servers(servers, RolloutWorker.idle_s)
        totals = [total_s for total_s in answers if total_s is not None]
        alive = [server for server in servers if server.is_up]
        idle_s = []
        for server, total_s in zip(alive, totals, strict=True):
            idle_s.append(total_s - server.idle_s)
            server.idle_s = total_s
        return idle_s

    def shut_down(self) -> None:
        """Shut all servers down at the end of a run; ignore those that have died."""
        with self._lock:
            self._closed = True
        calls = [
            server.group.submit(RolloutWorker.shut_down)
            for server in self._up
            if not server.group.end_reason
        ]
        with contextlib.suppress(WorkerError):
            gather_results(calls)

    def close(self) -> None:
        """Kill all servers, and start none again. May be called twice, and from any thread."""
        with self._lock:
            self._closed = True
            for server in self._servers.values():
                server.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Groups of samples.

    def begin(self, prompts: Batch, sampling: SamplingParams, stream: Stream = "train") -> None:
        """Start the trajectories of these prompts; return immediately.

        The groups of one call are routed together, and those of a server start together. So the
        routing of a call on an idle pool depends on nothing else.

        Raises:
            ValueError: a group of the same id is being generated in the stream.
        """
        self._router.begin(prompts, sampling, stream)
        self._route()

    def collect(self, stream: Stream, wait_s: float, at_least: int | None = 1) -> list[Samples]:
        """Return samples of whole groups that have ended since the last call.

        Returns at once if no group of the stream is pending.

        Args:
            wait_s: Maximum wait for a first group.
            at_least: Number of groups that the caller needs to go on. None: all of them. A server
                answers when its share of them has ended, or all of its groups have. Otherwise it
                answers every quarter of a second, with many servers every 2 s, and with None every
                5 to 10 s.

        Raises:
            ConfigError, WorkerError: a reward or a loop raised; a server died once too often; no
                group has ended in timeouts.call_s.
            NoServersError: no server is left, and nobody sends it weights.
        """
        start_s, batches = time.monotonic(), list[Samples]()
        self._wait_start_s = start_s
        while self.num_outstanding(stream):
            waited_s = self._waited_s + time.monotonic() - self._wait_start_s
            if waited_s >= self._call_timeout.seconds:  # a call may be late by the same limit
                self._mark_late()
            self._poll()
            self._resend_if_needed()
            self._route()
            batches = self._collect(stream, at_least)
            left_s = start_s + wait_s - time.monotonic()
            if batches or left_s <= 0:
                break
            self._wait_for_server(min(left_s, POLL_S))
        self._check_wait(0.0 if batches else time.monotonic() - self._wait_start_s)
        return batches

    def poll(self, stream: Stream, at_least: int | None = 1) -> list[Samples]:
        """Collect without waiting or resending weights, while the trainer changes them.

        Of many servers about 32 a second are polled, each after 10 s at the latest.

        Args:
            at_least: As of `collect`. Unless it is None, each is polled after 2 s at the latest.
        """
        self._poll()
        self._route()
        num_serving, pause_s = len(self._serving), 0.0
        if num_serving > _SERVERS_PER_S:
            limit_s = _MAX_COLLECT_ALL_S if at_least is None else _MAX_COLLECT_S
            pause_s = min(num_serving / _SERVERS_PER_S, limit_s)
        return self._collect(stream, 0, pause_s)

    def pop_rerouted(self, stream: Stream) -> list[int]:
        """Return, once, the groups that began again on another server."""
        return self._router.pop_rerouted(stream)

    def abandon(self, stream: Stream, group_ids: Collection[int]) -> None:
        """End these groups: `collect` will not return them."""
        abandoned: dict[int, list[int]] = {}  # by server number
        for group in [self._router.remove(stream, group_id) for group_id in group_ids]:
            if group.server is not None:
                abandoned.setdefault(group.server, []).append(group.group_id)
        for server in [self._servers[number] for number in sorted(abandoned)]:
            if not self._is_serving(server):
                continue
            ids = abandoned[server.number]
            # The pending answer may have them, also if groups of these ids begin again meanwhile.
            if stream in server.collecting:
                server.abandoned.setdefault(stream, set()).update(ids)
            self._send(server, server.group.submit(RolloutWorker.abandon, stream, ids))

    def abandon_all(self, stream: Stream) -> None:
        """End all groups of a stream that were begun and not collected."""
        self.abandon(stream, self._router.list_ids(stream))

    def num_outstanding(self, stream: Stream) -> int:
        """Return the number of groups of a stream that were begun and not collected."""
        return self._router.count(stream)

    def _is_serving(self, server: Server) -> bool:
        """Return whether a server may get groups."""
        return server.is_up and server.version == self.version

    def _list_servers(self) -> None:
        """List the servers that are up and those that serve, after a change."""
        servers = (server for _, server in sorted(self._servers.items()))
        self._up = [server for server in servers if server.is_up]
        self._serving = [server for server in self._up if self._is_serving(server)]
        self._router.set_servers(server.number for server in self._serving)
        for server in self._serving:
            for stream in self._router.list_streams(server.number):
                self._to_collect[stream].add(server)

    def _route(self) -> None:
        """Begin the groups that have no server."""
        for number, groups in self._router.route():
            server, stream, sampling = self._servers[number], groups[0].stream, groups[0].sampling
            self._to_collect[stream].add(server)
            prompts = store_if_large(gather_prompts(groups), sampling.n)
            call = server.group.submit(RolloutWorker.begin, prompts, sampling, stream)
            self._send(server, call)

    def _send(self, server: Server, call: PendingCall[Any]) -> None:
        """Wait for no result of a call; `_poll` looks at its answer."""
        server.sent.append(call)
        self._replies.watch([call])

    def _resend_if_needed(self) -> None:
        """Resend weights if no server has the version to serve, and none is being started."""
        if self._serving:
            return
        if not self._up and any(server.starting for server in self._servers.values()):
            return
        if self.resend is None:
            raise NoServersError(
                f"{self.name}: no server is left that has version {self.version} of the weights, "
                "and the trainer has already updated: a run that keeps checkpoints continues "
                "from the last one with resume=auto"
            )
        self.resend()

    def _collect(self, stream: Stream, at_least: int | None, pause_s: float = 0.0) -> list[Samples]:
        """Return samples of servers that have answered, and poll those that have groups.

        A server that was polled less than `pause_s` ago is left to a later call.
        """
        marked, batches, num_serving = self._to_collect[stream], list[Samples](), len(self._serving)
        wait_s, now_s = self._get_collect_s(at_least, num_serving), time.monotonic()
        for server in sorted(filter(self._is_serving, marked), key=attrgetter("number")):
            if (call := server.collecting.get(stream)) is not None:
                if not self._has_succeeded(server, call):
                    marked.discard(server)
                    continue
                del server.collecting[stream]
                samples = call.result()[0]  # node 0 has the server; others return None
                assert samples is not None
                batches += self._take_pending(server, stream, samples)
            if groups := self._router.get_groups(server.number, stream):
                if now_s < server.last_collect_s + pause_s:
                    continue
                share = len(groups) if at_least is None else math.ceil(at_least / num_serving)
                self._submit_collect(server, stream, wait_s, share)
            marked.discard(server)
        return batches

    def _submit_collect(self, server: Server, stream: Stream, wait_s: float, share: int) -> None:
        """Call a server for samples of `share` groups of the stream."""
        groups = self._router.get_groups(server.number, stream).values()
        num_tokens = sum(sorted(group.max_tokens for group in groups)[-max(share, 1) :])
        num_bytes = num_tokens * GENERATED_BYTES_PER_TOKEN
        collect = RolloutWorker.collect.with_result_bytes(num_bytes)
        call = server.group.submit(collect, stream, wait_s, share)
        server.collecting[stream] = call
        server.last_collect_s = time.monotonic()
        self._replies.watch([call])

    def _get_collect_s(self, at_least: int | None, num_serving: int) -> float:
        """Return how long a server may wait with its answer. It takes no other call meanwhile."""
        if at_least == 0:
            return 0.0
        least_s, most_s = POLL_S, _MAX_COLLECT_S
        if at_least is None:
            least_s, most_s = COLLECT_ALL_S, _MAX_COLLECT_ALL_S
        collect_s = min(max(num_serving / _SERVERS_PER_S, least_s), most_s)
        return min(collect_s, self._call_timeout.seconds / 4)

    def _take_pending(self, server: Server, stream: Stream, batch: Samples) -> Iterator[Samples]:
        """Yield an answer without groups that were abandoned since the call was made."""
        abandoned = server.abandoned.pop(stream, set())
        if not len(batch):
            return
        ids = batch.array("group_ids").tolist()
        pending = self._router.get_groups(server.number, stream).keys() - abandoned
        rows = [row for row, group in enumerate(ids) if group in pending]
        for group in {ids[row] for row in rows}:
            self._router.remove(stream, group)
        if rows:
            yield batch.take(rows) if len(rows) < len(ids) else batch

    def _wait_for_server(self, seconds: float) -> None:
        """Wait until a server answers or has started."""
        self._mark_answered(self._replies.wait(seconds))

    def _mark_answered(self, calls: Iterable[PendingCall[Any]]) -> None:
        """Mark the servers of calls with new replies, for `_poll` and `_collect`."""
        for call in calls:
            if (server := self._by_group.get(call.group)) is None:  # it has died since
                continue
            streams = [stream for stream, other in server.collecting.items() if other is call]
            for marked in [self._to_collect[stream] for stream in streams] or [self._answered]:
                marked.add(server)

    def _mark_late(self) -> None:
        """Mark the servers that have not answered a call in time, as if they had answered."""
        late = [server for server in self._servers.values() if server.is_late()]
        for marked in (self._answered, *self._to_collect.values()):
            marked.update(late)
        self._next_check_s = time.monotonic() + CHECK_S

    def _check_wait(self, seconds: float) -> None:
        """Add to the time without a group. At the limit, restart servers with stopped processes.

        Raises:
            WorkerError: no process is stopped.
        """
        self._waited_s = self._waited_s + seconds if seconds else 0.0
        if self._waited_s < self._call_timeout.seconds:
            return
        silent = {
            UnansweredCall(f"{server.group.name}.collect", rank, info): server
            for server in self._serving
            for rank, info in server.group.worker_infos.items()
        }
        stopped = find_stopped([*silent])
        for server in {silent[rank] for rank in stopped}:
            ranks = [rank for rank in stopped if silent[rank] is server]
            self._restart(server, WorkerError(describe_unanswered(ranks, str(self._call_timeout))))
        if stopped:
            self._waited_s = 0.0
            return
        reason = (
            describe_unanswered([*silent], str(self._call_timeout)) if silent else "no server is up"
        )
        raise WorkerError(f"no group has come back: {reason}")

    def _release_groups(self, server: Server) -> None:
        """Let groups of a server be routed again, with all the time that groups have."""
        self._waited_s, self._wait_start_s = 0.0, time.monotonic()
        self._router.release(server.number)

    # New weights.

    def admit(self) -> None:
        """Mark servers as up that have started. If none is up, wait for one.

        Raises:
            ConfigError, WorkerError: a server cannot be started.
            NoServersError: none is left on shared devices, where others start with `start_asleep`.
        """
        self._poll()
        while not self._up:
            if not self._wait_for_starts():
                raise NoServersError(f"{self.name}: no server is left that could take weights")

    def attempt(
        self,
        submit: Callable[[WorkerGroup, int], PendingCall[Any]],
        beside: Sequence[PendingCall[Any]],
        timeout: Timeout,
        on_death: Callable[[], None] | None = None,
    ) -> bool:
        """Replace the weights of all servers that are up, with other calls.

        Args:
            submit: Calls a server, given its group and its index among those that are up.
            beside: Calls on other groups that belong to it.
            on_death: Ends what the others would wait for.

        Returns:
            False if a server has died. It is started again, and no other is served before another
            attempt: their weights may be incomplete.

        Raises:
            ConfigError, WorkerError: see `gather_results`; for failures that no death has caused.
        """
        servers = self._up
        calls = [submit(server.group, index) for index, server in enumerate(servers)]
        groups = [server.group for server in servers]
        deaths = wait_for_survivors([*calls, *beside], groups, timeout, on_death)
        if deaths:
            for server in servers:
                server.version = None
            self._list_servers()
        for index, error in deaths.items():
            self._restart(servers[index], error)
        return not deaths

    def mark_updated(self, version: int) -> None:
        """Record that all servers that are up have this version, which is to be served."""
        self.version = version
        for server in self._up:
            server.version = version
        self._list_servers()
        self._router.clear_last_servers()

    def start_asleep(self) -> None:
        """Start servers that are not up, and let them sleep; shared devices have to be free.

        Raises:
            ConfigError, WorkerError: a server cannot be started.
        """
        while self._wait_for_starts():
            pass
        joining = [server for server in self._servers.values() if not server.is_up]
        self._gather_from(joining, [self._submit_start(server) for server in joining])
        self._mark_up([s for s in joining if not s.starting])  # else it has died in the call
        joined = [server for server in joining if server.is_up]
        self._call_servers(joined, RolloutWorker.sleep)
        for server in joined:
            server.version = None
        self._list_servers()

    # Servers that join, leave and die.

    def follow_desired(self) -> None:
        """Add and remove servers as the run is to have, but never the last one that is up."""
        if self._read_desired is None:
            return
        try:
            desired = {*self._read_desired()}
        except ConfigError as error:
            print(f"servers stay as they are: {error}")
            return
        for number in sorted(desired - self._servers.keys()):
            self.add(number)
            print(f"{self._servers[number].group.name} is started, as is wanted")
        for number in sorted(self._servers.keys() - desired):
            if [server.number for server in self._up] != [number]:
                name = self._servers[number].group.name
                self.remove(number)
                print(f"{name} has left, as is wanted")

    def add(self, number: int) -> None:
        """Start a server that was removed. It gets groups after the next push of weights.

        Raises:
            ConfigError: it exists, or the run has no devices for a server of this number.
        """
        if number in self._servers or not 0 <= number < self._num_servers:
            free = sorted({*range(self._num_servers)} - {*self._servers})
            raise ConfigError(f"server {number} cannot be added; allowed: {free or 'none now'}")
        with self._lock:
            if not self._closed:
                self._launch(self._add_server(number))

    def remove(self, number: int) -> None:
        """End a server; its groups begin again on others.

        Raises:
            ConfigError: it does not exist, or is the last one that is up.
        """
        if number not in self._servers or [s.number for s in self._up] == [number]:
            allowed = sorted(self._servers) if len(self._up) > 1 else "none, one has to stay"
            raise ConfigError(f"server {number} cannot be removed; allowed: {allowed}")
        server = self._servers.pop(number)
        del self._by_group[server.group]
        self.membership += 1
        self._release_groups(server)
        self._unmark(server)
        self._list_servers()
        if server.is_up:  # else the call would wait until it has started
            with contextlib.suppress(WorkerError):
                gather_results([server.group.submit(RolloutWorker.shut_down)])
        server.group.close()

    def _unmark(self, server: Server) -> None:
        """Forget answers of a server that has ended."""
        for marked in (self._answered, *self._to_collect.values()):
            marked.discard(server)

    def _poll(self) -> None:
        """Process starts and calls that have ended.

        Raises:
            ConfigError, WorkerError: a failure that is no death, or one death too many.
        """
        self._mark_answered(self._replies.wait(0.0))
        if time.monotonic() >= self._next_check_s:
            self._mark_late()
        for server in sorted(self._answered, key=attrgetter("number")):
            for call in list(server.sent):
                # A death empties server.sent.
                if call in server.sent and self._has_succeeded(server, call):
                    server.sent.remove(call)
            if server.starting and self._start_has_ended(server):
                self._finish_start(server)
            self._answered.discard(server)

    def _start_has_ended(self, server: Server) -> bool:
        """Return whether a start has ended. If it is late while others serve, begin it again.

        Its node may be gone.

        Raises:
            WorkerError: it is late, and no other server is up, or all wait for it (on shared
                devices).
        """
        try:
            return all(call.has_ended() for call in server.starting)
        except WorkerError as error:
            if self.takes_turns or not self._up:
                raise
            with self._lock:
                if self._closed:
                    raise
                print(f"{server.describe()}: {str(error).splitlines()[0]} It is started again")
                self._start_again(server)
            return False

    def _finish_start(self, server: Server) -> None:
        """Mark a server up whose start has ended, or restart it if it has died."""
        try:
            gather_results(server.starting)
            wait_until_built([server.group])
        except WorkerError as error:
            return self._restart(server, error)
        server.starting = []
        if not self.takes_turns:
            self._mark_up([server])

    def _mark_up(self, servers: Sequence[Server]) -> None:
        """Mark servers as up, and pass them the addresses of frozen models."""
        self.membership += len(servers)
        for server in servers:
            server.is_up, server.version = True, 0 if server.reads_weights else None
            if server.restarts:
                print(f"{server.group.name} is up again, and gets its weights with the next push")
            if self._models is not None:
                call = server.group.submit(RolloutWorker.connect_models, self._models)
                self._send(server, call)
        self._list_servers()

    def _wait_for_starts(self) -> bool:
        """Wait briefly for servers that are being started; return False if there are none."""
        is_starting = any(server.starting for server in self._servers.values())
        if is_starting:
            self._mark_answered(self._replies.wait(POLL_S))
            self._poll()
        return is_starting

    def _has_succeeded(self, server: Server, call: PendingCall[Any]) -> bool:
        """Return whether a call has succeeded. Restart a server that has died or is late.

        Raises:
            ConfigError, WorkerError: as `PendingCall.result`, for other failures.
        """
        try:
            if not call.has_ended():
                return False
        except WorkerError as silence:  # its time limit is over
            self._restart(server, silence)
            return False
        if (error := call.end_if_rank_died()) is not None:
            self._restart(server, error)
            return False
        if call.has_failed:
            call.result()
        return True

    def _call_servers[**P, T](
        self,
        servers: Sequence[Server],
        method: RemoteMethod[P, list[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call a method; return the results of all nodes. Restart servers that die in the call."""
        calls = [server.group.submit(method, *args, **kwargs) for server in servers]
        return self._gather_from(servers, calls)

    def _gather_from[T](
        self, servers: Sequence[Server], calls: Sequence[PendingCall[list[T]]]
    ) -> list[T]:
        """Return the results of a call on each server. Restart servers that die in the call."""
        if not calls:
            return []
        deaths = wait_for_survivors(calls, [server.group for server in servers])
        for index, error in deaths.items():
            self._restart(servers[index], error)
        alive = [call for index, call in enumerate(calls) if index not in deaths]
        return [value for values in gather_results(alive) for value in values]

    def _restart(self, server: Server, error: WorkerError) -> None:
        """Start a server again that has died of `error`, and release its groups.

        Raises:
            WorkerError: it has died too often.
        """
        with self._lock:
            server.group.close()
            if self._closed:
                raise error
            self._release_groups(server)
            self._unmark(server)
            server.is_up, server.version = False, None
            server.idle_s = 0.0
            server.starting, server.sent = [], []
            server.collecting, server.abandoned = {}, {}
            self.membership += 1
            self._list_servers()
            limit = f"rollout.max_restarts={self._max_restarts}"
            lost = f"{server.describe()} is lost: {error}"
            if server.restarts >= self._max_restarts:
                raise WorkerError(f"{lost}\n\n(It is not started again: {limit})") from error
            server.restarts += 1
            print(f"{lost.splitlines()[0]} It is started again: {server.restarts}, {limit}")
            self._start_again(server)

    def _launch(self, server: Server) -> None:
        """Submit the calls that start a server; on shared devices only those before the start."""
        group = server.group
        server.starting = [*group.build_calls, group.submit(RolloutWorker.prepare)]
        if not self.takes_turns:
            server.starting.append(self._submit_start(server))
        self._replies.watch(server.starting)


def store_if_large(prompts: Batch, num_samples: int) -> Samples:
    """Return prompts by reference if they are large for the number of samples of each.

    Only the server that begins them fetches them. The object is freed when the call has ended. The
    driver keeps the prompts and owns the object, so it is lost only with the driver; prompts of
    groups that begin again are stored again.
    """
    is_small = prompts.num_bytes <= BY_VALUE_BYTES * num_samples * len(prompts)
    return prompts if is_small else store_columns(prompts)
