"""The server that each group of samples is generated on, by outstanding tokens."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_rl.data.batch import Batch
from mcore_rl.inference.protocol import SamplingParams

Stream = Literal["train", "evaluation"]  # the purpose of samples


@dataclass(eq=False, slots=True)
class PendingGroup:
    """A group of samples that was begun and has not been collected."""

    stream: Stream
    group_id: int
    prompts: Batch  # of all groups of the same call
    row: int  # in prompts
    num_prompt_tokens: int
    sampling: SamplingParams
    order: int = 0  # in which the groups of a pool were begun
    server: int | None = None  # number of the server that generates it
    is_rerouted: bool = False  # its server has died, or was removed

    @property
    def max_tokens(self) -> int:
        """Upper bound: prompt and longest response of each of its trajectories."""
        return self.sampling.n * (self.num_prompt_tokens + self.sampling.max_tokens)


def split_prompts(
    prompts: Batch, sampling: SamplingParams, stream: Stream, first_order: int = 0
) -> list[PendingGroup]:
    """Return a group for each prompt; `first_order` is the order of the first."""
    ids = prompts.array("group_ids").tolist()
    num_tokens = prompts.lengths("prompt_ids").tolist()
    rows = enumerate(zip(ids, num_tokens, strict=True))
    return [
        PendingGroup(stream, i, prompts, row, num, sampling, first_order + row)
        for row, (i, num) in rows
    ]


def gather_prompts(groups: Sequence[PendingGroup]) -> Batch:
    """Return the prompts of groups; those of one call stay together."""
    rows: dict[int, tuple[Batch, list[int]]] = {}
    for group in groups:
        rows.setdefault(id(group.prompts), (group.prompts, []))[1].append(group.row)
    return Batch.concat([prompts.take(taken) for prompts, taken in rows.values()])


class OutstandingTokens:
    """Outstanding tokens by server number, of the servers that may be chosen."""

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self._tokens = dict(tokens)
        self._heap_entries()

    def __len__(self) -> int:
        return len(self._tokens)

    def _heap_entries(self) -> None:
        # One entry a server is right; those of earlier numbers of tokens are skipped.
        self._entries = [(num, number) for number, num in self._tokens.items()]
        heapq.heapify(self._entries)

    def add(self, number: int, num_tokens: int) -> None:
        """Add tokens to a server, or take some off; ignore servers that may not be chosen."""
        if number not in self._tokens:
            return
        self._tokens[number] += num_tokens
        heapq.heappush(self._entries, (self._tokens[number], number))
        if len(self._entries) > 4 * len(self._tokens) + 16:
            self._heap_entries()

    def find_least(self) -> int:
        """Return the server with the fewest tokens; of several the lowest number."""
        while self._tokens[self._entries[0][1]] != self._entries[0][0]:
            heapq.heappop(self._entries)
        return self._entries[0][1]

    def choose(self, last_server: int | None, tolerance: int) -> int:
        """Return the last server unless another has fewer tokens by more than the tolerance."""
        least = self.find_least()
        if last_server not in self._tokens:
            return least
        is_free = self._tokens[last_server] <= self._tokens[least] + tolerance
        return last_server if is_free else least


def route_groups(
    groups: Sequence[PendingGroup],
    outstanding: OutstandingTokens,
    last_servers: Mapping[int, int],
) -> list[int]:
    """Choose a server for each group: the one with the fewest tokens, then the lowest number.

    It takes log(servers) operations a group.

    Args:
        outstanding: The tokens of the groups are added.
        last_servers: By group id, the server whose prefix cache has the prompt. It is chosen
            unless another has fewer tokens, by more than the largest group's.
    """
    largest = max((group.max_tokens for group in groups), default=0)
    servers = []
    for group in groups:
        servers.append(outstanding.choose(last_servers.get(group.group_id), largest))
        outstanding.add(servers[-1], group.max_tokens)
    return servers


class GroupRouter:
    """All pending groups: those that wait for a server, and those that each server generates."""

    def __init__(self) -> None:
        # By stream and id.
        self._groups: defaultdict[Stream, dict[int, PendingGroup]] = defaultdict(dict)
        self._num_begun = 0
        self._waiting: dict[int, PendingGroup] = {}  # by order: those without a server
        # By the number of the server that generates them, stream and id.
        self._by_server: defaultdict[int, defaultdict[Stream, dict[int, PendingGroup]]] = (
            defaultdict(lambda: defaultdict(dict))
        )
        self._outstanding = OutstandingTokens({})
        self._last_servers: dict[int, int] = {}  # by group id
        self._rerouted: list[tuple[Stream, int]] = []  # groups begun again on another server

    def begin(self, prompts: Batch, sampling: SamplingParams, stream: Stream) -> None:
        """Add a group for each prompt, to be routed.

        Raises:
            ValueError: a group of the same id is pending in the stream.
        """
        ids = [int(group) for group in prompts.array("group_ids")]
        if len(set(ids)) < len(ids) or any(group in self._groups[stream] for group in ids):
            raise ValueError(f"a group of {stream!r} among {ids} would be generated twice at once")
        groups = split_prompts(prompts, sampling, stream, self._num_begun)
        self._num_begun += len(groups)
        self._groups[stream] |= {group.group_id: group for group in groups}
        self._waiting |= {group.order: group for group in groups}

    def set_servers(self, numbers: Iterable[int]) -> None:
        """Set the servers that may be chosen."""
        self._outstanding = OutstandingTokens(
            {
                number: sum(
                    group.max_tokens
                    for groups in self._by_server[number].values()
                    for group in groups.values()
                )
                for number in numbers
            }
        )

    def route(self) -> list[tuple[int, list[PendingGroup]]]:
        """Choose servers for the groups that wait, in the order in which they were begun.

        Returns servers by number, each with groups of one stream and sampling; none if there is no
        server to choose.
        """
        if not self._waiting or not self._outstanding:
            return []
        waiting = [self._waiting[order] for order in sorted(self._waiting)]
        self._waiting.clear()
        calls: dict[tuple[int, Stream, SamplingParams], list[PendingGroup]] = {}
        servers = route_groups(waiting, self._outstanding, self._last_servers)
        for group, number in zip(waiting, servers, strict=True):
            group.server = self._last_servers[group.group_id] = number
            self._by_server[number][group.stream][group.group_id] = group
            if group.is_rerouted:
                self._rerouted.append((group.stream, group.group_id))
            calls.setdefault((number, group.stream, group.sampling), []).append(group)
        return [(number, groups) for (number, _, _), groups in calls.items()]

    def remove(self, stream: Stream, group_id: int) -> PendingGroup:
        """Remove and return a group that was collected or abandoned."""
        group = self._groups[stream].pop(group_id)
        if group.server is None:
            del self._waiting[group.order]
        else:
            del self._by_server[group.server][stream][group_id]
            self._outstanding.add(group.server, -group.max_tokens)
        if self._rerouted and group.is_rerouted:
            self._rerouted = [key for key in self._rerouted if key != (stream, group_id)]
        return group

    def release(self, number: int) -> None:
        """Let the groups of a server that has ended wait for another; `set_servers` comes next."""
        for groups in self._by_server.pop(number, {}).values():
            for group in groups.values():
                group.server, group.is_rerouted = None, True
                self._waiting[group.order] = group

    def clear_last_servers(self) -> None:
        """Let no group prefer the server that it was on: caches of other weights are not read."""
        self._last_servers.clear()

    def pop_rerouted(self, stream: Stream) -> list[int]:
        """Return, once, the groups that began again on another server."""
        ids = [group for name, group in self._rerouted if name == stream]
        self._rerouted = [key for key in self._rerouted if key[0] != stream]
        return list(dict.fromkeys(ids))

    def count(self, stream: Stream) -> int:
        """Return the number of pending groups of a stream."""
        return len(self._groups[stream])

    def list_ids(self, stream: Stream) -> list[int]:
        """Return the ids of the pending groups of a stream."""
        return [*self._groups[stream]]

    def get_groups(self, number: int, stream: Stream) -> Mapping[int, PendingGroup]:
        """Return the groups of a stream that a server generates, by id."""
        return self._by_server[number][stream]

    def list_streams(self, number: int) -> list[Stream]:
        """Return the streams of which a server has got groups."""
        return [*self._by_server[number]]
