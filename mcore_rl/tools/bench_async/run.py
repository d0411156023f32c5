"""Samples a second of all loops on a long-tailed workload, whose delays are modelled."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mcore_rl.config.resolve import for_lane, resolve
from mcore_rl.config.schema import RLConfig, SampleTablesConfig
from mcore_rl.controller.process_cleanup import StopSignals
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.tools.bench_async.model import Clock, Elsewhere, ModelledActor, Servers, Workload
from mcore_rl.trainers.base import TrainerInputs
from mcore_rl.trainers.checkpointing import CheckpointManager
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.registry import TRAINERS
from mcore_rl.trainers.sample_log import SampleLog


@dataclass(frozen=True, slots=True)
class Setup:
    """A loop, on pools of its own or on the devices of both by turns."""

    mode: str
    is_shared: bool = False


SETUPS = {
    "sync": Setup("sync"),
    "sync, by turns": Setup("sync", is_shared=True),
    "one step off": Setup("one_step_off"),
    "fully async": Setup("fully_async"),
    "fully async, by turns": Setup("fully_async", is_shared=True),
}


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    num_steps: int = 20
    staleness: int = 2  # of fully_async
    load: Workload = field(default_factory=Workload)


@dataclass(frozen=True, slots=True)
class ModelledRun:
    """Of a run, in modelled seconds but for `loop_s`."""

    samples_per_s: float
    step_s: float
    trainer_waits_s: float  # a step, for samples
    servers_idle_s: float  # a step; see IdleTimer
    slots_used: float  # the share of slots with a response, over the run
    mean_age: float  # of a token, in versions
    max_age: int
    abandoned: int  # groups that were begun again
    loop_s: float  # a step: what the loop itself took here
    spans: list[tuple[float, float, str]]
    used: list[tuple[float, int]]
    slots: int

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("spans", "used", "slots"):
            del found[name]
        return {n: round(v, 3) if isinstance(v, float) else v for n, v in found.items()}


def bench_async(settings: WorkloadSettings) -> dict[str, ModelledRun]:
    return {name: measured(setup, settings) for name, setup in SETUPS.items()}


def as_json(settings: WorkloadSettings, found: dict[str, ModelledRun]) -> dict[str, Any]:
    rate = {name: one.samples_per_s for name, one in found.items()}
    return {
        "settings": asdict(settings),
        "setups": {name: one.as_json() for name, one in found.items()},
        **{
            f"over {base}": {name: round(rate[name] / rate[base], 3) for name in rate}
            for base in ("sync", "sync, by turns")
        },
    }


def measured(setup: Setup, settings: WorkloadSettings) -> ModelledRun:
    """One run: the loop of a job, and modelled servers and actor."""
    config, load, clock = _config(setup, settings), settings.load, Clock()
    share = 2 if setup.is_shared else 1
    servers: Any = Servers(clock, load, share * load.slots)
    actor: Any = ModelledActor(clock, load, share)
    rows: list[dict[str, float]] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder, keeps = Path(name), setup.mode == "fully_async"
        devices = DeviceSharing(config.placement, {"actor": actor}, servers, servers, keeps)
        data = PromptDataset([PromptRow([row], {}) for row in range(4096)])
        silent, tokenizer = SampleTablesConfig(every=0, num_shown=0, tokens=False), None
        sample_log = SampleLog(folder, tokenizer, silent)  # type: ignore[arg-type]
        inputs = TrainerInputs(
            config=config,
            devices=devices,
            prompts=data,
            test_sets={},
            sample_log=sample_log,
            thread=Elsewhere(clock),
            record_evaluation=lambda *_: None,
            build_checkpoints=lambda states: CheckpointManager(
                config, folder, devices, states, dict, StopSignals(), 0
            ),
        )
        TRAINERS[setup.mode](inputs).run(lambda _, metrics: rows.append(metrics))
    loop_s = (time.perf_counter() - began) / settings.num_steps
    return _measured(clock, servers, actor.updates, rows[-1], settings.num_steps, loop_s)


def _config(setup: Setup, settings: WorkloadSettings) -> RLConfig:
    config = RLConfig()
    config.model.path = config.data.train_file = config.data.test_file = "modelled"
    config.algorithm.log_prob_pass = "always"  # so that loops differ in the order of work only
    config.placement.rollout = "shared" if setup.is_shared else "own"
    config.trainer.mode, config.trainer.num_steps = setup.mode, settings.num_steps
    if setup.mode == "fully_async":
        config.trainer.staleness = settings.staleness
    resolve(config)
    return for_lane(config, "cpu")


def _measured(
    clock: Clock,
    servers: Servers,
    updates: list[Batch],
    last: dict[str, float],
    num_steps: int,
    loop_s: float,
) -> ModelledRun:
    ages = [step - b.jagged("weight_versions").values for step, b in enumerate(updates)]
    starts, nums = (np.array(column) for column in zip(*servers.used, strict=True))
    lasted = np.diff(np.append(starts, clock.now)).clip(min=0)
    trained_s, push_s = clock.spent("log-probs", "update"), clock.spent("push")
    return ModelledRun(
        samples_per_s=sum(map(len, updates)) / clock.now,
        step_s=clock.now / num_steps,
        trainer_waits_s=(clock.now - trained_s - push_s) / num_steps,
        servers_idle_s=servers.all_idle_s / num_steps,
        slots_used=float((lasted * nums).sum()) / clock.now / servers.slots,
        mean_age=float(np.concatenate(ages).mean()),
        max_age=int(max(age.max() for age in ages)),
        abandoned=int(last.get("queue/abandoned_total", 0)),
        loop_s=loop_s,
        spans=clock.spans,
        used=servers.used,
        slots=servers.slots,
    )


def show(
    settings: WorkloadSettings, found: dict[str, ModelledRun], console: Console | None = None
) -> None:
    columns = {
        "samples/s": "samples_per_s",
        "s a step": "step_s",
        "trainer waits": "trainer_waits_s",
        "servers idle": "servers_idle_s",
        "slots used": "slots_used",
        "mean age": "mean_age",
    }
    table = Table(title=f"{settings.num_steps} steps, modelled seconds")
    for name in ("", *found):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for name, key in columns.items():
        table.add_row(name, *[f"{getattr(one, key):.2f}" for one in found.values()])
    for base in ("sync", "sync, by turns"):
        over = [one.samples_per_s / found[base].samples_per_s for one in found.values()]
        table.add_row(f"over {base}", *[f"{ratio:.2f}" for ratio in over])
    (console or get_stdout_console()).print(table)
