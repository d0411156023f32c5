"""The server that each group of samples is generated on: pure functions of outstanding tokens."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.data.batch import Batch
from mcore_rl.inference.protocol import SamplingParams


@dataclass(eq=False, slots=True)
class PendingGroup:
    """A group of samples that was begun and has not been collected."""

    stream: str  # "train" or "evaluation"
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
    prompts: Batch, sampling: SamplingParams, stream: str, first_order: int = 0
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
