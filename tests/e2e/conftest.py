"""A job as a user runs it, with everything that descends from it on record."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow.parquet as pq
import pytest
import ray

from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.controller.ray_session import NAMESPACE
from mcore_rl.data.prepared_task import PreparedTask
from mcore_rl.examples.tasks import last_digit
from tests.e2e.processes import environ, lives, shared_memory
from tests.slurm_cluster import SlurmCluster, start_slurm_cluster
from tests.small_disk import build_small_disk_command

if TYPE_CHECKING:
    from tests.e2e.served import Served

ROOT = Path(__file__).parents[2]
MARKER = "MCORE_RL_SESSION"  # in the environment of what a job starts
# Torch keeps what it compiles for the next run; jobs share the usual place for it.
COMPILED = str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))
LIMIT_S = 900.0  # of any wait for a job: one that hangs fails its test


class JobProcess(subprocess.Popen):
    """The driver of a job, for which no test waits without a limit."""

    def wait(self, timeout: float | None = LIMIT_S) -> int:
        return super().wait(timeout)


class Job:
    """`mcore-rl rl` in a session of its own; its outcome lies in `output`.

    Temporary files go to a folder of the job's own, so that what it leaves can be told from what
    others make at the same time. With `disk`, a size such as "24m", `output` is a file system of
    its own that only the job sees. `output` is elsewhere where several jobs are to have one.
    `command` is another one that takes settings, and `variables` are of its environment.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        recipe: str = "quickstart",
        disk: str = "",
        output: Path | None = None,
        command: Sequence[str | Path] = (),
        **variables: str,
    ) -> None:
        self.output = output or folder / "out"
        self.temp = Path(tempfile.mkdtemp(prefix="job", dir="/tmp"))  # sockets need short paths
        self._streams = {name: folder / name for name in ("stdout", "stderr")}
        job = [Path(sys.executable).with_name("mcore-rl"), "rl", f"recipe={recipe}"]
        command = [*(command or job), *settings, f"output_dir={self.output}"]
        environment = {"TMPDIR": str(self.temp), "TORCHINDUCTOR_CACHE_DIR": COMPILED}
        if disk:
            self.output.mkdir()
            command = build_small_disk_command(self.output, disk, command)
        with contextlib.ExitStack() as files:
            streams = {n: files.enter_context(f.open("wb")) for n, f in self._streams.items()}
            self.process = JobProcess(
                command,
                cwd=ROOT,
                env=os.environ | environment | variables,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
                **streams,
            )
        self.processes: set[psutil.Process] = set()
        self.shared_memory: set[Path] = set()
        self._markers: set[str] = set()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def stdout(self) -> str:
        return self._streams["stdout"].read_text()

    @property
    def stderr(self) -> str:
        return self._streams["stderr"].read_text()

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait; raise AssertionError with the job's output when it ends or hangs before that."""
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert self.process.poll() is None, f"ended before {what}:\n{self.stdout}{self.stderr}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.stdout}{self.stderr}"
            time.sleep(0.1)

    def left(self) -> list[str]:
        """Return what the job has left: processes, shared memory, unfinished or temporary files."""
        with_marker = {p for p in psutil.process_iter() if _read_marker(p) in self._markers - {""}}
        leftovers = [f"process {p}" for p in set(self.processes) | with_marker if lives(p)]
        leftovers += [str(file) for file in set(self.shared_memory) if file.exists()]
        leftovers += [str(file) for file in self.temp.iterdir()]
        for folder, folders, files in os.walk(self.output.parent):  # a folder may go meanwhile
            for name in folders + files:
                if re.match(r"\..*(partial|unfinished)", name):
                    leftovers.append(os.path.join(folder, name))
        return leftovers

    def rank(self, number: int) -> psutil.Process:
        """Return a living process of this rank."""
        return next(p for p in set(self.processes) if environ(p).get("RANK") == str(number))

    def close(self) -> None:
        self._done.set()
        self._watcher.join()
        self.process.kill()
        self.process.wait()
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.temp)

    def _watch(self) -> None:
        """Descendants by the tree of processes: an orphan leaves it, and stays on record."""
        looks: Counter[str] = Counter()  # at a file: it is mapped after it is made
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            while not self._done.wait(1):
                children = root.children(recursive=True)
                self.processes.update(children)
                self._markers.update(map(_read_marker, children))
                present = os.listdir("/dev/shm")
                if any(looks[name] < 3 for name in present):
                    self.shared_memory.update(*map(shared_memory, children))
                looks = Counter({name: looks[name] + 1 for name in present})


def _heed_interrupts() -> None:
    """Restore SIGINT, which children of a background shell or nohup ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _read_marker(process: psutil.Process) -> str:
    return environ(process).get(MARKER, "")


_SERVERS = contextlib.ExitStack()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Start one server for all tests that swap weights: starting one takes seconds."""
    from tests.e2e import served  # imports vLLM and transformers

    config = served.tiny_families.served_config("qwen3_moe")
    return _SERVERS.enter_context(served.serving(config, tmp_path_factory.mktemp("served")))


@pytest.fixture
def run(shared_server: Served) -> Any:
    return shared_server.run


@pytest.fixture
def moe(shared_server: Served) -> list[Any]:
    return shared_server.models


@pytest.fixture
def server(shared_server: Served) -> Any:
    """The shared server on the weights of moe[0], whatever the test before left."""
    shared_server.take(0)
    return shared_server.server


@pytest.fixture(autouse=True)
def restore_model_type() -> Iterator[None]:
    """Undo what vLLM does to transformers' class of DeepSeek-V3 when it serves a kimi_k2.

    It gives the class that name (vllm/transformers_utils/config.py, _register_config_class).
    """
    yield
    if module := sys.modules.get("transformers.models.deepseek_v3.configuration_deepseek_v3"):
        module.DeepseekV3Config.model_type = "deepseek_v3"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Close the server with its lane: it has changed the environment of this process."""
    if nextitem is None or not nextitem.get_closest_marker("server"):
        _SERVERS.close()
        if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
            distributed.destroy_process_group()  # of trainers in this process


@pytest.fixture(scope="session")
def user_task_settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Make the task of the recipe once; return settings as for a user's own model and data.

    Without most of its rows, which each job would read and check. No test may change the files.
    """
    task = last_digit.prepare(tmp_path_factory.mktemp("task") / "task", 0, worked_share=0.35)
    for file in (task.train_file, task.test_file, task.warm_start_file):
        rows = pq.read_table(file)
        pq.write_table(rows.slice(0, 1024), file)
    return list_task_settings(task)


def list_task_settings(task: PreparedTask) -> list[str]:
    """Return the settings of a job on a task that is made, as on a user's own model and data."""
    return [
        "task.name=''",
        f"model.path={task.model_dir}",
        f"data.train_file={task.train_file}",
        f"data.test_file={task.test_file}",
        f"warm_start.train_file={task.warm_start_file}",
    ]


@pytest.fixture(scope="module")
def start_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """start_job(*settings) runs a recipe, the quickstart's, with these overrides; see Job."""
    with contextlib.ExitStack() as jobs:

        def start(
            *settings: str,
            recipe: str = "quickstart",
            disk: str = "",
            output: Path | None = None,
        ) -> Job:
            folder = tmp_path_factory.mktemp("job")
            job = Job(folder, *settings, recipe=recipe, disk=disk, output=output)
            jobs.callback(job.close)
            return job

        yield start


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yield the address of a Ray that others can join, as `ray start` makes it."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with clean_up_on_exit() as scratch:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=1,
            object_store_memory=100 << 20,
            include_dashboard=False,
            logging_level="error",
            _temp_dir=str(scratch / "r"),
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(scope="module")
def shared_slurm() -> Iterator[SlurmCluster]:
    """Start a SLURM of two nodes."""
    with start_slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(shared_slurm: SlurmCluster) -> SlurmCluster:
    """Give a test two idle nodes: a job that an earlier test left may still be ending on one."""
    shared_slurm.cancel_jobs()
    shared_slurm.wait_for_idle_nodes()
    return shared_slurm
