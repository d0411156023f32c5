"""The conformance check of trainers: loops with one fault each, over a model that is a number.

Runs are made of the real base of trainers, checkpoints, settings and output; only models, servers
and samples are fakes. tests/e2e/test_trainer_conformance.py has real runs.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import RLConfig, SampleLogConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.jobs.output import CHECKPOINT, SUMMARY, RunOutput
from mcore_rl.jobs.resume import find_checkpoint_to_resume
from mcore_rl.library import RunResult, load_run
from mcore_rl.testing import check_trainer
from mcore_rl.testing import trainer as conformance
from mcore_rl.trainers.base import RLTrainer, TrainerInputs, load_trainer
from mcore_rl.trainers.checkpointing import CheckpointManager, Stateful
from mcore_rl.trainers.evaluation import Evaluation
from mcore_rl.trainers.sample_log import SampleLog
from tests.fakes import LocalGroup


class Devices(LocalGroup):
    """An actor and a server whose weights are one number; both roles are the same object."""

    critic = None
    saved: ClassVar[dict[int, float]] = {}  # weights by step

    def __init__(self) -> None:
        self.weight = self.served_weight = 1.0
        self.version, self.models = 0, {}
        self.resend: Any = None

    @property
    def actor(self) -> Any:
        return self

    servers = actor

    def use(self, role: str) -> None: ...

    def offload_rollout(self) -> None: ...

    def resend_weights(self) -> None: ...

    def learn(self, gradient: float) -> None:
        self.weight += gradient

    def update_weights(self, version: int) -> None:
        self.version, self.served_weight = version, self.weight

    def save_checkpoint(self, path: str, in_background: bool) -> list[str]:
        [step] = re.findall(r"step_0*(\d+)", path)
        self.saved[int(step)] = self.weight
        return [""]

    def is_saved(self) -> list[bool]:
        return [True]

    def finish_save(self) -> list[str]:
        return [""]

    def load_checkpoint(self, path: str) -> None:
        [step] = re.findall(r"step_0*(\d+)", path)
        self.weight = self.saved[int(step)]

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file({"weight": torch.tensor([self.weight])}, folder / "model.safetensors")


class Sampler:
    """Draws prompts, as the real one does, and samples from the server's weights."""

    def __init__(self, trainer: RLTrainer) -> None:
        self._prompts, self._devices = trainer.prompts, trainer.devices

    def collect(self, step: int) -> tuple[Batch, dict[str, float]]:
        prompts = self._prompts.take(2)
        groups = prompts.array("group_ids")
        metrics = {"reward": float(groups.sum()) * self._devices.served_weight}
        return Batch({"group_ids": groups}), metrics | {
            "response_tokens": 2.0,
            "generated_tokens": 4,
        }


class ServedWeight(Evaluation):
    """Evaluates by the weights of the server."""

    def run(self, step: int) -> dict[str, float]:
        weight = self.rollout.servers.served_weight  # type: ignore[attr-defined]
        self.latest = [weight]
        return {"eval/test/reward": weight}


def run_with_fakes(config: RLConfig) -> RunResult:
    """Run trainer.mode as a job does."""
    validate_rl(config, needs_data=False)
    config = resolve_for_device_type(config, "cpu", has_experts=True)
    folder, devices = Path(config.output_dir), Devices()
    first = folder.parent / "first"
    if not first.exists():
        devices.export(first)
    config = replace(config, model=replace(config.model, path=str(first)))
    checkpoint = find_checkpoint_to_resume(config, folder)
    output = RunOutput(folder, config, checkpoint)

    def build_checkpoints(states: Any) -> CheckpointManager:
        stop = type("NoSignals", (), {"requested": ""})()
        results = output.results
        return CheckpointManager(config, folder, devices, states, lambda: results, stop, 0)  # type: ignore[arg-type]

    trainer = load_trainer(config.trainer.mode)(
        TrainerInputs(
            config=config,
            devices=devices,  # type: ignore[arg-type]
            prompts=PromptDataset([PromptRow([row], {}) for row in range(30)]),
            test_sets={"test": Batch({"group_ids": np.arange(1)})},
            sample_log=SampleLog(folder, None, SampleLogConfig(every=0, num_shown=0, tokens=False)),  # type: ignore[arg-type]
            thread=None,  # type: ignore[arg-type]
            record_evaluation=output.record_evaluation,
            build_checkpoints=build_checkpoints,
        )
    )
    trainer.sampler = Sampler(trainer)  # type: ignore[assignment]
    sets = trainer.evaluation.sets
    trainer.evaluation = evaluation = ServedWeight(config, trainer.rollout, sets, None, print)  # type: ignore[arg-type]
    if checkpoint is not None:
        trainer.checkpoints.restore(checkpoint)
    with output.progress("training", config.trainer.num_steps) as report:
        trainer.run(report)
    for weight in evaluation.latest:
        output.record_gap({"max_logprob_gap": abs(weight - devices.weight)})
    devices.export(folder / CHECKPOINT)
    (folder / SUMMARY).write_text(json.dumps(output.results))
    return load_run(folder)


@pytest.fixture(autouse=True)
def _use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "run", run_with_fakes)
    monkeypatch.setattr(Devices, "saved", {})


class Loop(RLTrainer):
    """A loop without a fault, whose parts the faulty ones replace."""

    def train(self) -> None:
        for step in self.steps():
            metrics = self.generate(step)
            self.update(step)
            self.save_if_due(step)
            self.push(step)
            metrics |= self.evaluate_if_due(step)
            self.finish(step, metrics)

    def generate(self, step: int) -> dict[str, float]:
        with self.timer("generate"):
            metrics: dict[str, float] = self.sampler.collect(step)[1]
        return metrics

    def update(self, step: int) -> None:
        self.devices.actor.learn(0.5)

    def push(self, step: int) -> None:
        with self.timer("weight_sync"):
            self.devices.update_weights(version=step)

    def finish(self, step: int, metrics: dict[str, float]) -> None:
        self.finish_step(step, metrics)


class OwnRun(Loop):
    def run(self, report: Any) -> None:
        super().run(report)


class SavedMomentum(Loop):
    """A loop with a state that checkpoints have."""

    momentum = 1.0

    def list_states(self) -> dict[str, Stateful]:
        return super().list_states() | {"momentum": self}

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: Any) -> None:
        self.momentum = state["momentum"]

    def update(self, step: int) -> None:
        self.momentum *= 2
        self.devices.actor.learn(self.momentum)


@pytest.mark.parametrize("loop", [Loop, OwnRun, SavedMomentum])
def test_a_loop_without_a_fault_conforms(tmp_path, loop):
    methods = {**vars(loop)}
    check_trainer(loop, folder=tmp_path)
    assert {**vars(loop)} == methods
    rows = load_run(tmp_path / "resumed").metrics
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_runs_go_to_a_temporary_folder_and_have_the_overrides(monkeypatch):
    configs = []

    def record(config: RLConfig) -> RunResult:
        configs.append(config)
        return run_with_fakes(config)

    monkeypatch.setattr(conformance, "run", record)
    check_trainer(Loop, ["seed=7"])
    assert [config.seed for config in configs] == [7, 7]
    assert configs[0].trainer.mode == f"{__name__}:Loop"
    assert not any(Path(config.output_dir).parent.exists() for config in configs)


class Forgetful(Loop):
    def finish(self, step: int, metrics: dict[str, float]) -> None: ...


class StopsEarly(Loop):
    def steps(self) -> Any:
        return [1, 2, 3]


class ReportsTwice(Loop):
    def finish(self, step: int, metrics: dict[str, float]) -> None:
        super().finish(step, metrics)
        super().finish(step, metrics)


class CountsItself(Loop):
    def steps(self) -> Any:
        for step in range(1, self.config.trainer.num_steps + 1):
            self.clock.seconds.clear()
            yield step


class NeverPushes(Loop):
    def push(self, step: int) -> None:
        with self.timer("weight_sync"):
            pass


class PushesAfterReport(Loop):
    def push(self, step: int) -> None:
        with self.timer("weight_sync"):
            pass

    def finish(self, step: int, metrics: dict[str, float]) -> None:
        super().finish(step, metrics)
        self.devices.update_weights(version=step)


class NeverUpdates(Loop):
    def update(self, step: int) -> None: ...


class UpdatesAfterPush(Loop):
    def update(self, step: int) -> None: ...

    def finish(self, step: int, metrics: dict[str, float]) -> None:
        self.devices.actor.learn(0.5)
        super().finish(step, metrics)


class NeverEvaluates(Loop):
    def evaluate_if_due(self, step: int) -> dict[str, float]:
        return {}


class AlwaysEvaluates(Loop):
    def evaluate_if_due(self, step: int) -> dict[str, float]:
        return self.evaluation.run(step)


class NeverSaves(Loop):
    def save_if_due(self, step: int) -> None: ...


class ForgetsMomentum(SavedMomentum):
    def list_states(self) -> dict[str, Stateful]:
        return RLTrainer.list_states(self)


class HasNoTimes(Loop):
    def timer(self, phase: str) -> Any:
        return super().timer("step")


class DropsMetrics(Loop):
    def generate(self, step: int) -> dict[str, float]:
        return {"generated_tokens": super().generate(step)["generated_tokens"]}


class Fails(Loop):
    def update(self, step: int) -> None:
        raise ZeroDivisionError("no samples")


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (
            Forgetful,
            r"RuntimeError: Forgetful\.train has not ended step 1; allowed: self\.finish_s",
        ),
        (StopsEarly, r"train has returned, and step 4 of 4 is not reported"),
        (
            ReportsTwice,
            r"has reported step 1, and step 2 was next; the contract: self\.fin",
        ),
        (CountsItself, r"has reported step 1, and step 3 was next"),
        (
            NeverPushes,
            r"at the end of step 1 the servers have weights of version 0; the con",
        ),
        (PushesAfterReport, r"at the end of step 1 the servers have weights of version 0"),
        (
            NeverUpdates,
            r"weights after 4 steps are those before; the contract: self\.actor",
        ),
        (
            UpdatesAfterPush,
            r"differ by 0\.5 nats from those of the actor; the contract: se",
        ),
        (
            NeverEvaluates,
            r"metrics of step 2 have no evaluation, and it is due; the contract",
        ),
        (AlwaysEvaluates, r"metrics of step 1 have an evaluation, and it is not due"),
        (NeverSaves, r"has saved no checkpoint of step 2, which was due; the contract: self\.save"),
        (ForgetsMomentum, r"resume from step 2, step 4 has eval/test/reward=.*list_states returns"),
        (HasNoTimes, r"metrics of step 1 lack time/generate_s, time/weight_sync_s; the contract"),
        (
            DropsMetrics,
            r"metrics of step 1 lack reward, response_tokens; the contract: the",
        ),
        (Fails, r"a run of 4 steps has failed: ZeroDivisionError: no samples; the contract: `trai"),
    ],
)
def test_a_fault_is_named(tmp_path, loop, message):
    with pytest.raises(AssertionError, match=f"^{loop.__name__}.*{message}"):
        check_trainer(loop, folder=tmp_path)
    assert "run" not in vars(loop)


def test_a_resumed_run_of_a_loop_that_depends_on_timing_may_differ(tmp_path):
    check_trainer(ForgetsMomentum, folder=tmp_path, is_deterministic=False)


@pytest.mark.parametrize("value", [dict, Loop.train, "sync"])
def test_a_value_that_is_no_trainer_class_is_named(tmp_path, value):
    with pytest.raises(AssertionError, match=r"is no subclass of mcore_rl\.trainers\.base\.RLTr"):
        check_trainer(value, folder=tmp_path)


def test_a_wrong_setting_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match="unknown setting 'sed'"):
        check_trainer(Loop, ["sed=7"], folder=tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.num_steps=-1"):
        check_trainer(Loop, ["trainer.num_steps=-1"], folder=tmp_path)
