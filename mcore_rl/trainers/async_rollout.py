"""Generation beside a trainer: a step ahead, or all the time with a buffer of groups."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mcore_rl.algorithms.sample_choice import filter_groups
from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.batch_ops import (
    append_released,
    concat_batches,
    find_lost_groups,
    release_columns,
    restore_batch,
    restore_released,
    save_released,
    select_rows,
    to_arrays,
)
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.data.batch import Samples
from mcore_rl.data.routed_experts import ExpertLayers
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.rollout.buffer import (
    HELD,
    GroupState,
    SampleGroup,
    SampleQueue,
    StalenessController,
    StalenessSettings,
)
from mcore_rl.rollout.manager import report_lost_groups
from mcore_rl.rollout.server_pool import NoServersError
from mcore_rl.trainers import policy_checks
from mcore_rl.trainers.step_samples import StepSampler, add_teacher_names, count_new_groups

SAMPLES = "samples"  # the column of the buffer that has them
POLL_S = 1.0  # how long one call waits for samples; between two polls in the background
StepResult = tuple[Samples, dict[str, float]]  # samples of a step, and metrics


class AsyncRollout:
    """Generates all the time: `take` the samples of a step; `begin_version` when it is served.

    In between, servers that share devices are left alone, and others are polled in the background.
    The buffer of groups is a state of a checkpoint. It has the prompts of what was begun and not
    trained on, which a resumed run begins again. Groups whose samples were lost with a node before
    a step has taken them begin again, too; those that were rejected count all the same.
    """

    def __init__(self, sampler: StepSampler) -> None:
        config = sampler.config
        trainer, group_size = config.trainer, config.algorithm.group_size
        self._sampler, self._config = sampler, config
        self._rollout, self._prompts = sampler.rollout, sampler.prompts
        self._staleness = trainer.staleness or 0
        self.queue: SampleQueue[Samples] = SampleQueue(group_size)
        settings = StalenessSettings(
            groups_per_step=trainer.prompts_per_step,
            group_size=group_size,
            num_steps=trainer.num_steps,
            staleness=self._staleness,
            depth=trainer.asynchronous.max_groups or None,
            oversampling=trainer.asynchronous.oversampling,
            max_samples=trainer.asynchronous.max_waiting_samples or None,
            new_per_step=count_new_groups(config),
        )
        self.controller = StalenessController(self.queue, settings)
        # With nothing ahead, what a filter rejects and what is replayed can be as with `sync`.
        policy = config.algorithm.filter
        self._in_rounds = not self._staleness and bool(policy.group_filter or policy.replay.share)
        # Groups that did not pass the filter since a step, without columns along tokens.
        self._rejected: list[Samples] = []

    def start(self) -> None:
        """Begin the first groups; the servers have weights."""
        self._rollout.idle_s()  # idle time before the run does not count
        self.fill()

    def fill(self) -> None:
        """Begin as many groups as staleness allows; return at once."""
        if not self._in_rounds:
            self._expect(self.queue.last_trained + 1)
            self._draw()
            self._begin()

    def _expect(self, step: int) -> tuple[Samples | None, int]:
        """Return what the step replays, and the new groups that it needs; set the pace by them."""
        replayed, num_needed = self._sampler.draw_replayed(step)
        self.controller.expect(step, num_needed)
        return replayed, num_needed

    def _draw(self) -> None:
        """Draw the prompts that the buffer lacks, at most those of a step at a time."""
        per_step = self._config.trainer.prompts_per_step
        while num := min(self.controller.num_to_draw(), per_step):
            drawn = self._prompts.draw(num)
            self.queue.issue(list(drawn), list(drawn.values()))

    def _begin(self) -> None:
        """Begin issued groups on the servers, as many as the bound on staleness allows."""
        if begun := self.controller.begin():
            prompts = self._prompts.build_batch({group.group_id: group.row for group in begun})
            self._rollout.begin(prompts, n=self._config.algorithm.group_size)

    @contextlib.contextmanager
    def background_polling(self) -> Iterator[None]:
        """Poll servers while the trainer computes: groups begin as others end and servers die.

        Nobody else may use the servers meanwhile. Nothing happens for servers that share devices,
        for steps that generate their own rounds, and in the last step. Errors are raised at the
        end.
        """
        is_last = self.queue.last_trained + 1 == self._config.trainer.num_steps
        if is_last or self._in_rounds or self._rollout.servers.takes_turns:
            yield
            return
        is_over = threading.Event()
        with ThreadPoolExecutor(1, "polls-servers") as thread:
            polling = thread.submit(self._poll, is_over)
            try:
                yield
            finally:
                is_over.set()
        polling.result()

    def _poll(self, is_over: threading.Event) -> None:
        at_least = 1 if self._config.trainer.asynchronous.max_groups else None
        while not is_over.wait(POLL_S):
            self._take_in(self._rollout.poll(at_least))
            self._begin_more()

    def take(self, step: int) -> tuple[Samples, dict[str, float]]:
        """Return the samples of a step with their rewards, and metrics of all that ended since.

        Waits until enough groups are complete, and begins others for those that the group filter
        rejects. Groups that would be too old for the next step are abandoned. With staleness 0 and
        a filter or replay, generation is in rounds, as StepSampler.collect.

        Raises:
            PolicyMismatchError: A token is too old, or newer than the policy.
            ConfigError: No response got a reward; too few groups have passed, and if_short is stop.
            WorkerError: No group has ended for timeouts.call_s.
        """
        if self._in_rounds:
            return self._sampler.collect(step)
        replayed, num_needed = self._expect(step)
        groups = self._select_groups(step, num_needed)
        rejected, self._rejected = self._rejected, []
        num_groups = len(groups) + len(rejected)
        if groups:
            selected_batches: list[Samples] = [group.columns[SAMPLES] for group in groups]
            generated = append_released(concat_batches(selected_batches), rejected)
        else:
            generated = append_released(rejected[0], rejected[1:])
        batch, metrics = self._sampler.apply_rewards(generated, step)
        self._sampler.update_curriculum([generated], batch)
        if self._config.algorithm.filter.group_filter:
            metrics |= {
                "samples/groups": float(num_groups),
                "samples/passed": len(groups) / num_groups,
            }
        is_selected = np.isin(batch.array("group_ids"), [group.group_id for group in groups])
        fresh = batch.take(np.flatnonzero(is_selected).tolist())
        selected, replay_metrics = self._sampler.add_replayed(fresh, replayed, step)
        ages = policy_checks.check_ages(selected, step - 1, self._staleness)
        metrics |= replay_metrics | ages | self.queue.metrics()
        self._evict(step)
        return selected, metrics | {"generated_tokens": float(generated.num_tokens.sum())}

    def begin_version(self, step: int) -> None:
        """Begin the groups that the weights of a trained step allow, once the servers have them."""
        self._take_in([])  # groups that began again before the push have the weights before it
        self.queue.mark_trained(step)
        self.controller.mark_pushed(step)
        self.queue.clear(step)
        self._put_back_lost()
        self.fill()

    def idle_s(self) -> float:
        """Return seconds that servers were idle since the last call (RolloutPool.idle_s)."""
        return self._rollout.idle_s()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every group that was begun and not trained on.

        Those that were rejected have ended: the next step counts them.
        """
        return {
            "queue": self.queue.state_dict(),
            "admission": self.controller.state_dict(),
            "rejected": {str(n): save_released(batch) for n, batch in enumerate(self._rejected)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; `fill` begins the groups again."""
        self.queue.load_state_dict(state["queue"])
        self.controller.load_state_dict(state["admission"])
        # Earlier versions did not save them.
        self._rejected = [*map(restore_released, state.get("rejected", {}).values())]

    def _select_groups(self, step: int, num_needed: int) -> list[SampleGroup[Samples]]:
        while True:
            with ACTIVITY.count(num_needed, "groups") as show_count:
                groups = self._wait_for_groups(step, num_needed, show_count)
            if not self._put_back_lost():
                return groups

    def _put_back_lost(self) -> bool:
        """Put groups whose samples are lost back, to begin again; return whether there were any."""
        held = {group.group_id: group.columns[SAMPLES] for group in self.queue.groups(*HELD)}
        if lost := find_lost_groups(list(held.values())):
            report_lost_groups(lost)
            self.queue.reissue_lost(lost)
        return bool(lost)

    def _wait_for_groups(
        self, step: int, num_needed: int, show_count: Callable[[int], None]
    ) -> list[SampleGroup[Samples]]:
        limit, last = self._config.timeouts.call_s, time.monotonic()
        while True:
            self._begin_more()
            if (groups := self.controller.select(step, num_needed)) is not None:
                return groups
            show_count(self._num_ready)
            if not (running := self.queue.num_groups(GroupState.GENERATING)):
                return self._select_too_few(step, num_needed)
            batches = self._rollout.collect(POLL_S, self._count_awaited(num_needed))
            if self._take_in(batches) or self._rollout.servers.has_joining:  # one is started again
                last = time.monotonic()
            elif time.monotonic() - last > limit:
                raise WorkerError(
                    f"rollout.collect: no group of samples has come for timeouts.call_s={limit:g} "
                    f"s, of {running} that are generated"
                )

    def _count_awaited(self, num_needed: int) -> int:
        """Return how many groups to wait for: those that the step lacks.

        1 with asynchronous.max_groups, where each group that ends lets another begin.
        """
        if self._config.trainer.asynchronous.max_groups:
            return 1
        return max(num_needed - self._num_ready, 1)

    @property
    def _num_ready(self) -> int:
        return self.queue.num_groups(GroupState.REWARDED, GroupState.TRAINING)

    def _begin_more(self) -> None:
        """Begin groups, also for rejected ones, up to max_rounds times those of a step."""
        policy, per_step = self._config.algorithm.filter, self._config.trainer.prompts_per_step
        if len(self._rejected) < policy.max_rounds * per_step:
            self._draw()
        self._begin()

    def _take_in(self, batches: list[Samples]) -> bool:
        """Record samples that have arrived, and groups that began again; return if there are any.

        A group that began again did so with the weights that the servers have.
        """
        rerouted = self._rollout.pop_rerouted()
        self.queue.reissue_lost(rerouted)
        self.queue.begin(rerouted, self.controller.version)
        for batch in batches:
            rows: dict[int, list[int]] = {}
            for row, group_id in enumerate(batch.array("group_ids").tolist()):
                rows.setdefault(group_id, []).append(row)
            for group_id in sorted(rows):
                group = batch if len(rows) == 1 else batch.take(rows[group_id])
                self._finish_group(group_id, group)
        return any(len(batch) for batch in batches)

    def _finish_group(self, group_id: int, batch: Samples) -> None:
        """Put a complete group into the buffer, or drop it if the group filter rejects it."""
        config, versions = self._config, batch.array("oldest_versions")
        chosen = versions[versions >= 0]
        oldest = int(chosen.min()) if len(chosen) else -1
        if config.teacher.column:
            prompts = self._prompts.build_batch({group_id: self.queue.get_row(group_id)})
            batch = add_teacher_names(batch, prompts, config.teacher.column)
        self.queue.finish(group_id, oldest, len(batch), {SAMPLES: batch})
        if self._passes_filter(batch):
            self.queue.mark_rewarded([group_id])
        else:
            self.queue.drop([group_id])
            self._rejected.append(release_columns(batch))

    def _passes_filter(self, batch: Samples) -> bool:
        """Return whether a group passes algorithm.filter.group_filter."""
        policy = self._config.algorithm.filter
        if not policy.group_filter:
            return True
        if self._config.reward.on_error == "drop":
            batch = batch.take(np.flatnonzero(batch.array("reward_errors") == "").tolist())
        return len(batch) > 0 and len(select_rows(filter_groups, batch, policy)) > 0

    def _select_too_few(self, step: int, num_needed: int) -> list[SampleGroup[Samples]]:
        """Return what there is, when the filter has rejected as many as it may in a step."""
        policy = self._config.algorithm.filter
        num = min(self._num_ready, num_needed)
        if policy.if_short == "stop":
            raise ConfigError(
                f"step {step}: algorithm.filter.group_filter={policy.group_filter!r} has rejected "
                f"{len(self._rejected)} groups, and {num} are left of {num_needed} that the step "
                "needs; allowed: more algorithm.filter.max_rounds, or if_short='train'"
            )
        return self.controller.select(step, num) or []

    def _evict(self, step: int) -> None:
        """Abandon groups that the weights of this step make too old; after the last step, all."""
        is_last = step == self._config.trainer.num_steps
        version = step + self._staleness + 1 if is_last else step
        if running := self.controller.evict(version):
            self._rollout.abandon(running)


class RolloutPrefetcher:
    """Generates the samples of one step in a thread, while a trainer does something else.

    `begin` a step, `wait` until no server answers, `take` its samples.

    While it generates nobody else may use the servers, the prompts or the buffer. Samples
    that were generated and not taken are a state of a checkpoint: a resumed run trains on them, so
    that it draws the prompts, and gets the samples, that it would have had. A step that has lost
    samples with a node is generated again, with the same prompts, the buffer as it was before, and
    the weights that servers have by then. So is a step whose last server has died, when the trainer
    had updated its weights: it waits for the next push.
    """

    def __init__(
        self,
        sampler: StepSampler,
        thread: Executor,
        experts: ExpertLayers | None = None,
    ) -> None:
        """Prepare.

        Args:
            thread: It has to outlive the servers, whose end ends what it waits for.
            experts: Layers whose routing the actor replays.
        """
        self._sampler, self._thread, self._experts = sampler, thread, experts
        self._call_s = sampler.config.timeouts.call_s
        # Prompts and buffer before the step; None if it cannot be lost.
        self._begun_from: tuple[dict[str, Any], Samples | None] | None = None
        self._step = 0  # of what is generated, or has been and was not taken
        self._pending: Future[StepResult] | None = None

    def start(self) -> None:
        """Start counting idle time, before the first step; the servers have weights."""
        self.idle_s()

    def begin(self, step: int, version: int) -> None:
        """Start to generate a step with weights of this version; return at once.

        Raises:
            RuntimeError: Samples of another step have not been taken.
        """
        if self._pending is not None:
            raise RuntimeError(f"step {step} was begun before step {self._step} was taken")
        self._step = step
        self._begun_from = self._sampler.prompts.state_dict(), self._sampler.replay.take_snapshot()
        self._pending = self._thread.submit(self._sampler.collect, step, step - 1 - version)

    def wait(self) -> None:
        """Return when no server answers; immediately if nothing was begun.

        Each call of the servers has its own limit, timeouts.call_s, and there are no more than
        algorithm.filter.max_rounds of them.

        Raises:
            PolicyMismatchError, ConfigError, WorkerError: As StepSampler.collect.
        """
        if self._pending is None:
            return
        try:
            self._pending.result()
        except NoServersError:
            print(f"step {self._step} is generated after the next push: no server has its weights")
            self._sampler.rollout.abandon_all()
            self._reset_sampler()
            self._pending = self._begun_from = None

    def _reset_sampler(self) -> None:
        """Restore prompts and buffer as they were before the step was begun."""
        assert self._begun_from is not None
        self._sampler.prompts.load_state_dict(self._begun_from[0])
        self._sampler.replay.restore(self._begun_from[1])

    def take(self, step: int, version: int) -> StepResult:
        """Return samples and metrics of a step; generate them now, of this version, if not before.

        Raises:
            RuntimeError: Another step has been begun.
            PolicyMismatchError, ConfigError, WorkerError: As `wait`.
        """
        if self._pending is None:
            self.begin(step, version)
        if self._pending is None or self._step != step:
            raise RuntimeError(f"step {step} was asked for; begun was step {self._step}")
        result = self._get_result()
        self._pending = self._begun_from = None
        return result

    def _get_result(self) -> StepResult:
        """Return the samples that were begun; lost ones are generated anew by the servers."""
        assert self._pending is not None
        result = self._pending.result()
        while self._begun_from is not None and (lost := find_lost_groups([result[0]])):
            report_lost_groups(lost)
            self._reset_sampler()
            age = self._step - 1 - self._sampler.rollout.servers.version
            result = self._sampler.collect(self._step, age)
            self._pending = Future()
            self._pending.set_result(result)
        return result

    def idle_s(self) -> float:
        """Return seconds that servers were idle since the last call (RolloutPool.idle_s)."""
        return self._sampler.rollout.idle_s()

    def state_dict(self) -> dict[str, Any]:
        """Return the samples that were generated and not taken."""
        if self._pending is None:
            return {"step": 0, "metrics": {}, "samples": None}
        batch, metrics = self._get_result()
        what = f"a checkpoint needs the samples of step {self._step}"
        samples = to_arrays(batch, what, self._call_s)
        return {"step": self._step, "metrics": dict(metrics), "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them: `take` returns them."""
        self._step, self._pending, self._begun_from = state["step"], None, None
        if state["samples"] is not None:
            self._pending = Future()
            samples = restore_batch(state["samples"], self._experts)
            self._pending.set_result((samples, dict(state["metrics"])))
