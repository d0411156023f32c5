"""Worker groups on a real Ray: fan-out, order, failures, and what a killed driver leaves behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.pending_call import Timeout, WorkerError, gather_results
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.reaper import list_processes
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Jagged
from tests.nightly import nightly

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

TIMEOUTS = TimeoutsConfig()


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


class Worker:
    """Keeps what it was given, and fails on demand."""

    def __init__(self, offset: int, refuse: bool = False) -> None:
        self.rank = int(os.environ["RANK"])
        self.offset = offset
        if refuse and self.rank == 1:
            raise ConfigError("model.path is '/nowhere'; it must be a folder")

    @register()
    def place(self) -> tuple[str, ...]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "FLAVOUR")
        return tuple(os.environ[name] for name in (*names, "RENDEZVOUS_HOST"))

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rendezvous(self) -> int:
        return int(os.environ["RENDEZVOUS_PORT"])

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def double(self, batch: Batch, factor: int = 2) -> Batch:
        self.seen = batch.jagged("response_ids").values.tolist()
        ids = batch.jagged("response_ids")
        return Batch({"doubled": ids.with_values(ids.values * factor + self.offset)})

    @register()
    def last_seen(self) -> list[int]:
        return self.seen

    @register()
    def wait(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register()
    def fail(self, kind: str) -> None:
        if self.rank != 1:
            time.sleep(60)  # hangs, as the peers of a failed rank do
        print("last words of rank 1", file=sys.stderr, flush=True)
        if kind == "config":
            raise ConfigError("data.train_file is 'x'; it must exist")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Unpicklable("the loss is not finite", "two")


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with (
        ray_session(num_cpus=1, object_store_bytes=100 << 20, log_to_driver=False),
        ResourcePool(4, {"CPU": 0.1}) as pool,
    ):
        yield pool


@pytest.fixture(scope="module")
def group(pool: ResourcePool) -> Iterator[WorkerGroup]:
    group = WorkerGroup(
        Worker,
        layout=Layout(tp=2, dp=2),
        pool=pool,
        timeouts=TIMEOUTS,
        init_kwargs={"offset": 1},
        env={"FLAVOUR": "plain"},
        name="policy",
        share=0.5,
    )
    with group:
        yield group


@pytest.fixture(scope="module")
def small_pool(pool: ResourcePool) -> Iterator[ResourcePool]:
    with ResourcePool(2, {"CPU": 0.1}) as small:
        yield small


def small_group(pool: ResourcePool, name: str, **settings) -> WorkerGroup:
    timeouts = settings.pop("timeouts", TIMEOUTS)
    arguments = {"offset": 0, **settings}
    layout = Layout(dp=pool.num_ranks)
    return WorkerGroup(
        Worker, layout=layout, pool=pool, timeouts=timeouts, init_kwargs=arguments, name=name
    )


def jagged_batch(lengths: list[int]) -> Batch:
    rows = [[row] * length for row, length in enumerate(lengths)]
    ids = Jagged.pack(rows, np.int64)
    return Batch({"prompt_ids": ids, "response_ids": ids})


def test_every_rank_finds_its_place_in_the_environment(group: WorkerGroup):
    address = ray.util.get_node_ip_address()
    assert group.call(Worker.place) == [(str(r), "4", "0", "1", "plain", address) for r in range(4)]
    assert 1024 < group.call(Worker.rendezvous) < 65536
    assert len({info.pid for info in group.worker_infos.values()}) == 4


def test_rows_come_back_in_order_for_uneven_sizes(group: WorkerGroup):
    lengths = [1, 40, 2, 7, 7, 0, 30]
    result = group.call(Worker.double, jagged_batch(lengths), factor=10)
    assert [row.tolist() for row in result.jagged("doubled")] == [
        [row * 10 + 1] * length for row, length in enumerate(lengths)
    ]
    (row,) = group.call(Worker.double, jagged_batch([3])).jagged("doubled")
    assert len(row) == 3


def test_ranks_of_a_dp_group_get_identical_parts(group: WorkerGroup):
    group.call(Worker.double, jagged_batch([5, 4, 3, 2, 1]))
    seen = group.call(Worker.last_seen)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == sorted(jagged_batch([5, 4, 3, 2, 1])["response_ids"].values)


def test_a_batch_is_stored_once_a_dp_rank(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch):
    stored, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    assert len(group.call(Worker.double, jagged_batch([3, 2, 1]))) == 3
    assert [len(batch) for batch in stored] == [1, 2]


def test_a_session_starts_no_process_that_serves_nobody(group: WorkerGroup):
    family = [*psutil.Process().children(recursive=True)]
    lines = [" ".join(process.cmdline()) for process in family]
    assert any("raylet" in line for line in lines)
    idle = ("monitor.py", "dashboard.py", "log_monitor")
    assert [line for line in lines if any(name in line for name in idle)] == []


def test_threads_of_a_rank_that_wait_do_not_spin(group: WorkerGroup):
    ranks = [psutil.Process(info.pid) for info in group.worker_infos.values()]
    assert {rank.environ()["OMP_WAIT_POLICY"] for rank in ranks} == {"PASSIVE"}


def test_ranks_and_tasks_run_at_the_niceness_of_the_driver(group: WorkerGroup):
    ranks = [psutil.Process(info.pid).nice() for info in group.worker_infos.values()]
    task = ray.remote(num_cpus=0)(lambda: os.nice(0))
    assert {*ranks, ray.get(task.remote())} == {os.nice(0)}


def test_a_call_can_be_left_pending(group: WorkerGroup):
    pending = group.submit(Worker.wait, 0.6)
    assert pending.result() == [0, 1, 2, 3]
    assert pending.result(Timeout(0, "the values are there")) == [0, 1, 2, 3]


def test_two_groups_share_a_pool_and_a_third_is_refused(pool: ResourcePool):
    settings = {"layout": Layout(), "init_args": (5,), "timeouts": TIMEOUTS}
    with (
        ResourcePool(1, {"CPU": 0.1}) as shared,
        WorkerGroup(Worker, pool=shared, share=0.5, name="actor", **settings) as actor,
        WorkerGroup(Worker, pool=shared, share=0.5, name="critic", **settings) as critic,
    ):
        assert actor.worker_infos[0].pid != critic.worker_infos[0].pid
        pending = actor.submit(Worker.wait, 0)
        assert pending.result() == critic.call(Worker.wait, 0) == [0]
        with pytest.raises(ConfigError, match=r"third asks for a share of 0\.5"):
            WorkerGroup(Worker, pool=shared, share=0.5, name="third", **settings)


class Trainer:
    @register()
    def train(self) -> None: ...


def test_unknown_methods_and_pools_that_are_too_small_are_refused(
    group: WorkerGroup, pool: ResourcePool
):
    with pytest.raises(TypeError, match=r"^Worker has no registered method 'train'$"):
        group.call(Trainer.train)
    for layout, num_bundles in ((Layout(dp=5), 1), (Layout(dp=2), 3)):
        with pytest.raises(ConfigError, match=r"needs [56] bundles; its pool has 4"):
            WorkerGroup(
                Worker,
                layout=layout,
                pool=pool,
                timeouts=TIMEOUTS,
                share=0.5,
                bundles_per_rank=num_bundles,
            )


def test_a_pool_that_does_not_fit_names_the_request_and_the_resources(pool: ResourcePool):
    with pytest.raises(ConfigError, match=r"CPU: asked 9, cluster has 1, free"):
        ResourcePool(3, {"CPU": 3})  # at once: it will never fit
    with pytest.raises(ConfigError, match=r"did not find room in 0.3 s \(CPU: asked 0.9, cluster"):
        ResourcePool(9, {"CPU": 0.1}, timeout_s=0.3)  # others have some of it


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("raise", WorkerError, "policy.fail: rank 1 raised Unpicklable: the loss is not finite"),
        nightly(  # the next test has such an error of one of two groups
            ("config", ConfigError, "policy.fail: rank 1: data.train_file is 'x'; it must exist")
        ),
        ("killed", WorkerError, f"policy.fail: rank 1 (host {socket.gethostname()}, pid"),
    ],
)
def test_a_failing_rank_ends_the_group_with_one_error(
    small_pool: ResourcePool, kind: str, error: type[Exception], words: str
):
    group = small_group(small_pool, "policy")
    pids = {info.pid for info in group.worker_infos.values()}
    start = time.monotonic()
    with pytest.raises(error) as raised:
        group.call(Worker.fail, kind)
    assert time.monotonic() - start < 50  # rank 0 would have slept for a minute
    assert words in str(raised.value)
    assert ("last words of rank 1" in str(raised.value)) == (error is WorkerError)
    with pytest.raises(RuntimeError, match=r"policy.place was called, but the group has ended"):
        group.call(Worker.place)
    wait_until(lambda: not pids & set(list_processes()), 30)


def test_the_first_group_that_fails_ends_the_wait_for_several(
    group: WorkerGroup, small_pool: ResourcePool
):
    with small_group(small_pool, "critic") as critic:
        calls = [group.submit(Worker.wait, 0.3), critic.submit(Worker.wait, 0)]
        assert gather_results(calls) == [[0, 1, 2, 3], [0, 1]]
        start = time.monotonic()
        with pytest.raises(ConfigError, match=r"critic\.fail: rank 1: data\.train_file"):
            gather_results([group.submit(Worker.wait, 30), critic.submit(Worker.fail, "config")])
        assert time.monotonic() - start < 25
        assert critic.end_reason
        assert not group.end_reason


def test_a_worker_that_cannot_be_built_names_its_rank(small_pool: ResourcePool):
    with pytest.raises(ConfigError, match=r"policy\.__init__: rank 1: model\.path is"):
        small_group(small_pool, "policy", refuse=True)


DRIVER = """
import subprocess, sys, time
from pathlib import Path
from multiprocessing import shared_memory
import ray
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller.dispatch import register
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.controller.ray_session import ray_session
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup

class Worker:
    def __init__(self):
        print("born", flush=True)
        self.memory = shared_memory.SharedMemory(create=True, size=1 << 16)
        self.child = subprocess.Popen(["sleep", "300"], start_new_session=True)

    @register()
    def memory_name(self):
        return self.memory.name

    @register()
    def hang(self):
        time.sleep(300)

if __name__ == "__main__":
    logs = Path(sys.argv[1])
    logs.mkdir()
    with (
        clean_up_on_exit(logs=logs / "ray") as scratch,
        ray_session(temp_dir=scratch, object_store_bytes=100 << 20, log_to_driver=False),
    ):
        folder = ray._private.worker._global_node.get_session_dir_path()
        print("session", flush=True)
        input()
        with ResourcePool(1, {"CPU": 0.5}, log_dir=logs) as pool:
            group = WorkerGroup(Worker, layout=Layout(), pool=pool, timeouts=TimeoutsConfig())
            print(folder, group.call(Worker.memory_name), flush=True)
            group.call(Worker.hang)
"""


def test_a_killed_driver_leaves_nothing_and_touches_no_other_session(tmp_path: Path):
    # The reaper of the killed one does not see a file that is made: who tracks it unlinks it.
    #
    # (test_reaper.py has the files that it sees.)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    drivers = {
        number: subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / number.name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in (signal.SIGKILL, signal.SIGTERM)
    }
    assert {driver.stdout.readline() for driver in drivers.values()} == {"session\n"}
    time.sleep(2)  # the reaper looks several times
    reaper = reaper_of(drivers[signal.SIGKILL].pid)
    os.kill(reaper, signal.SIGSTOP)
    for driver in drivers.values():
        driver.stdin.write("\n")
        driver.stdin.flush()
    lines = {number: driver.stdout.readline() for number, driver in drivers.items()}
    started = {n: descendants_with_start_times(driver.pid) for n, driver in drivers.items()}
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143)):
        folder, memory = lines[number].split(" ", 1)[0], lines[number].split("'")[1]
        living = start_times().items()
        assert len(started[number] & living) >= 8  # the other driver's end left them alone
        assert Path("/dev/shm", memory).exists()
        drivers[number].send_signal(number)
        assert drivers[number].wait(timeout=60) == code
        # Seconds, on a machine that has nothing else to do.
        wait_until(lambda m=memory: not Path("/dev/shm", m).exists(), 90)
        if number == signal.SIGKILL:
            os.kill(reaper, signal.SIGCONT)
        wait_until(lambda n=number: not started[n] & start_times().items(), 30)
        wait_until(lambda f=folder: not Path(f).parent.exists(), 30)
    for number in drivers:
        assert "born\n" in (tmp_path / number.name / "Worker-0.log").read_text()
        assert (tmp_path / number.name / "ray" / "raylet.out").stat().st_size > 0


@pytest.mark.nightly  # test_kill.py has a job that is told of it
def test_a_terminal_that_hangs_up_ends_the_driver_and_ray_with_the_logs_in_place(tmp_path: Path):
    # It tells all processes that run in it, Ray's too.
    script, logs = tmp_path / "driver.py", tmp_path / "logs"
    script.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(logs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # as without nohup
    )
    assert driver.stdin is not None and driver.stdout is not None
    assert driver.stdout.readline() == "session\n"
    driver.stdin.write("\n")
    driver.stdin.flush()
    memory = driver.stdout.readline().split("'")[1]
    assert "born\n" in (logs / "Worker-0.log").read_text()
    started = descendants_with_start_times(driver.pid)
    os.killpg(driver.pid, signal.SIGHUP)
    assert driver.wait(timeout=60) == 128 + signal.SIGHUP
    assert not started & start_times().items()
    assert (logs / "ray" / "raylet.out").stat().st_size > 0
    # Its tracker has heard it too, and the reaper may not have seen a file so new.
    Path("/dev/shm", memory).unlink(missing_ok=True)


def reaper_of(driver: int) -> int:
    children = (pid for pid, (parent, _) in list_processes().items() if parent == driver)
    [reaper] = [p for p in children if b"reaper.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return reaper


def start_times() -> dict[int, str]:
    return {pid: start for pid, (_, start) in list_processes().items()}


def descendants_with_start_times(pid: int) -> set[tuple[int, str]]:
    table, pids = list_processes(), {pid}
    while new := {p for p, (parent, _) in table.items() if parent in pids} - pids:
        pids |= new
    return {(p, table[p][1]) for p in pids - {pid}}


def wait_until(condition, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.02)
