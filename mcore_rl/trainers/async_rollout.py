"""Generation that goes on beside a trainer: its servers, and the ledger of what they have begun."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mcore_rl.algorithms.sample_choice import kept_groups
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.controller.batch_ops import for_metrics, kept, lost_groups
from mcore_rl.controller.pending import WorkerError
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.rollout.buffer import HELD, GroupState, SampleGroup, SampleQueue
from mcore_rl.rollout.manager import RolloutPool, tell_lost
from mcore_rl.rollout.staleness import Admission, Pacing
from mcore_rl.trainers import policy_checks
from mcore_rl.trainers import step_samples as samples
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.scoring import with_teacher_names

SAMPLES = "samples"  # the column of the ledger that has them
POLL_S = 1.0  # that one call waits for samples, and between two looks of `tended`


class AsyncRollout:
    """`take` the samples of a step, and tell `pushed` when the servers have its weights.

    In between, servers that take turns are asked nothing, and others are `tended`. The
    ledger is a state of a checkpoint. It has the prompts of what was begun and not trained on, and
    a run that goes on begins those again. So do groups whose samples were lost with a node before a
    step has taken them; those that were rejected count all the same.
    """

    def __init__(
        self, config: RLConfig, rollout: RolloutPool, prompts: PromptBatches, replay: ReplayBuffer
    ) -> None:
        trainer, group_size = config.trainer, config.algorithm.group_size
        self._config, self._rollout, self._prompts = config, rollout, prompts
        self._replay, self._staleness = replay, trainer.staleness or 0
        self.queue: SampleQueue[Batch] = SampleQueue(group_size)
        pacing = Pacing(
            groups_per_step=trainer.prompts_per_step,
            group_size=group_size,
            num_steps=trainer.num_steps,
            staleness=self._staleness,
            depth=trainer.asynchronous.max_groups or None,
            over_issue=trainer.asynchronous.oversampling,
            max_samples=trainer.asynchronous.max_waiting_samples or None,
            new_per_step=samples.new_per_step(config),
        )
        self.admission = Admission(self.queue, pacing)
        # With nothing ahead, what a filter rejects and what is replayed can be as with `sync`.
        policy = config.algorithm.filter
        self._in_rounds = not self._staleness and bool(policy.group_filter or policy.replay.share)
        self._rejected: list[Batch] = []  # groups that did not pass the filter, since a step

    def start(self) -> None:
        """Before the first step; the servers have weights."""
        self._rollout.idle_s()  # what was before the run does not count
        self.fill()

    def fill(self) -> None:
        """Begin as many groups as may be; returns at once."""
        if not self._in_rounds:
            self._expected(self.queue.last_trained + 1)
            self._draw()
            self._begin()

    def _expected(self, step: int) -> tuple[Samples | None, int]:
        """What the step replays, and how many new groups it needs; the pacing is told."""
        replayed, wanted = samples.replayed_and_wanted(self._config, self._replay, step)
        self.admission.expect(step, wanted)
        return replayed, wanted

    def _draw(self) -> None:
        per_step = self._config.trainer.prompts_per_step
        while num := min(self.admission.num_to_draw(), per_step):
            drawn = self._prompts.draw(num)
            self.queue.issue(list(drawn), list(drawn.values()))

    def _begin(self) -> None:
        if begun := self.admission.begin():
            asked = self._prompts.again({group.group_id: group.row for group in begun})
            self._rollout.begin(asked, n=self._config.algorithm.group_size)

    @contextlib.contextmanager
    def tended(self) -> Iterator[None]:
        """Inside, while the trainer computes, others are begun as groups end and servers die.

        Nobody else may use the servers inside. Nothing happens for servers that take turns, for
        steps that generate their own rounds, and in the last step. What goes wrong is raised at the
        end.
        """
        is_last = self.queue.last_trained + 1 == self._config.trainer.num_steps
        if is_last or self._in_rounds or self._rollout.servers.takes_turns:
            yield
            return
        is_over = threading.Event()
        with ThreadPoolExecutor(1, "tends-servers") as thread:
            tending = thread.submit(self._tend, is_over)
            try:
                yield
            finally:
                is_over.set()
        tending.result()

    def _tend(self, is_over: threading.Event) -> None:
        while not is_over.wait(POLL_S):
            self._take_in(self._rollout.tend())
            self._begin_more()

    def take(self, step: int) -> tuple[Samples, dict[str, float]]:
        """The samples of a step with their rewards, and metrics of all that have come since.

        Waits until enough groups are complete, and begins others for those that the filter of
        groups rejects. What would be too old for the next step is ended. With staleness 0 and a
        filter or replay it generates in rounds, as `samples_of_step`.

        Raises:
            PolicyMismatchError: a token is too old, or newer than the policy.
            ConfigError: no response got a reward; too few groups have passed, and if_short is stop.
            WorkerError: no group has come for timeouts.call_s.
        """
        config = self._config
        if self._in_rounds:
            return samples.samples_of_step(config, self._rollout, self._prompts, self._replay, step)
        replayed, wanted = self._expected(step)
        chosen = self._chosen(step, wanted)
        came = [group.columns[SAMPLES] for group in chosen] + self._rejected
        self._rejected = []
        everything = type(came[0]).concat(came)
        batch, metrics = samples.rewarded(config, everything, step)
        samples.observe(config, self._prompts, everything, batch)
        if config.algorithm.filter.group_filter:
            metrics |= {
                "samples/groups": float(len(came)),
                "samples/passed": len(chosen) / len(came),
            }
        is_chosen = np.isin(batch.array("group_ids"), [group.group_id for group in chosen])
        fresh = batch.take(np.flatnonzero(is_chosen).tolist())
        trained, found = samples.trained_on(config, fresh, self._replay, replayed, step)
        metrics |= found | policy_checks.checked_age(trained, step - 1, self._staleness)
        metrics |= self.queue.metrics()
        self._evict(step)
        return trained, metrics | {"generated_tokens": float(everything.num_tokens.sum())}

    def pushed(self, step: int) -> None:
        """The step is trained, and the servers have its weights: begin what these allow."""
        self._take_in([])  # what was begun again before the push has the weights of before
        self.queue.mark_trained(step)
        self.admission.pushed(step)
        self.queue.clear(step)
        self._put_back_lost()
        self.fill()

    def idle_s(self) -> float:
        """As RolloutPool.idle_s, since the last call or the start."""
        return self._rollout.idle_s()

    def state_dict(self) -> dict[str, Any]:
        return {"queue": self.queue.state_dict(), "admission": self.admission.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue.load_state_dict(state["queue"])
        self.admission.load_state_dict(state["admission"])

    def _chosen(self, step: int, wanted: int) -> list[SampleGroup[Batch]]:
        while True:
            chosen = self._ready(step, wanted)
            if not self._put_back_lost():
                return chosen

    def _put_back_lost(self) -> bool:
        """Whether there were groups whose samples are lost: they are to be begun again."""
        held = {group.group_id: group.columns[SAMPLES] for group in self.queue.groups(*HELD)}
        if lost := lost_groups(list(held.values())):
            tell_lost(lost)
            self.queue.lost(lost)
        return bool(lost)

    def _ready(self, step: int, wanted: int) -> list[SampleGroup[Batch]]:
        with ACTIVITY.count(wanted, "groups") as came:
            return self._awaited(step, wanted, came)

    def _awaited(
        self, step: int, wanted: int, came: Callable[[int], None]
    ) -> list[SampleGroup[Batch]]:
        limit, last = self._config.timeouts.call_s, time.monotonic()
        while True:
            self._begin_more()
            if (chosen := self.admission.select(step, wanted)) is not None:
                return chosen
            came(self._num_ready)
            if not (running := self.queue.num_groups(GroupState.GENERATING)):
                return self._too_few(step, wanted)
            came_in = self._take_in(self._rollout.collect(POLL_S, self._at_least(wanted)))
            if came_in or self._rollout.servers.has_joining:  # one is started again
                last = time.monotonic()
            elif time.monotonic() - last > limit:
                raise WorkerError(
                    f"rollout.collect: no group of samples has come for timeouts.call_s={limit:g} "
                    f"s, of {running} that are generated"
                )

    def _at_least(self, wanted: int) -> int:
        """Groups to wait for: what the step lacks. With max_groups each that ends makes room."""
        if self._config.trainer.asynchronous.max_groups:
            return 1
        return max(wanted - self._num_ready, 1)

    @property
    def _num_ready(self) -> int:
        return self.queue.num_groups(GroupState.REWARDED, GroupState.TRAINING)

    def _begin_more(self) -> None:
        """Also for those that the filter has rejected, up to max_rounds times a step's."""
        policy, per_step = self._config.algorithm.filter, self._config.trainer.prompts_per_step
        if len(self._rejected) < policy.max_rounds * per_step:
            self._draw()
        self._begin()

    def _take_in(self, found: list[Batch]) -> bool:
        """Whether samples have come, for the ledger; it hears of dead servers, too."""
        again = self._rollout.rerouted()
        self.queue.lost(again)
        self.queue.begin(again, self.admission.version)
        for batch in found:
            ids, inverse = np.unique(batch.array("group_ids"), return_inverse=True)
            rows: list[list[int]] = [[] for _ in ids]
            for row, place in enumerate(inverse.tolist()):
                rows[place].append(row)
            for group_id, its_rows in zip(ids.tolist(), rows, strict=True):
                self._came(group_id, batch.take(its_rows))
        return any(len(batch) for batch in found)

    def _came(self, group_id: int, batch: Batch) -> None:
        config, versions = self._config, batch.array("oldest_versions")
        oldest = int(versions[versions >= 0].min(initial=np.iinfo(np.int64).max))
        oldest = oldest if (versions >= 0).any() else -1
        if config.teacher.column:
            asked = self._prompts.again({group_id: self.queue.row_of(group_id)})
            batch = with_teacher_names(batch, asked, config.teacher.column)
        self.queue.finish(group_id, oldest, len(batch), {SAMPLES: batch})
        if self._passes(batch):
            self.queue.mark_rewarded([group_id])
        else:
            self.queue.drop([group_id])
            self._rejected.append(for_metrics(batch))

    def _passes(self, batch: Batch) -> bool:
        policy = self._config.algorithm.filter
        if not policy.group_filter:
            return True
        if self._config.reward.on_error == "drop":
            batch = batch.take(np.flatnonzero(batch.array("reward_errors") == "").tolist())
        return len(batch) > 0 and len(kept(kept_groups, batch, policy)) > 0

    def _too_few(self, step: int, wanted: int) -> list[SampleGroup[Batch]]:
        """What there is, where the filter has rejected as many as it may in a step."""
        policy = self._config.algorithm.filter
        num = min(self._num_ready, wanted)
        if policy.if_short == "stop":
            raise ConfigError(
                f"step {step}: algorithm.filter.group_filter={policy.group_filter!r} has rejected "
                f"{len(self._rejected)} groups, and {num} are left of {wanted} that the step needs;"
                " allowed: more algorithm.filter.max_rounds, or if_short='train'"
            )
        return self.admission.select(step, num) or []

    def _evict(self, step: int) -> None:
        """What is too old when the weights of this step are there; after the last one, all."""
        is_last = step == self._config.trainer.num_steps
        version = step + self._staleness + 1 if is_last else step
        if running := self.admission.evict(version):
            self._rollout.abandon(running)
