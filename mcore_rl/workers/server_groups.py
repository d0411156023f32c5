"""The servers of a run, each a group of its own: they may die, be started again, join and leave.

A server that has died is started again in the background. It is up when it has started, and joins
the others when weights are sent next. On devices that roles share it waits with its start, which
takes the memory of a whole server, until these have their turn (`start_asleep`).
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import TimeoutsConfig
from mcore_rl.controller.pending import (
    Limit,
    PendingCall,
    Replies,
    WorkerError,
    gathered,
    outlived,
)
from mcore_rl.controller.rank_actor import WorkerInfo
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.rollout.protocol import ServerMemory, SleepTag

LoadFormat = Literal["auto", "checkpoint", "dummy"]
StartServer = Callable[[int], WorkerGroup]  # the workers of the server of a number, being built
LOOK_S = 0.25  # how often it is looked what servers have answered


@dataclass(eq=False, slots=True)
class Server:
    """One that is up, or is being started."""

    number: int
    group: WorkerGroup
    restarts: int = 0
    starting: list[PendingCall] = field(default_factory=list)
    is_up: bool = False
    reads_weights: bool = True  # those of the checkpoint, at its start
    version: int | None = None  # of its weights; None while it has none, or not all of them
    sent: list[PendingCall] = field(default_factory=list)  # calls whose results nobody waits for
    collecting: dict[str, PendingCall] = field(default_factory=dict)  # by stream
    # Groups that were abandoned since it was asked to collect: that answer may have them.
    unwanted: dict[str, set[int]] = field(default_factory=dict)
    idle_s: float = 0.0  # since it was started last; when it was last asked


class ServerGroups(ABC):
    """One thread at a time may use it, but for `close`."""

    name = "rollout"

    def __init__(
        self,
        start: StartServer,
        num_servers: int,
        *,
        max_restarts: int,
        takes_turns: bool,
        timeouts: TimeoutsConfig,
        wanted: Callable[[], Collection[int]] | None = None,
        load_format: LoadFormat = "checkpoint",
    ) -> None:
        """Make the groups: `submit` prepare, `submit_start`, then call `started`.

        Args:
            takes_turns: They share devices with other roles.
            wanted: Returns which servers there are to be (`follow_wanted`); None: always all.
            load_format: As of RolloutConfig. With "auto", servers of later versions than the
                checkpoint's start without weights.
        """
        self._start, self._num_servers = start, num_servers
        self._max_restarts, self.takes_turns = max_restarts, takes_turns
        self._call_limit = Limit(timeouts.call_s, "timeouts.call_s")
        self._read_wanted, self._load_format = wanted, load_format
        self._lock = threading.RLock()  # of starts and the end
        self._closed = False
        self._models: Any = None  # addresses of frozen models
        self.version = 0  # of the weights that a server needs to serve
        self.membership = 0  # another number whenever other servers are up
        self._servers: dict[int, Server] = {}
        self._replies = Replies()  # to calls that were waited for
        try:
            for number in range(num_servers):
                self._servers[number] = Server(number, start(number))
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> list[WorkerGroup]:
        return [server.group for server in self._servers.values()]

    @property
    def worker_infos(self) -> dict[int, WorkerInfo]:
        """Where the nodes of all servers are, in a row."""
        infos = [g.worker_infos[rank] for g in self.groups for rank in sorted(g.worker_infos)]
        return dict(enumerate(infos))

    def submit(self, method: str, *args: Any) -> list[PendingCall]:
        """A call on each server before the run: whoever waits for them, ends at a failure."""
        return [getattr(group, method).submit(*args) for group in self.groups]

    def submit_start(self) -> list[PendingCall]:
        """Start all servers before the run, as `submit`."""
        return [self._submit_start(server) for server in self._servers.values()]

    def _submit_start(self, server: Server) -> PendingCall:
        formats = ("checkpoint",) if self.version else ("checkpoint", "auto")
        server.reads_weights = self._load_format in formats
        given = {} if server.reads_weights else {"reads_weights": False}
        return server.group.start.submit(**given)

    def started(self) -> None:
        """All have started: with the run's checkpoint they serve version 0, else none yet."""
        for server in self._servers.values():
            self._enter(server)

    def connect_models(self, addresses: Any) -> None:
        """Tells the servers, and those that will join, where the frozen models are."""
        self._models = addresses
        self._call(self._up, "connect_models", addresses)

    def sleep(self, keep: bool = False) -> None:
        """As RolloutWorker.sleep, on those that are up."""
        self._call(self._up, "sleep", *([keep] if keep else []))

    def wake(self, tag: SleepTag) -> None:
        self._call(self._up, "wake", tag)

    def memory(self) -> list[ServerMemory]:
        """Of each node of the servers that are up."""
        return self._call(self._up, "memory")

    def idle_s(self) -> list[float]:
        """Of each server that is up: seconds with nothing to do (`IdleTime`) since the last call.

        Of one that has started since, from then on. What has died or was removed is not among them.
        """
        asked = self._up
        found = [seconds for seconds in self._call(asked, "idle_s") if seconds is not None]
        alive = [server for server in asked if server.is_up]
        since = []
        for server, seconds in zip(alive, found, strict=True):
            since.append(seconds - server.idle_s)
            server.idle_s = seconds
        return since

    def shut_down(self) -> None:
        """At the end of a run, whatever has died."""
        with self._lock:
            self._closed = True
        calls = [server.group.shut_down.submit() for server in self._up if not server.group.ended]
        with contextlib.suppress(WorkerError):
            gathered(calls)

    def close(self) -> None:
        """Ends all servers immediately, and starts none again. May be called twice."""
        with self._lock:
            self._closed = True
            for server in self._servers.values():
                server.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # New weights.

    def admit(self) -> None:
        """Servers that have started by now are up. If none is, waits for one.

        Raises:
            ConfigError, WorkerError: a server cannot be started; on shared devices, none is left.
        """
        self._tend()
        while not self._up:
            if not self._wait_for_starts():
                raise WorkerError(f"{self.name}: no server is left that could take weights")

    def attempt(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        beside: Sequence[PendingCall],
        limit: Limit,
        on_death: Callable[[], None] | None = None,
    ) -> bool:
        """Calls a method that replaces weights on all servers that are up, beside other calls.

        `arguments` takes the place of a server among them. False if some have died: they are out,
        and what the others have is not to be served before another attempt. `on_death` ends what
        the others would wait for.

        Raises:
            ConfigError, WorkerError: as `gathered`, for what is not due to a death.
        """
        servers = self._up
        calls = [
            getattr(server.group, method).submit(*arguments(place))
            for place, server in enumerate(servers)
        ]
        groups = [server.group for server in servers]
        deaths = outlived([*calls, *beside], groups, limit, on_death)
        if deaths:
            for server in servers:
                server.version = None
        for place, error in deaths.items():
            self._lost(servers[place], error)
        return not deaths

    def updated(self, version: int) -> None:
        """All that are up have this version, and it is the one to serve."""
        self.version = version
        for server in self._up:
            server.version = version

    @property
    def num_up(self) -> int:
        return len(self._up)

    @property
    def has_joining(self) -> bool:
        """Whether a server waits to be up."""
        return len(self._up) < len(self._servers)

    def start_asleep(self) -> None:
        """On shared devices, which are free now: starts those that are to join; then they sleep."""
        while self._wait_for_starts():
            pass
        joining = [server for server in self._servers.values() if not server.is_up]
        self._results(joining, [self._submit_start(server) for server in joining])
        for server in joining:
            if not server.starting:  # else it has died of it
                self._enter(server)
        joined = [server for server in joining if server.is_up]
        self._call(joined, "sleep")
        for server in joined:
            server.version = None

    # Servers that come and go.

    def follow_wanted(self) -> None:
        """Before a push: those that are wanted start, others end, but for the last that is up."""
        if self._read_wanted is None:
            return
        try:
            wanted = {*self._read_wanted()}
        except ConfigError as error:
            print(f"servers stay as they are: {error}")
            return
        for number in sorted(wanted - self._servers.keys()):
            self.add(number)
            print(f"{self._servers[number].group.name} is started, as is wanted")
        for number in sorted(self._servers.keys() - wanted):
            if [server.number for server in self._up] != [number]:
                name = self._servers[number].group.name
                self.remove(number)
                print(f"{name} has left, as is wanted")

    def add(self, number: int) -> None:
        """Starts a server that was removed. It serves when weights have been sent next.

        Raises:
            ConfigError: it is there, or the run has no devices for one of this number.
        """
        if number in self._servers or not 0 <= number < self._num_servers:
            free = sorted({*range(self._num_servers)} - {*self._servers})
            raise ConfigError(f"server {number} cannot be added; allowed: {free or 'none now'}")
        with self._lock:
            if not self._closed:
                server = self._servers[number] = Server(number, self._start(number))
                self._launch(server)

    def remove(self, number: int) -> None:
        """Ends a server; its groups begin again on others.

        Raises:
            ConfigError: there is none of this number, or it is the last one that is up.
        """
        if number not in self._servers or [s.number for s in self._up] == [number]:
            others = sorted(self._servers) if len(self._up) > 1 else "none, one has to stay"
            raise ConfigError(f"server {number} cannot be removed; allowed: {others}")
        server = self._servers.pop(number)
        self.membership += 1
        self._release(server)
        if server.is_up:  # else it would be waited for until it has started
            with contextlib.suppress(WorkerError):
                gathered([server.group.shut_down.submit()])
        server.group.close()

    @property
    def _up(self) -> list[Server]:
        """In the order of their numbers."""
        found = (server for _, server in sorted(self._servers.items()))
        return [server for server in found if server.is_up]

    def _tend(self) -> None:
        """Takes in starts and answers that nobody waits for.

        Raises:
            ConfigError, WorkerError: of a failure that is no death, or of one death too many.
        """
        for server in list(self._servers.values()):
            for call in list(server.sent):
                if call in server.sent and self._answered(server, call):  # else it has died
                    server.sent.remove(call)
            if server.starting and self._start_has_ended(server):
                self._finish_start(server)

    def _start_has_ended(self, server: Server) -> bool:
        """Where it takes too long while others serve, as its node is gone, it begins again.

        Raises WorkerError when no other is up, or all wait for it (on shared devices).
        """
        try:
            return all(call.has_ended() for call in server.starting)
        except WorkerError as error:
            if self.takes_turns or not self._up:
                raise
            with self._lock:
                if self._closed:
                    raise
                print(f"{str(error).splitlines()[0]} It is started again")
                server.group = self._start(server.number)
                self._launch(server)
            return False

    def _finish_start(self, server: Server) -> None:
        try:
            gathered(server.starting)
            wait_until_built([server.group])
        except WorkerError as error:
            return self._lost(server, error)
        server.starting = []
        if not self.takes_turns:
            self._enter(server)

    def _enter(self, server: Server) -> None:
        server.is_up, server.version = True, 0 if server.reads_weights else None
        self.membership += 1
        if server.restarts:
            print(f"{server.group.name} is up again, and gets its weights with the next push")
        if self._models is not None:
            server.sent.append(server.group.connect_models.submit(self._models))

    def _wait_for_starts(self) -> bool:
        """Whether there were any that have not ended; looks once."""
        calls = [call for server in self._servers.values() for call in server.starting]
        if calls:
            self._wait_for_reply(calls, LOOK_S)
            self._tend()
        return bool(calls)

    def _wait_for_reply(self, calls: Sequence[PendingCall], seconds: float) -> None:
        """Until a rank of one of these answers, or of others that have been waited for."""
        self._replies.watch(calls)
        self._replies.wait(seconds)

    def _answered(self, server: Server, call: PendingCall) -> bool:
        """Whether a call has succeeded; not if its server has died of it, or is silent too long.

        Raises:
            ConfigError, WorkerError: as `PendingCall.result`, for other failures.
        """
        try:
            if not call.has_ended():
                return False
        except WorkerError as silence:  # its limit is over
            self._lost(server, silence)
            return False
        if (error := call.death()) is not None:
            self._lost(server, error)
            return False
        call.result()
        return True

    def _call(self, servers: Sequence[Server], method: str, *args: Any) -> list[Any]:
        """The results of all their nodes; of those that do not die of it."""
        return self._results(servers, [getattr(s.group, method).submit(*args) for s in servers])

    def _results(self, servers: Sequence[Server], calls: Sequence[PendingCall]) -> list[Any]:
        """Return the results of a call on each of these servers, as `_call`."""
        if not calls:
            return []
        deaths = outlived(calls, [server.group for server in servers])
        for place, error in deaths.items():
            self._lost(servers[place], error)
        alive = [call for place, call in enumerate(calls) if place not in deaths]
        return [value for values in gathered(alive) for value in values]

    def _lost(self, server: Server, error: WorkerError) -> None:
        """It is out, and started again. Raises WorkerError when it has died too often."""
        with self._lock:
            server.group.close()
            if self._closed:
                raise error
            self._release(server)
            server.is_up, server.version = False, None
            server.idle_s = 0.0
            server.starting, server.sent = [], []
            server.collecting, server.unwanted = {}, {}
            self.membership += 1
            limit = f"rollout.max_restarts={self._max_restarts}"
            if server.restarts >= self._max_restarts:
                raise WorkerError(f"{error}\n\n(It is not started again: {limit})") from error
            server.restarts += 1
            print(f"{str(error).splitlines()[0]} It is started again: {server.restarts}, {limit}")
            server.group = self._start(server.number)
            self._launch(server)

    def _launch(self, server: Server) -> None:
        group = server.group
        server.starting = [*group.building, group.prepare.submit()]
        if not self.takes_turns:
            server.starting.append(self._submit_start(server))

    @abstractmethod
    def _release(self, server: Server) -> None:
        """What it has not answered belongs to nobody."""
