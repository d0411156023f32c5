"""Generation over all servers of a run: groups of samples are begun, and come back once each.

Groups are routed when they begin. One stays on its server, whose agent loops hold its
conversations; those of a server that has died, or was removed, begin again on others, with the same
seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from mcore_rl.controller.object_columns import store
from mcore_rl.controller.object_store import MADE_BYTES_PER_TOKEN
from mcore_rl.controller.pending import WorkerError
from mcore_rl.controller.silence import Silent, find_stopped, report
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rollout.routing import Asked, asked_together, prompts_of, route, tokens_by_server
from mcore_rl.rollout.server_groups import LOOK_S, Server, ServerGroups

ALL = 1 << 31  # more groups than anybody asks for at once
# How long a server waits for all its groups: what it has made since is lost where it dies.
TOGETHER_S = 5.0
# How many servers may be asked again every LOOK_S: with more of them each waits longer.
_AT_ONCE, _MOST_S = 8, 2.0
# Of prompts in a call, for each sample that is made of them. Larger ones go by reference, for which
# Ray needs 0.7 ms more of the driver.
BY_VALUE_BYTES = 128


class ServerPool(ServerGroups):
    """See `ServerGroups` for how servers come and go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ServerGroups."""
        self._asked: dict[tuple[str, int], Asked] = {}  # what has not come back, by group
        self._homes: dict[int, int] = {}  # the last server of a group, with these weights
        self._rerouted: list[tuple[str, int]] = []  # groups that another server has begun again
        self._waited_s = 0.0  # since a group has come
        # Sends the version that is to be served again; None while the trainer is busy with its own
        # weights. It is called when no server is left that has it.
        self.resend: Callable[[], None] | None = None
        super().__init__(*args, **kwargs)

    def begin(self, prompts: Batch, sampling: SamplingParams, stream: str = "train") -> None:
        """Starts the trajectories of these prompts; returns immediately.

        The groups of one call are routed together, by `route`, and those of a server start
        together. What an idle pool does with a call depends on nothing else.

        Raises:
            ValueError: a group of this id is being generated in the stream.
        """
        ids = [int(group) for group in prompts.array("group_ids")]
        if len(set(ids)) < len(ids) or any((stream, group) in self._asked for group in ids):
            raise ValueError(f"a group of {stream!r} among {ids} would be generated twice at once")
        made = asked_together(prompts, sampling, stream)
        self._asked |= {(stream, one.group_id): one for one in made}
        self._route()

    def collect(self, stream: str, wait_s: float, at_least: int = 1) -> list[Batch]:
        """Samples of groups of a stream that have ended since the last call, in whole groups.

        Waits up to `wait_s` until there is one; returns at once if none is being generated.
        `at_least` is for who can do nothing with fewer: a server answers when its share of them has
        ended, or none of its groups runs any more, and otherwise every quarter of a second, up to
        every 2 s with many servers; with `ALL` every few seconds.

        Raises:
            ConfigError, WorkerError: a reward or a loop raised; a server died once too often; no
                group has ended in timeouts.call_s; no server is left, and nobody sends it weights.
        """
        begun, found = time.monotonic(), list[Batch]()
        while self.num_outstanding(stream):
            self._tend()
            self._refill()
            self._route()
            found = self._answers(stream, at_least)
            left_s = begun + wait_s - time.monotonic()
            if found or left_s <= 0:
                break
            self._wait(min(left_s, LOOK_S))
        self._check_waited(0.0 if found else time.monotonic() - begun)
        return found

    def tend(self, stream: str) -> list[Batch]:
        """As `collect`, at once, for while the trainer changes its weights: they are not resent."""
        self._tend()
        self._route()
        return self._answers(stream, 0)

    def rerouted(self, stream: str) -> list[int]:
        """Groups of a stream that were begun again since the last call: their server has died."""
        found = [group for its, group in self._rerouted if its == stream]
        self._rerouted = [one for one in self._rerouted if one[0] != stream]
        return list(dict.fromkeys(found))

    def abandon(self, stream: str, group_ids: Collection[int]) -> None:
        """Ends these groups: they never come by `collect`."""
        ended = [self._asked.pop((stream, group)) for group in group_ids]
        self._rerouted = [one for one in self._rerouted if one in self._asked]
        for server in self._serving:
            its = [one.group_id for one in ended if one.server == server.number]
            if not its:
                continue
            # That answer may have them, from before they begin again: its calls run in order.
            if stream in server.collecting:
                server.unwanted.setdefault(stream, set()).update(its)
            server.sent.append(server.group.abandon.submit(stream, its))

    def num_outstanding(self, stream: str) -> int:
        """Groups of a stream that have not come back."""
        return sum(one.stream == stream for one in self._asked.values())

    def updated(self, version: int) -> None:
        super().updated(version)
        self._homes.clear()  # nothing that is cached of another version is read

    @property
    def _serving(self) -> list[Server]:
        """Those that groups are routed to."""
        return [server for server in self._up if server.version == self.version]

    def _release(self, server: Server) -> None:
        for one in self._asked.values():
            if one.server == server.number:
                one.server, one.is_again = None, True

    def _route(self) -> None:
        """Begins the groups that no server has."""
        waiting = [one for one in self._asked.values() if one.server is None]
        numbers = [server.number for server in self._serving]
        if not waiting or not numbers:
            return
        outstanding = tokens_by_server(self._asked.values(), numbers)
        parts: dict[tuple[int, str, SamplingParams], list[Asked]] = {}
        for one, number in zip(waiting, route(waiting, outstanding, self._homes), strict=True):
            one.server = self._homes[one.group_id] = number
            if one.is_again:
                self._rerouted.append((one.stream, one.group_id))
            parts.setdefault((number, one.stream, one.sampling), []).append(one)
        for (number, stream, sampling), part in parts.items():
            server = self._servers[number]
            given = as_sent(prompts_of(part), sampling.n)
            server.sent.append(server.group.begin.submit(given, sampling, stream))

    def _refill(self) -> None:
        """Where no server has the version to serve, and none is being started: it is sent again."""
        is_starting = any(server.starting for server in self._servers.values())
        if self._serving or (is_starting and not self._up):
            return
        if self.resend is None:
            raise WorkerError(
                f"{self.name}: no server is left that has version {self.version} of the weights, "
                "and the trainer is at its next: a run that keeps checkpoints goes on "
                "from the last one with resume=auto"
            )
        self.resend()

    def _answers(self, stream: str, at_least: int) -> list[Batch]:
        serving = self._serving
        taken = [self._taken(server, stream, at_least, len(serving)) for server in serving]
        return [batch for batches in taken for batch in batches]

    def _taken(
        self, server: Server, stream: str, at_least: int, num_serving: int
    ) -> Iterator[Batch]:
        """What it has answered; while it has more of the stream, it is asked again."""
        call = server.collecting.get(stream)
        if call is not None:
            if not self._answered(server, call):
                return
            del server.collecting[stream]
            yield from self._wanted(server, stream, call.result()[0])
        if its := self._its(server, stream):
            held_s = self._held_s(at_least, num_serving)
            share = math.ceil(at_least / num_serving)
            tokens = sum(sorted(one.tokens for one in its)[-max(share, 1) :])
            collect = server.group.collect.making(tokens * MADE_BYTES_PER_TOKEN)
            server.collecting[stream] = collect.submit(stream, held_s, share)

    def _held_s(self, at_least: int, num_serving: int) -> float:
        """How long a server may wait with its answer. Meanwhile it takes no other call."""
        if not at_least:
            return 0.0
        few_s = min(LOOK_S * max(num_serving / _AT_ONCE, 1), _MOST_S)
        return min(TOGETHER_S if at_least == ALL else few_s, self._call_limit.seconds / 4)

    def _its(self, server: Server, stream: str) -> list[Asked]:
        asked = self._asked.values()
        return [one for one in asked if one.stream == stream and one.server == server.number]

    def _wanted(self, server: Server, stream: str, batch: Batch) -> Iterator[Batch]:
        """The batch without groups that were abandoned since it was asked for."""
        unwanted = server.unwanted.pop(stream, set())
        if not len(batch):
            return
        ids = batch.array("group_ids").tolist()
        its = {one.group_id for one in self._its(server, stream)} - unwanted
        rows = [row for row, group in enumerate(ids) if group in its]
        for group in {ids[row] for row in rows}:
            del self._asked[stream, group]
        self._rerouted = [one for one in self._rerouted if one in self._asked]
        if rows:
            yield batch.take(rows) if len(rows) < len(ids) else batch

    def _wait(self, seconds: float) -> None:
        """Until a server answers or has started."""
        servers = self._servers.values()
        calls = [call for s in servers for call in (*s.collecting.values(), *s.starting)]
        self._wait_for_reply(calls, seconds)

    def _check_waited(self, seconds: float) -> None:
        """Raises WorkerError where servers run, and no group ends.

        Those of which a process is stopped are started again.
        """
        self._waited_s = self._waited_s + seconds if seconds else 0.0
        if self._waited_s < self._call_limit.seconds:
            return
        silent = {
            Silent(f"{server.group.name}.collect", rank, info): server
            for server in self._serving
            for rank, info in server.group.worker_infos.items()
        }
        stopped = find_stopped([*silent])
        for server in {silent[rank] for rank in stopped}:
            ranks = [rank for rank in stopped if silent[rank] is server]
            self._lost(server, WorkerError(report(ranks, str(self._call_limit))))
        if stopped:
            self._waited_s = 0.0
            return
        told = report([*silent], str(self._call_limit)) if silent else "no server is up"
        raise WorkerError(f"no group has come back: {told}")


def as_sent(prompts: Batch, num_samples: int) -> Samples:
    """Prompts as a call has them: by reference where they are large for so many samples each.

    The server then fetches what it begins, and nobody else does. What is stored goes when the call
    has ended: the driver keeps the prompts, and stores those of a group that begins again once
    more. It owns them, so they die with it alone.
    """
    is_small = prompts.num_bytes <= BY_VALUE_BYTES * num_samples * len(prompts)
    return prompts if is_small else store(prompts)
