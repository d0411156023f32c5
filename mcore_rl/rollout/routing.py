"""The server that each group of samples is generated on: pure functions of outstanding tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
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
    server: int | None = None  # number of the server that generates it
    is_rerouted: bool = False  # its server has died, or was removed

    @property
    def max_tokens(self) -> int:
        """Upper bound: prompt and longest response of each of its trajectories."""
        return self.sampling.n * (self.num_prompt_tokens + self.sampling.max_tokens)


def split_prompts(prompts: Batch, sampling: SamplingParams, stream: str) -> list[PendingGroup]:
    """Return a group for each prompt."""
    ids = prompts.array("group_ids").tolist()
    num_tokens = prompts.lengths("prompt_ids").tolist()
    rows = enumerate(zip(ids, num_tokens, strict=True))
    return [PendingGroup(stream, i, prompts, row, num, sampling) for row, (i, num) in rows]


def gather_prompts(groups: Sequence[PendingGroup]) -> Batch:
    """Return the prompts of groups; those of one call stay together."""
    rows: dict[int, tuple[Batch, list[int]]] = {}
    for group in groups:
        rows.setdefault(id(group.prompts), (group.prompts, []))[1].append(group.row)
    return Batch.concat([prompts.take(taken) for prompts, taken in rows.values()])


def route_groups(
    groups: Sequence[PendingGroup],
    outstanding_tokens: Mapping[int, int],
    last_servers: Mapping[int, int],
) -> list[int]:
    """Choose a server for each group: the one with the fewest tokens, then the lowest number.

    Args:
        outstanding_tokens: By server number, of the servers that may be chosen.
        last_servers: By group id, the server whose prefix cache has the prompt. It is chosen
            unless another has fewer tokens, by more than the largest group's.
    """
    tokens = dict(outstanding_tokens)
    fewest = [(num, number) for number, num in tokens.items()]
    heapq.heapify(fewest)
    largest = max((group.max_tokens for group in groups), default=0)
    servers = []
    for group in groups:
        while tokens[fewest[0][1]] != fewest[0][0]:  # it has got groups since
            heapq.heapreplace(fewest, (tokens[fewest[0][1]], fewest[0][1]))
        least = fewest[0][1]
        last = last_servers.get(group.group_id, least)
        is_free = last in tokens and tokens[last] <= tokens[least] + largest
        servers.append(last if is_free else least)
        tokens[servers[-1]] += group.max_tokens
    return servers


def count_tokens(groups: Iterable[PendingGroup], servers: Iterable[int]) -> dict[int, int]:
    """Return the outstanding tokens of each of these servers."""
    tokens = dict.fromkeys(servers, 0)
    for group in groups:
        if group.server in tokens:
            tokens[group.server] += group.max_tokens
    return tokens
