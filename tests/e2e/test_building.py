"""Workers of groups, built on a real Ray: beside each other, and in used processes."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.pending_call import gather_results
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup, wait_until_built
from mcore_rl.data.batch import Batch, Jagged

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

TIMEOUTS = TimeoutsConfig()


class Meeting:
    """Is built when another group is being built at the same time, and not otherwise."""

    def __init__(self, folder: Path, label: str, other: str, refuse: bool = False) -> None:
        (folder / label).touch()
        deadline = time.monotonic() + 60
        while not (folder / other).exists():
            assert time.monotonic() < deadline, f"{other} has not come"
            time.sleep(0.02)
        if refuse:
            raise ConfigError(f"{label} is not wanted")

    @register()
    def greeting(self) -> str:
        return "met"


class Lodger:
    """Leaves a word when another takes its place."""

    def __init__(self, folder: Path, label: str) -> None:
        print(f"{label} is here", flush=True)
        self.folder, self.label = folder, label

    def close(self) -> None:
        (self.folder / f"{self.label}-{os.environ['RANK']}").touch()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lodger(self) -> tuple[str, int, int]:
        return self.label, os.getpid(), int(os.environ["RENDEZVOUS_PORT"])

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def look_at(self, batch: Batch) -> Batch:
        self.num_rows = len(batch)
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rows(self) -> int:
        return self.num_rows


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(num_cpus=1, object_store_bytes=100 << 20, log_to_driver=False):
        yield


@pytest.mark.parametrize("refused", ["", "first", "second"])
def test_groups_are_built_beside_each_other(tmp_path: Path, refused: str):
    def group(label: str, other: str) -> WorkerGroup:
        meeting = (tmp_path, label, other, label == refused)
        settings = {"layout": Layout(), "pool": shared, "share": 0.5, "timeouts": TIMEOUTS}
        return WorkerGroup(Meeting, init_args=meeting, name=label, wait=False, **settings)

    with (
        ResourcePool(1, {"CPU": 0.1}) as shared,
        group("first", "second") as first,
        group("second", "first") as second,
    ):
        greetings = [first.submit(Meeting.greeting), second.submit(Meeting.greeting)]
        if refused:
            with pytest.raises(ConfigError, match=f"{refused}.__init__: rank 0: {refused} is"):
                wait_until_built([first, second])
            assert {g.name for g in (first, second) if g.end_reason} == {refused}
        else:
            wait_until_built([first, second])
            assert gather_results(greetings) == [["met"], ["met"]]
            assert first.worker_infos[0].pid != second.worker_infos[0].pid


def test_a_group_is_rebuilt_in_its_processes(tmp_path: Path):
    # With another name, layout and log; the workers from before are closed.
    logged = ResourcePool(2, {"CPU": 0.1}, log_dir=tmp_path)
    settings = {"pool": logged, "timeouts": TIMEOUTS, "layout": Layout(dp=2)}
    with logged, WorkerGroup(Lodger, init_args=(tmp_path, "one"), name="a", **settings) as group:
        before = group.call(Lodger.lodger)
        batch = Batch({"ids": Jagged.pack([[1], [2], [3], [4]], np.int64)})
        group.call(Lodger.look_at, batch)
        assert group.call(Lodger.rows) == [2, 2]
        with pytest.raises(ConfigError, match=r"b: the layout .* has 4 ranks; a has 2$"):
            group.rebuild("b", Layout(dp=4), tmp_path, "four")
        group.rebuild("b", Layout(tp=2), tmp_path, "two")
        wait_until_built([group])
        assert group.call(Lodger.lodger) == [("two", pid, port) for _, pid, port in before]
        group.call(Lodger.look_at, batch)
        assert group.call(Lodger.rows) == [4, 4]  # there is one data-parallel rank now
        assert {file.name for file in tmp_path.iterdir()} == {
            *("one-0", "one-1", "a-0.log", "a-1.log", "b-0.log", "b-1.log")
        }
        assert (tmp_path / "b-1.log").read_text() == "two is here\n"
        assert [Path(group.worker_infos[rank].stderr_file).name for rank in range(2)] == [
            *("b-0.log", "b-1.log")
        ]
