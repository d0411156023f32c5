"""Check whether a job fits the memory of its GPUs, for dry runs and `mcore-rl plan memory`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.rules_train import validate_train
from mcore_rl.config.schema import RLConfig, TrainConfig
from mcore_rl.engine.base import load_backend
from mcore_rl.jobs.placement import check_engines, detect_device_type, resolve_for_nodes
from mcore_rl.jobs.preflight import check_layouts
from mcore_rl.jobs.resume import prepare_settings
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.jobs.supervised_preflight import check_train_engine, resolve_for_device
from mcore_rl.models.base import HFConfig, read_config, scope_family
from mcore_rl.planner.fixes import Fix, find_fixes, list_changes, list_supervised_changes
from mcore_rl.planner.memory import Conditions, MemoryLimit, MemoryPlan, plan_memory
from mcore_rl.planner.report import print_memory, print_verdict
from mcore_rl.planner.supervised import plan_supervised_memory

DEFAULT_HARDWARE = "h100"  # of a cluster that is planned for without --hardware
Job = RLConfig | TrainConfig


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """The memory plan of a job, and whether it fits a device."""

    plan: MemoryPlan
    conditions: Conditions
    device: MemoryLimit | None  # None: no verdict
    fixes: Sequence[Fix]

    @property
    def fits(self) -> bool:
        return self.device is None or self.plan.worst.total <= self.device.memory_bytes

    def print_verdict(self, console: Console, *, ignores_memory: bool) -> None:
        """Print whether the job fits, if there is a device to fit.

        Raises:
            ConfigError: It does not; the memory of all ranks is printed, too.
        """
        if self.device is None:
            return
        print_verdict(self.plan, self.device, self.fixes, console)
        if not self.fits and not ignores_memory:
            print_memory(self.plan, self.conditions, console)
            raise ConfigError(
                f"the run does not fit {self.device.name}: see above; allowed: other settings, or "
                "--ignore-memory"
            )


def find_device(hardware: str | None, gpus_per_node: int | None) -> tuple[str, MemoryLimit | None]:
    """Return the device type of the ranks, "cuda" or "cpu", and the device to fit.

    Without arguments they are those of this machine; the device is None on its CPUs, and where its
    ranks are on GPUs of other nodes.

    Args:
        hardware: Name, file or gigabytes of the device.
        gpus_per_node: GPUs of each node of a cluster that is planned for.

    Raises:
        ConfigError: The hardware is unknown, or has no GPUs.
    """
    if hardware is None and not gpus_per_node:
        device_type = detect_device_type()
        if device_type == "cpu" or not torch.cuda.is_available():
            return device_type, None
        properties = torch.cuda.get_device_properties(0)
        return device_type, MemoryLimit(properties.name, properties.total_memory)
    device = MemoryLimit.parse(DEFAULT_HARDWARE if hardware is None else hardware)
    if gpus_per_node and device.device_type == "cpu":
        raise ConfigError(
            f"--gpus-per-node={gpus_per_node}: --hardware={hardware!r} has device: cpu; allowed: "
            "hardware with device: cuda"
        )
    return device.device_type, device


def check_memory(
    config: Job,
    model: HFConfig,
    conditions: Conditions,
    device: MemoryLimit | None,
) -> MemoryCheck:
    """Plan the memory of a resolved job; if it does not fit, find settings with which it does.

    Args:
        model: config.json of the policy, or of the supervised model.
    """
    if device is not None:
        conditions = replace(conditions, memory_bytes=device.memory_bytes)
    plan = _plan_job(config, model, conditions)
    fixes: list[Fix] = []
    if device is not None and plan.worst.total > device.memory_bytes:

        def count_bytes(changed: Job) -> int:
            check_settings(changed, conditions.device_type)
            changed_plan = _plan_job(changed, model, conditions)
            if uncounted := set(changed_plan.uncounted) - set(plan.uncounted):
                raise ConfigError(f"activations of {', '.join(uncounted)} would not be counted")
            return changed_plan.worst.total

        limit = device.memory_bytes
        if isinstance(config, RLConfig):
            fixes = find_fixes(config, partial(list_changes, model=model), count_bytes, limit)
        else:
            changes = partial(list_supervised_changes, model=model)
            fixes = find_fixes(config, changes, count_bytes, limit)
    return MemoryCheck(plan, conditions, device, fixes)


def _plan_job(config: Job, model: HFConfig, conditions: Conditions) -> MemoryPlan:
    if isinstance(config, RLConfig):
        return plan_memory(config, model, conditions)
    return plan_supervised_memory(config, model, conditions)


def check_settings(config: Job, device_type: str) -> None:
    """Check the settings and layouts of a job that has been changed after it was resolved.

    Args:
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: A layout cannot be, or an engine does not read a setting.
    """
    if isinstance(config, RLConfig):
        validate_rl(config, needs_data=False)
        check_engines(config, device_type)
        check_layouts(config, plan_run(config), device_type)
    else:
        validate_train(config, needs_data=False)
        check_train_engine(config, device_type)
        _check_layout(config)


def _check_layout(config: TrainConfig) -> HFConfig:
    """Check the layout of a supervised job by its model's config.json, which is returned."""
    model = read_config(config.model.path)
    load_backend(config.engine).check_model("engine", config.engine, model)
    return model


@contextmanager
def prepare_plan(
    config: Job, device_type: str, *, checks_layout: bool = True
) -> Iterator[tuple[Job, HFConfig]]:
    """Resolve settings for a plan, from config.json alone; yield them and the model's config.

    Inside, the process uses the family of these settings.

    Args:
        checks_layout: False if the layouts of an RL run are replaced.

    Raises:
        ConfigError: A setting is wrong, or a layout does not fit the model.
    """
    with scope_family(), TemporaryDirectory() as scratch:
        if not isinstance(config, RLConfig):
            resolved = resolve_for_device(config, device_type, needs_data=False)
            yield resolved, _check_layout(resolved)
            return
        config = resolve_for_nodes(config, device_type, needs_data=False)
        prepared = prepare_settings(config, Path(scratch), None)
        if checks_layout:
            check_layouts(prepared, plan_run(prepared), device_type)
        yield prepared, read_config(prepared.model.path)
