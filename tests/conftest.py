"""The lanes, and settings of every test run, made before torch, Ray or vLLM is imported.

A test's lane is its mark: `ranks`, `server` or `job`; without one it is a unit test. The folder
gives the mark where the file does not. xdist runs a lane in one worker, from end to end: what its
tests share is started once. Unit tests are shared out by file.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from mcore_rl.observability.process import skip_gc_at_exit

LANES = ("job", "ranks", "server")  # the longest first
JOBS_ON_NODES = {"test_slurm.py", "test_launch.py", "test_doctor.py", "test_server_nodes.py"}
JOBS_OF_TRAINERS = {
    "test_fully_async.py", "test_one_step_off.py", "test_placement.py", "test_quickstart.py",
    "test_resume.py", "test_server_deaths.py", "test_train_jobs.py",
}  # fmt: skip
LANE_OF_FOLDER = {"dist_cpu": "ranks", "e2e": "job"}
UNIT = "not (ranks or server or job or nightly)"  # as in pyproject.toml

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour, without its warning
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

skip_gc_at_exit()
gc.disable()  # until everything is imported

# A shell's background job ignores it, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; no deadline, since the machine may be shared.
settings.register_profile("mcore_rl", derandomize=True, deadline=None)
settings.load_profile("mcore_rl")


def pytest_collection_finish() -> None:
    """Hide what has been imported from the garbage collector, which would look at it for ever."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose tests without -m: `pytest` runs unit tests; a named path, all but `nightly`."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if named and config.option.markexpr == UNIT:
        whole_files = [argument for argument in config.args if "::" not in argument]
        config.option.markexpr = "not nightly" if whole_files else ""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One per core; none for a single file, which would wait for them to start."""
    if len(config.args) == 1 and ".py" in config.args[0]:
        return 0
    return min(len(os.sched_getaffinity(0)), 8)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Unit tests need not wait for the imports of the others."""
    is_lane = collection_path.is_dir() and collection_path.name in LANE_OF_FOLDER
    return True if is_lane and config.option.markexpr == UNIT else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lanes and groups. Lanes come first: unit tests fill the workers that are done with theirs."""
    lanes = {item: find_lane(item) for item in items}
    for item, lane in lanes.items():
        if lane == "server" and item.path.parent.name != "e2e":  # whose conftest ends the servers
            raise pytest.UsageError(f"{item.nodeid}: tests with the mark server are in tests/e2e")
        if lane:
            item.add_marker(lane)
        item.add_marker(pytest.mark.xdist_group(choose_group(item, lane)))
    items.sort(key=lambda item: LANES.index(lanes[item]) if lanes[item] else len(LANES))


def choose_group(item: pytest.Item, lane: str | None) -> str:
    """Return the xdist group of a test, whose tests run in one worker. Jobs have three."""
    if lane == "job" and item.path.name in JOBS_ON_NODES:
        return "job on nodes"
    if lane == "job" and item.path.name in JOBS_OF_TRAINERS:
        return "job of trainers"
    return lane or "/".join(item.path.parts[-2:])


def find_lane(item: pytest.Item) -> str | None:
    for lane in LANES:
        if item.get_closest_marker(lane):
            return lane
    return LANE_OF_FOLDER.get(item.path.parent.name)
