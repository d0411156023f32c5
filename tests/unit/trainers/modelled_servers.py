"""Servers whose time is a number: a response has a token a second, and some have many."""

from __future__ import annotations

import numpy as np

from mcore_rl.data.batch import Batch, Jagged
from tests.unit.trainers.test_one_step_off import log_probs_of


class Servers:
    """Servers of a run on a clock of their own; `events` are in the order of calls."""

    def __init__(self, train_s: float):
        self.clock_s, self.train_s = 0.0, train_s
        self.pushes = [(0.0, 0)]  # when each version came
        self.running: dict[int, tuple[float, int]] = {}  # group: when it was begun, samples
        self.events: list[str] = []
        self.most_running = self.longest = 0
        self.is_asleep = self.lies = self.is_silent = False

    @property
    def version(self) -> int:
        return self.pushes[-1][1]

    def begin(self, prompts, sampling, stream):
        assert not self.is_asleep
        groups = prompts.array("group_ids").tolist()
        assert not self.running.keys() & groups
        self.events.append(f"begin {groups[0]}-{groups[-1]} of {self.version}")
        self.running |= dict.fromkeys(groups, (self.clock_s, sampling.n))
        self.most_running = max(self.most_running, len(self.running))

    def ends(self, group: int) -> float:
        return self.running[group][0] + max(lengths_of(group, self.running[group][1]))

    def collect(self, stream, wait_s, at_least=1):
        """The groups that have ended; time passes until there is one."""
        assert not self.is_asleep
        if self.is_silent:
            return []
        if self.running:
            self.clock_s = max(self.clock_s, min(map(self.ends, self.running)))
        ended = sorted(group for group in self.running if self.ends(group) <= self.clock_s)
        samples = [self._samples(group, *self.running.pop(group)) for group in ended]
        return [Batch.concat(samples)] if samples else []

    def abandon(self, stream, group_ids):
        assert not self.is_asleep
        self.events.append(f"abandon {sorted(group_ids)}")
        for group in group_ids:
            del self.running[group]

    def num_outstanding(self, stream):
        return len(self.running)

    has_joining, num_up, takes_turns = False, 1, False

    def follow_desired(self): ...

    def poll(self, stream, at_least):
        return []

    def pop_rerouted(self, stream):
        return []

    def idle_s(self):
        return [0.0]

    def _samples(self, group: int, began: float, num: int) -> Batch:
        lengths = lengths_of(group, num)
        times, versions = zip(*self.pushes, strict=True)
        of_tokens = [
            np.array(versions)[np.searchsorted(times, began + np.arange(n), side="right") - 1]
            for n in lengths
        ]
        of_tokens = [row - int(self.lies) for row in of_tokens]
        ids = Jagged.pack([group + np.arange(n) for n in lengths], np.int64)
        token_versions = ids.with_values(np.concatenate(of_tokens))
        log_probs = log_probs_of(ids.values, token_versions.values)
        rng = np.random.default_rng(group)
        return Batch(
            dict(
                group_ids=np.full(num, group),
                prompt_ids=Jagged.pack([[group]] * num, np.int64),
                response_ids=ids,
                response_mask=ids.with_values(np.ones(len(ids.values), np.int8)),
                rollout_log_probs=ids.with_values(log_probs),
                weight_versions=token_versions,
                oldest_versions=np.array([row.min() for row in of_tokens]),
                newest_versions=np.array([row.max() for row in of_tokens]),
                rewards=rng.integers(0, 2, num).astype(np.float32),
                reward_errors=np.array([""] * num),
                finish_reasons=np.array(["stop"] * num),
            )
        )

    def push(self, version):
        assert self.version == version - 1
        self.events.append(f"push {version}")
        self.pushes.append((self.clock_s, version))

    def sleep(self, keep):
        assert keep
        self.is_asleep = True
        self.events.append(f"sleep with {len(self.running)}")

    def wake(self, tag):
        self.is_asleep = self.is_asleep and tag != "kv_cache"


def lengths_of(group: int, num: int) -> list[int]:
    """Mostly a few tokens, sometimes 60."""
    drawn = np.random.default_rng([7, group]).pareto(1.1, num)
    return [min(2 + int(4 * value), 60) for value in drawn]
