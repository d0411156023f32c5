"""Groups of samples that are being made: begun, collected as they end, abandoned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence, Set

from mcore_rl.agents.single_turn import Group
from mcore_rl.data.sample import Sample
from mcore_rl.rollout.idle_time import IdleTime


class RunningGroups:
    """Of one stream, by their ids. All calls are of one event loop.

    It has no limits of its own: a group ends by those of its requests and of its loop, and its
    owner abandons those that it does not wait for.
    """

    def __init__(self, idle: IdleTime | None = None) -> None:
        """`idle` is told when a group begins and ends; several may share it."""
        self._groups: dict[int, Group] = {}
        self._idle = IdleTime() if idle is None else idle
        self._news = asyncio.Event()  # a group has ended since it was looked

    @property
    def ids(self) -> Set[int]:
        """Of groups that have been begun, and neither collected nor abandoned."""
        return self._groups.keys()

    def begin(self, groups: Mapping[int, Group]) -> None:
        """Groups whose ids are free."""
        self._groups |= groups
        for group in groups.values():
            self._idle.begin(group)
            group.add_done_callback(self._has_ended)

    def _has_ended(self, group: Group) -> None:
        self._idle.end(group)
        self._news.set()

    async def collect(self, wait_s: float, at_least: int = 1) -> list[Sample]:
        """Samples of all groups that have ended, in the order of group ids; each comes once.

        Of a group without any, as none of its trajectories has had a turn, it is one that says so.

        Waits up to `wait_s` until there are `at_least` so many, none runs any more, or one has
        failed. Raises what made the first of them fail, and forgets that one; the others stay for
        the next call.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._has_come(at_least):
                    self._news.clear()
                    await self._news.wait()
        ended = sorted(i for i, group in self._groups.items() if group.done())
        for group_id in ended:
            if _has_failed(self._groups[group_id]):
                self._groups.pop(group_id).result()
        return [s for i in ended for s in self._groups.pop(i).result() or [_nothing(i)]]

    def _has_come(self, at_least: int) -> bool:
        ended = [group for group in self._groups.values() if group.done()]
        if len(ended) < min(at_least, len(self._groups)):
            return any(map(_has_failed, ended))
        return bool(ended)

    async def abandon(self, group_ids: Sequence[int]) -> None:
        """Ends groups and forgets them. Returns when nothing of them runs any more.

        Ids of groups that it does not have are no error: they have been collected.
        """
        groups = [self._groups.pop(i) for i in group_ids if i in self._groups]
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)


def _has_failed(group: Group) -> bool:
    return group.cancelled() or group.exception() is not None


def _nothing(group_id: int) -> Sample:
    """A sample of no token the policy has chosen, with a token for a prompt."""
    error = "no trajectory of the group has had a turn"
    return Sample([0], [], [], [], [], "abort", group_id, reward_error=error, status="failed")
