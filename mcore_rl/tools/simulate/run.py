"""Run the loop of a job with simulated ranks, and say what it did."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import Layout, RLConfig, SampleLogConfig
from mcore_rl.controller.pending_call import gather_results
from mcore_rl.controller.process_cleanup import StopSignals
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.simulated_group import SimulatedGroup
from mcore_rl.controller.worker_group import wait_until_built
from mcore_rl.data.batch import NO_VERSION, Samples
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.jobs.run_plan import CRITIC, plan_run
from mcore_rl.observability.timeline import TIMELINE, StepTimeline
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.weight_updater import connect
from mcore_rl.rollout.worker import RolloutWorker
from mcore_rl.tools.simulate.ranks import Ledger, SimulatedRanks, SimulatedServer
from mcore_rl.tools.simulate.times import Workload
from mcore_rl.tools.simulate.virtual_time import VirtualClock, VirtualExecutor, run_by_clock
from mcore_rl.trainers.base import TrainerInputs, load_trainer
from mcore_rl.trainers.checkpointing import CheckpointManager
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.sample_log import SampleLog

_NUM_ROWS = 4096  # of the data set
_OBJECT_STORE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of a simulated run."""

    step: int
    start_s: float
    end_s: float
    driver_cpu_s: float
    metrics: Mapping[str, float]
    timeline: StepTimeline  # phases and calls, by the clock
    mean_age: float  # of the oldest token of each sample, in versions
    max_age: int


@dataclass(slots=True)
class SimulatedRun:
    """Hold the results of a simulated run.

    Attributes:
        start_s: When the servers and the trainer had started, by the clock.
        num_calls: Calls from the driver to ranks.
    """

    config: RLConfig
    ledger: Ledger
    start_s: float = 0.0
    end_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    num_calls: int = 0
    ranks_cpu_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steps)

    @property
    def driver_share(self) -> float:
        """CPU seconds of the driver over seconds of the steps."""
        return sum(step.driver_cpu_s for step in self.steps) / self.seconds

    def summarize(self) -> dict[str, float]:
        """Return the numbers of the report, by name."""
        ledger = self.ledger
        num_servers = self.config.rollout.num_servers
        trained = {kind: 0.0 for kind in ("log_probs", "update", "weight_sync")}
        for start, end, kind in ledger.spans:
            if start >= self.start_s:
                trained[kind] += end - start
        waits_s = self.seconds - sum(trained.values())
        served_s = sum(ledger.server_s.values())
        tokens = sum(ledger.tokens.values())
        summary = {
            "step_s": self.step_s,
            "samples_per_s": sum(s.metrics["samples"] for s in self.steps) / self.seconds,
            "driver_cpu_s": sum(step.driver_cpu_s for step in self.steps) / len(self.steps),
            "driver_share": self.driver_share,
            "calls": self.num_calls / len(self.steps),
            "mean_age": float(np.mean([step.mean_age for step in self.steps])),
            "max_age": float(max(step.max_age for step in self.steps)),
            "waiting_samples": float(
                np.mean([s.metrics.get("queue/waiting_samples", 0.0) for s in self.steps])
            ),
            "waiting_responses": _average(ledger.running, 2, self.start_s, self.end_s),
            "responses_per_server": _average(ledger.running, 1, self.start_s, self.end_s)
            / num_servers,
            "server_failures": float(ledger.num_failures),
        }
        summary |= {f"trainer/{kind}": s / self.seconds for kind, s in trained.items()}
        summary["trainer/waits"] = waits_s / self.seconds
        for cause in ("generate", "weight_sync", "sleep", "restart", "idle"):
            summary[f"servers/{cause}"] = ledger.server_s[cause] / served_s
        for outcome in ("died", "abandoned"):
            summary[f"tokens/{outcome}"] = ledger.tokens[outcome] / max(tokens, 1)
        return summary


def _average(
    running: list[tuple[float, int, int]], column: int, start_s: float, end_s: float
) -> float:
    """Return the mean of a step function over time."""
    times = np.array([entry[0] for entry in running] + [max(end_s, running[-1][0])])
    values = np.array([entry[column] for entry in running], np.float64)
    durations = np.diff(np.clip(times, start_s, end_s))
    return float((durations * values).sum() / (end_s - start_s))


class _AgeLog(SampleLog):
    """Records the versions of samples instead of writing them."""

    def __init__(self, folder: Path) -> None:
        silent = SampleLogConfig(every=0, num_shown=0, tokens=False)
        super().__init__(folder, None, silent)
        self.ages: dict[int, np.ndarray[Any, Any]] = {}

    def write_step(self, step: int, batch: Samples) -> None:
        oldest = batch.array("oldest_versions")
        self.ages[step] = step - 1 - oldest[oldest != NO_VERSION]


def prepare_config(config: RLConfig) -> RLConfig:
    """Return settings for a run without a model and data, resolved.

    Raises:
        ConfigError: the run has a part that is not simulated.
    """
    config.model.path = config.data.train_file = config.data.test_file = "simulated"
    config.task.name, config.warm_start.num_steps = "", 0
    config.trainer.eval_samples = config.trainer.save_every = 0
    if CRITIC in plan_run(config):
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage!r} trains a critic, of which plan "
            "simulate has no model; allowed: an advantage without values, as 'grpo'"
        )
    parts: dict[str, tuple[Any, Any]] = {  # value, and the one without the part
        "algorithm.kl_coef": (config.algorithm.kl_coef, 0.0),
        "algorithm.distillation.loss": (config.algorithm.distillation.loss, "off"),
        "reward_model.model_path": (config.reward_model.model_path, ""),
        "teacher.models": (config.teacher.models, {}),
        "actor.lora.rank": (config.actor.lora.rank, 0),
        "rollout.speculative.num_tokens": (config.rollout.speculative.num_tokens, 0),
        "rollout.nodes_per_server": (config.rollout.nodes_per_server, 1),
    }
    for name, (value, without) in parts.items():
        if value != without:
            raise ConfigError(
                f"{name}={value!r}: plan simulate has no model of that part; allowed: {without!r}"
            )
    validate_rl(config)
    return resolve_for_device_type(config, "cpu")


@contextlib.contextmanager
def open_simulation() -> Iterator[None]:
    """Open the Ray session that simulated runs store their samples in."""
    with ray_session(
        num_cpus=1, num_gpus=0, object_store_bytes=_OBJECT_STORE_BYTES, log_to_driver=False
    ):
        yield


def simulate(config: RLConfig, workload: Workload) -> SimulatedRun:
    """Run the loop of trainer.mode, in an open session; what it prints goes to stderr.

    Args:
        config: Of `prepare_config`.

    Raises:
        ConfigError, WorkerError: as a run, such as of a server that dies too often.
    """
    clock, ledger = VirtualClock(), Ledger()
    run = SimulatedRun(config, ledger)
    with (
        tempfile.TemporaryDirectory() as folder,
        run_by_clock(clock),
        contextlib.redirect_stdout(sys.stderr),
        contextlib.ExitStack() as stack,
    ):
        groups: list[SimulatedGroup] = []
        devices = _start(config, workload, clock, ledger, groups, stack)
        log = _AgeLog(Path(folder))
        entries = workload.count_entries(workload.prompt_tokens)
        data = PromptDataset([PromptRow([row] * entries, {}) for row in range(_NUM_ROWS)])
        trainer = load_trainer(config.trainer.mode)(
            TrainerInputs(
                config=config,
                devices=devices,
                prompts=data,
                test_sets={},
                sample_log=log,
                thread=VirtualExecutor(clock),
                record_evaluation=lambda *_: None,
                build_checkpoints=lambda states: CheckpointManager(
                    config, Path(folder), devices, states, dict, StopSignals(), 0
                ),
            )
        )
        run.start_s = start_s = clock.now_s
        TIMELINE.take("training", 0)  # the spans of the start
        ledger.server_s.clear()
        driver_s, calls = clock.measure_driver_s(), sum(group.num_calls for group in groups)

        def report(step: int, metrics: dict[str, float]) -> None:
            nonlocal start_s, driver_s
            ages = log.ages.pop(step, np.zeros(0))
            metrics["samples"] = float(len(ages))
            now_s = clock.measure_driver_s()
            run.steps.append(
                StepRecord(
                    step, start_s, clock.now_s, now_s - driver_s, dict(metrics),
                    TIMELINE.take("training", step),
                    float(ages.mean()) if len(ages) else 0.0, int(ages.max(initial=0)),
                )
            )  # fmt: skip
            start_s, driver_s = clock.now_s, now_s

        trainer.run(report)
        run.end_s, run.ranks_cpu_s = clock.now_s, clock.ranks_cpu_s
        run.num_calls = sum(group.num_calls for group in groups) - calls
        devices.servers.idle_s()  # brings the seconds of every server up to now
    return run


def _start(
    config: RLConfig,
    workload: Workload,
    clock: VirtualClock,
    ledger: Ledger,
    groups: list[SimulatedGroup],
    stack: contextlib.ExitStack,
) -> DeviceSharing:
    """Start the actor and the servers as a job does, and connect them."""
    plan = plan_run(config)
    shared = plan.servers_sleep
    restarts: dict[int, int] = {}

    def start_server(number: int) -> SimulatedGroup:
        restart = restarts[number] = restarts.get(number, -1) + 1
        server = SimulatedServer(clock, workload, ledger, number, restart)
        name = f"rollout-{number}" if config.rollout.num_servers > 1 else "rollout"
        group = SimulatedGroup(
            name, RolloutWorker, Layout(), config.timeouts, server, clock.schedule
        )
        groups.append(group)
        return group

    servers = stack.enter_context(
        ServerPool(
            start_server,
            config.rollout.num_servers,
            max_restarts=config.rollout.max_restarts,
            takes_turns=shared,
            timeouts=config.timeouts,
        )
    )
    layout = config.actor.layout
    ranks = SimulatedRanks(clock, workload, ledger, layout)
    actor = SimulatedGroup("actor", ModelWorker, layout, config.timeouts, ranks, clock.schedule)
    groups.append(actor)
    wait_until_built([*servers.groups, actor])
    preparing = servers.submit_prepare()
    gather_results([*preparing, actor.submit(ModelWorker.initialize)])
    if shared:
        actor.call(ModelWorker.to, "host")
    gather_results(servers.submit_start())
    servers.mark_started()
    sync = connect(config, actor, servers, 0)
    keeps_requests = plan.loop == "fully_async"
    return DeviceSharing(plan.pool_names, {"actor": actor}, servers, sync, keeps_requests)
