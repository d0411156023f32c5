"""The lanes, and settings of every test run, made before torch, Ray or vLLM is imported.

A test's lane is its mark: `ranks`, `server` or `job`; without one it is a unit test. The folder
gives the mark where the file does not. xdist runs a lane in one worker, from end to end: what its
tests share is started once. Tests in `tests/unit` are shared out by file.

The short lane is all unit tests and the few others of `tests/smoke.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from mcore_rl.observability.process import skip_gc_at_exit
from tests.smoke import SMOKE

LANES = ("ranks", "job", "server")  # the longest first
JOBS_ON_NODES = {"test_slurm.py", "test_launch.py", "test_doctor.py", "test_server_nodes.py"}
JOBS_OF_TRAINERS = {
    "test_fully_async.py", "test_one_step_off.py", "test_placement.py", "test_quickstart.py",
    "test_resume.py", "test_server_deaths.py", "test_train_jobs.py",
}  # fmt: skip
LANE_OF_FOLDER = {"dist_cpu": "ranks", "e2e": "job"}
UNIT = "not (ranks or server or job or nightly)"  # as in pyproject.toml
SHORT = "not nightly and (smoke or not (ranks or server or job))"  # as in tests/run.sh
ROOT = Path(__file__).parents[1]

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

# Workers import the same files: while they do, compile them once, whatever the environment says.
writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False

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
    sys.dont_write_bytecode = writes_no_bytecode


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose tests where -m does not: unit tests; of a file all but `nightly`; any test by name."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if not named or config.option.markexpr != UNIT:
        return
    paths = [argument for argument in config.args if "::" not in argument]
    if not paths:
        config.option.markexpr = ""
    elif not all(is_unit_folder(Path(path).absolute()) for path in paths):
        config.option.markexpr = "not nightly"


def is_unit_folder(path: Path) -> bool:
    return path.is_dir() and ROOT / "tests" / "unit" in (path, *path.parents)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One per core; none for a single file, which would wait for them to start."""
    if len(config.args) == 1 and ".py" in config.args[0]:
        return 0
    return min(len(os.sched_getaffinity(0)), 8)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Unit tests and the short lane need not wait for the imports of the others."""
    expression = config.option.markexpr
    if collection_path.is_dir():
        is_lane = collection_path.name in LANE_OF_FOLDER
        return True if is_lane and expression == UNIT else None
    is_of_lane = collection_path.parent.name in LANE_OF_FOLDER
    is_ignored = is_of_lane and expression == SHORT and name_file(collection_path) not in SMOKE
    return True if is_ignored and collection_path.name.startswith("test_") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lanes, groups and order: the short lane first, then the longest of what remains."""
    places = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        lane = next((name for name in LANES if name in marks), None)
        lane = lane or LANE_OF_FOLDER.get(item.path.parent.name)
        if lane == "server" and item.path.parent.name != "e2e":  # whose conftest ends the servers
            raise pytest.UsageError(f"{item.nodeid}: tests with the mark server are in tests/e2e")
        is_smoke = "nightly" not in marks and is_listed(item)
        for name in filter(None, (lane, "smoke" if is_smoke else None)):
            item.add_marker(name)
        item.add_marker(pytest.mark.xdist_group(choose_group(item, lane, is_smoke)))
        places[item] = choose_place(item, lane, is_smoke)
    items.sort(key=places.__getitem__)


def is_listed(item: pytest.Item) -> bool:
    """Return whether `tests/smoke.py` lists a test, alone or with all its cases."""
    names = SMOKE.get(name_file(item.path), ())
    return item.name in names or getattr(item, "originalname", None) in names


def name_file(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def choose_group(item: pytest.Item, lane: str | None, is_smoke: bool) -> str:
    """Return the xdist group of a test, whose tests run in one worker. Jobs have three."""
    if item.path.parent.name not in LANE_OF_FOLDER:
        return "/".join((lane or "unit", *item.path.parts[-2:]))
    group = lane or ""
    if lane == "job" and item.path.name in JOBS_ON_NODES:
        group = "job on nodes"
    if lane == "job" and item.path.name in JOBS_OF_TRAINERS:
        group = "job of trainers"
    return f"{group} (smoke)" if is_smoke else group


def choose_place(item: pytest.Item, lane: str | None, is_smoke: bool) -> tuple[int, int]:
    """Return what orders tests: smoke, unit tests, whole lanes, single files of a lane."""
    if not lane:
        return 1, 0
    is_in_folder = item.path.parent.name in LANE_OF_FOLDER
    return 0 if is_smoke else 2 if is_in_folder else 3, LANES.index(lane)
