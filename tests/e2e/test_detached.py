"""Groups of ranks that outlive their driver, on a Ray cluster that does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.pending_call import WorkerError
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup, end_detached_group, list_detached_groups
from tests.e2e.processes import command_line, started_with, wait_until_gone

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


class Worker:
    @register()
    def say(self, word: str) -> str:
        return f"{word} {os.environ['RANK']}"


class Counter:
    """Declares what other drivers call of the class of DRIVER."""

    @register()
    def add(self, number: int) -> int: ...

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def hang(self) -> None: ...


DRIVER = """
import sys
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup

class Counter:
    def __init__(self, start):
        self.count = start

    @register()
    def add(self, number):
        self.count += number
        return self.count

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def hang(self):
        import time
        time.sleep(300)

with (
    ray_session(log_to_driver=False),
    ResourcePool(2, {"CPU": 0.1}, detached="judge") as pool,
    WorkerGroup(
        Counter, layout=Layout(dp=2), pool=pool, timeouts=TimeoutsConfig(), init_args=(10,),
        env={"MARK": "judge"},
    ) as group,
):
    print(group.call(Counter.add, 1), flush=True)
    input()
"""


def test_a_detached_group_outlives_its_driver_and_is_attached_by_name(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Its driver is killed; the next one lets it go; the last one finds it busy, and ends it.
    with pytest.raises(ConfigError, match=r"'judge' would end with this driver's private Ray; set"):
        ResourcePool(1, {"CPU": 0.1}, detached="judge")
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert driver.stdout.readline() == "[11, 11]\n"
    [reaper] = [p for p in psutil.Process(driver.pid).children() if "reaper.py" in command_line(p)]
    ranks = {process.pid for process in started_with("MARK", "judge")}
    driver.kill()
    driver.wait()
    reaper.wait(30)
    assert {process.pid for process in started_with("MARK", "judge")} == ranks
    assert list_detached_groups() == ["judge"]
    with pytest.raises(ConfigError, match="there is a detached pool 'judge' on this Ray cluster"):
        ResourcePool(1, {"CPU": 0.1}, detached="judge")

    with WorkerGroup.attach("judge", timeouts=TimeoutsConfig()) as group:
        assert group.call(Counter.add, 1) == [12, 12]
        assert {info.pid for info in group.worker_infos.values()} == ranks
        group.submit(Counter.hang)
    with pytest.raises(RuntimeError, match=r"judge\.add was called, but it has been let go"):
        group.call(Counter.add, 1)
    message = r"'judge' cannot be taken up: rank 0 has not answered in 1 s \(timeouts.start_s\)"
    with pytest.raises(WorkerError, match=message):
        WorkerGroup.attach("judge", timeouts=TimeoutsConfig(start_s=1))
    assert {process.pid for process in started_with("MARK", "judge")} == ranks
    end_detached_group("judge")
    wait_until_gone("MARK", "judge")
    with pytest.raises(
        ConfigError, match="no detached group 'judge' on this Ray cluster; found: no"
    ):
        WorkerGroup.attach("judge", timeouts=TimeoutsConfig())


def test_a_detached_group_that_fails_or_is_closed_is_gone_and_its_name_free(
    cluster: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    settings = {"layout": Layout(), "timeouts": TimeoutsConfig(), "env": {"MARK": "guide"}}
    with ResourcePool(1, {"CPU": 0.1}, detached="guide") as detached_pool:
        with pytest.raises(ConfigError, match="has one group of its own name, with a share of 1"):
            WorkerGroup(Worker, pool=detached_pool, share=0.5, **settings)
        WorkerGroup(Worker, pool=detached_pool, **settings).detach()
    with WorkerGroup.attach("guide", timeouts=TimeoutsConfig()) as group:
        assert group.call(Worker.say, "rank") == ["rank 0"]
        with pytest.raises(RuntimeError, match="a detached group keeps its name and layout"):
            group.rebuild("other", Layout())
        with pytest.raises(WorkerError, match=r"guide\.say: rank 0 raised TypeError"):
            group.call(Worker.say)
    wait_until_gone("MARK", "guide")
    with ResourcePool(1, {"CPU": 0.1}, detached="guide") as detached_pool:
        WorkerGroup(Worker, pool=detached_pool, **settings).close()
        wait_until_gone("MARK", "guide")
    with ResourcePool(1, {"CPU": 0.1}, detached="guide"):  # without a group it goes with its block
        assert list_detached_groups() == []
    with pytest.raises(ConfigError, match="no detached group 'guide'"):
        end_detached_group("guide")
