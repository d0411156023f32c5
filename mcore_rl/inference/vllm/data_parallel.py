"""Data-parallel attention ranks of a server: an engine each, with a KV cache of its own.

vLLM runs them in lock step, since each step exchanges tokens of all ranks with the experts: a rank
without requests computes a dummy batch (v1/engine/core.py:2143). A coordinator process tells idle
ranks that one has requests. The line is that of vLLM 0.32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_GROUPS = 1 << 16  # that a router remembers


class RankRouter:
    """Chooses the rank of each request: that of its group, or the least loaded.

    Args:
        num_ranks: Number of data-parallel ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._tokens = [0] * num_ranks  # of running requests
        self._ranks: dict[str, int] = {}  # by group
        self._num_groups = Counter[int]()  # by rank

    @contextmanager
    def route(self, group: str, num_tokens: int) -> Iterator[int | None]:
        """Yield the rank of a request, which runs in the with block; None if there is one rank.

        Args:
            group: See `SamplingParams.group`.
            num_tokens: Tokens of prompt and responses, at most.
        """
        if len(self._tokens) == 1:
            yield None
            return
        rank = self._choose(group)
        self._tokens[rank] += num_tokens
        try:
            yield rank
        finally:
            self._tokens[rank] -= num_tokens

    def forget_groups(self) -> None:
        """Let groups go to other ranks, since no rank has their prefixes any more."""
        self._ranks.clear()
        self._num_groups.clear()

    def _choose(self, group: str) -> int:
        if group in self._ranks:
            return self._ranks[group]
        ranks = range(len(self._tokens))
        rank = min(ranks, key=lambda rank: (self._tokens[rank], self._num_groups[rank]))
        if group:
            self._ranks[group] = rank
            self._num_groups[rank] += 1
            if len(self._ranks) > _MAX_GROUPS:
                self._num_groups[self._ranks.pop(next(iter(self._ranks)))] -= 1
        return rank
