"""Conformance of a trainer: a short run, then its second half again from a checkpoint."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.library import RunResult, load_recipe, run
from mcore_rl.observability.metrics import Report
from mcore_rl.rewards.registry import run_in_thread
from mcore_rl.trainers.base import TRAINERS, RLTrainer, load_trainer

NUM_STEPS, HALF = 4, 2
# A random model whose rewards vary, so that every step has a gradient, and a learning rate at which
# weights of different steps differ by much more than rounding.
_SETTINGS = (
    f"trainer.num_steps={NUM_STEPS}", f"trainer.save_every={HALF}", f"checkpoint.keep={NUM_STEPS}",
    f"evaluation.every={HALF}", "evaluation.temperature=1", "evaluation.top_p=1",
    "evaluation.top_k=0", "trainer.prompts_per_step=8", "trainer.eval_samples=8",
    "trainer.trackers=[]", "warm_start.num_steps=0", "warm_start.layout.dp=1",
    "actor.layout.tp=1", "actor.layout.ep=1", "actor.optimizer.warmup_steps=0",
    "actor.optimizer.lr=3e-3", f"reward.name={__name__}:score_digest",
)  # fmt: skip
_FLOAT32_GAP = 0.01  # of log-probs of one policy in two engines, in nats; rounding gives 1e-5
# Metrics that a run shows of each step; `steps`, `timer` and `finish_step` write the times.
_METRICS = (
    "reward", "response_tokens", "tokens_per_s", "time/generate_s", "time/weight_sync_s",
)  # fmt: skip
_CLOCK = re.compile(r"wall_time_s|(.*/)?((time|driver|(gpu_)?memory)/.*|tokens_per_s)")


@run_in_thread
def score_digest(text: str, fields: Mapping[str, Any], finish_reason: str) -> dict[str, float]:
    """Return 1 for about half of all responses, by a checksum of the text."""
    return {"reward": float(zlib.crc32(text.encode()) % 2)}


def check_trainer(
    trainer_class: type[RLTrainer],
    overrides: Sequence[str] = (),
    *,
    recipe: str = "quickstart",
    folder: str | Path | None = None,
    is_deterministic: bool | None = None,
) -> None:
    """Run a trainer for four steps, and the last two of them again from the checkpoint of step two.

    As `mcore_rl.run`, to be called under `if __name__ == "__main__":` in a script.

    Args:
        trainer_class: The class that trainer.mode names. It can be imported by its module's name.
        overrides: Settings of the runs, such as "algorithm.num_mini_batches=1".
        recipe: Recipe that the runs are of.
        folder: Folder for the runs, which stay there. None: a temporary one.
        is_deterministic: Whether a resumed run has the metrics of an uninterrupted one. None: True
            unless the trainer's `mode` is "fully_async", whose samples depend on timing.

    Raises:
        AssertionError: The trainer breaks the contract of `mcore_rl.trainers.base.RLTrainer`.
        ConfigError: A setting is wrong.
    """
    if not (inspect.isclass(trainer_class) and issubclass(trainer_class, RLTrainer)):
        raise AssertionError(
            f"{trainer_class!r} is no subclass of {RLTrainer.__module__}.RLTrainer; trainer.mode "
            "takes one"
        )
    if is_deterministic is None:
        is_deterministic = trainer_class.mode != "fully_async"
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="check_trainer_"))
        checker = _TrainerCheck(trainer_class, (*_SETTINGS, *overrides), recipe, Path(folder))
        checker.check(is_deterministic=is_deterministic)


@dataclass
class _TrainerCheck:
    """Runs of a trainer, and observations of them."""

    trainer_class: type[RLTrainer]
    overrides: Sequence[str]
    recipe: str
    folder: Path
    _violation: str = field(default="", init=False)  # of the latest run
    _next_step: int = field(default=1, init=False)
    _first_model: str = field(default="", init=False)  # folder of the weights before training
    _max_gap: float = field(default=_FLOAT32_GAP, init=False)

    @property
    def name(self) -> str:
        return self.trainer_class.__name__

    def check(self, *, is_deterministic: bool) -> None:
        """Run twice and compare; raise AssertionError at the first violation."""
        uninterrupted = self._run("run")
        self._check_weights(uninterrupted)
        checkpoint = uninterrupted.folder / "checkpoints" / f"step_{HALF:06d}"
        if not checkpoint.is_dir():
            raise AssertionError(
                f"{self.name} has saved no checkpoint of step {HALF}, which was due; the contract: "
                "self.save_if_due(step) after the updates of a step"
            )
        resumed = self._run("resumed", f"resume={checkpoint}")
        if is_deterministic:
            self._compare(resumed.metrics, uninterrupted.metrics)

    def _run(self, name: str, *overrides: str) -> RunResult:
        config = self._compose(self.folder / name, overrides)
        self._violation, self._next_step = "", 1
        try:
            with self._observe():
                return run(config)
        except ConfigError:
            raise
        except Exception as error:
            violation = self._violation or (
                f"{self.name}: a run of {NUM_STEPS} steps has failed: {type(error).__name__}: "
                f"{error}; the contract: `train` runs the steps that are left, and returns"
            )
            raise AssertionError(violation) from error

    def _compose(self, output: Path, overrides: Sequence[str]) -> RLConfig:
        names = [name for name in TRAINERS if load_trainer(name) is self.trainer_class]
        path = f"{self.trainer_class.__module__}:{self.trainer_class.__qualname__}"
        mode = f"trainer.mode={names[0] if names else path}"
        return load_recipe(
            self.recipe, *self.overrides, mode, *overrides, f"output_dir={output.absolute()}"
        )

    @contextlib.contextmanager
    def _observe(self) -> Iterator[None]:
        """Watch the trainer's reports while it runs."""
        original = self.trainer_class.run

        def run_observed(trainer: RLTrainer, report: Report) -> None:
            self._next_step = trainer.checkpoints.next_step
            self._first_model = self._first_model or trainer.config.model.path
            if trainer.config.model.dtype != "float32":
                self._max_gap = trainer.config.trainer.max_logprob_gap or math.inf

            def report_observed(step: int, metrics: dict[str, float]) -> None:
                self._require(*self._list_violations(trainer, step, metrics))
                self._next_step += 1
                report(step, metrics)

            original(trainer, report_observed)
            if self._next_step <= NUM_STEPS:
                self._require(
                    f"{self.name}.train has returned, and step {self._next_step} of {NUM_STEPS} is "
                    "not reported; the contract: self.finish_step(step, metrics) at the end of "
                    "each of self.steps()"
                )

        has_method = "run" in vars(self.trainer_class)
        self.trainer_class.run = run_observed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            if has_method:
                self.trainer_class.run = original  # type: ignore[method-assign]
            else:
                del self.trainer_class.run

    def _require(self, *violations: str) -> None:
        """End the run at a violation."""
        for violation in violations:
            self._violation = violation
            raise AssertionError(violation)

    def _list_violations(
        self, trainer: RLTrainer, step: int, metrics: Mapping[str, float]
    ) -> Iterator[str]:
        """Yield the violations of the contract at the end of a step."""
        if step != self._next_step:
            yield (
                f"{self.name} has reported step {step}, and step {self._next_step} was next; the "
                "contract: self.finish_step(step, metrics) once for each of self.steps()"
            )
        version = trainer.devices.servers.version
        if version != step:
            yield (
                f"{self.name}: at the end of step {step} the servers have weights of version "
                f"{version}; the contract: self.devices.update_weights(version=step) in each step, "
                "before finish_step"
            )
        is_due = trainer.evaluation.is_due(step)
        if is_due != any(name.startswith("eval/") for name in metrics):
            yield (
                f"{self.name}: metrics of step {step} have {'no' if is_due else 'an'} evaluation, "
                f"and it is {'due' if is_due else 'not due'}; the contract: metrics |= "
                "self.evaluate_if_due(step) in each step, after update_weights"
            )
        if missing := [name for name in _METRICS if name not in metrics]:
            yield (
                f"{self.name}: metrics of step {step} lack {', '.join(missing)}; the contract: the "
                "metrics of self.sampler.collect(step), with the phases timed by "
                "self.timer('generate') and self.timer('weight_sync')"
            )

    def _check_weights(self, result: RunResult) -> None:
        """Check that weights have changed, and that servers had the last ones."""
        first, last = CheckpointReader(self._first_model), CheckpointReader(str(result.checkpoint))
        if all(torch.equal(first.read_tensor(n), last.read_tensor(n)) for n in last.get_shapes()):
            raise AssertionError(
                f"{self.name}: weights after {NUM_STEPS} steps are those before; the contract: "
                "self.actor.update(...) in each step that has samples"
            )
        gap = result.summary.get("max_logprob_gap", 0.0)  # absent if nothing was compared
        if gap > self._max_gap:
            raise AssertionError(
                f"{self.name}: log-probs of servers differ by {gap:.3g} nats from those of the "
                "actor; the contract: self.devices.update_weights(version=step) after the "
                "actor's updates, and self.evaluate_if_due(step) after it"
            )

    def _compare(
        self, rows: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
    ) -> None:
        """Compare the metrics of a resumed and an uninterrupted run."""
        for row, earlier in zip(rows, expected, strict=True):
            for name in sorted(row.keys() | earlier.keys()):
                if not _CLOCK.fullmatch(name) and row.get(name) != earlier.get(name):
                    raise AssertionError(
                        f"{self.name}: after a resume from step {HALF}, step {row['step']} has "
                        f"{name}={row.get(name)}, and {earlier.get(name)} without; the contract: "
                        "list_states returns all parts that have a state"
                    )
