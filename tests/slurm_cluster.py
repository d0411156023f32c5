"""A real SLURM of two nodes on this machine: munged, slurmctld and two slurmd of their own.

Debian's packages slurm-wlm and munge have the programs; nothing here installs them. Both nodes have
one kernel, so what tells them apart is SLURMD_NODENAME in the environment of their tasks.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import command_line, environ, lives

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2")
Run = subprocess.CompletedProcess[str]
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # Debian keeps daemons where users do not look
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_delay=1
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=6
KillWait=5
KillOnBadExit=1
WaitTime=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=100
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=100
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def list_missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class SlurmCluster:
    """`environment` is for what talks to it: sbatch, srun, squeue, scancel, scontrol."""

    def __init__(self, folder: Path) -> None:
        """`folder` needs a short path, since sockets are in it."""
        self.folder = folder
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.temp = folder / "t"  # of jobs
        self.environment["TMPDIR"] = str(self.temp)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("munge", "state", "log", "spool", "t"):
            (folder / name).mkdir(mode=0o755)
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        # A job's ports are those of its number and attempt: apart from tests/e2e/test_launch.py's.
        first = 88 * random.randrange(1, 600) + random.randrange(12)
        conf = _CONF.format(
            host=host,
            ports=_find_free_ports(3),
            folder=folder,
            user=getpass.getuser(),
            first_job=first,
        )
        (folder / "slurm.conf").write_text(conf)

    def start(self) -> None:
        munge = self.folder / "munge"
        files = {n: munge / n for n in ("socket", "log-file", "pid-file", "seed-file")}
        options = [f"--{name}={path}" for name, path in files.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={munge / 'key'}", *options)
        self.wait_until(files["socket"].exists, "munged listens")
        self._start("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_for_idle_nodes()

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def wait_for_idle_nodes(self) -> None:
        self.wait_until(
            lambda: self.run("sinfo", "-h", "-o", "%t %D").stdout.split() == ["idle", "2"],
            "both nodes are idle",
        )

    def cancel_jobs(self) -> None:
        self.run("scancel", "--full", "--user", getpass.getuser())

    def run(self, *command: str, timeout: float = 60, **variables: str) -> Run:
        """Run a command; return its output and exit status. `variables` are of its environment."""
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False,
            env=self.environment | variables,
        )  # fmt: skip

    def submit(self, *arguments: str, **variables: str) -> str:
        """sbatch with these arguments; the number of the job."""
        done = self.run("sbatch", "--parsable", *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what `scontrol show job` prints: JobState, ExitCode, Restarts, Reason, ..."""
        lines = self.run("scontrol", "show", "job", number).stdout.split()
        return dict(word.split("=", 1) for word in lines if "=" in word)

    def wait_for_state(self, number: str, *states: str, seconds: float = 60) -> dict[str, str]:
        self.wait_until(
            lambda: self.job(number).get("JobState") in states, f"job {number} is {states}", seconds
        )
        return self.job(number)

    def wait_until(self, happened: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise AssertionError(
                    "\n".join([f"waited {seconds:g} s until {what}", *self.logs()])
                )
            time.sleep(0.2)

    def logs(self) -> Iterator[str]:
        """The end of each daemon's log, and what SLURM says of nodes and jobs."""
        for command in (("sinfo", "-N", "-l"), ("squeue", "-l")):
            yield self.run(*command).stdout
        for file in sorted((self.folder / "log").iterdir()):
            yield f"{file.name}: " + "\n".join(file.read_text().splitlines()[-10:])

    def processes(self, node: str | None = None) -> set[psutil.Process]:
        """All that lives on a node, its daemon and slurmstepd too; without one, in the cluster."""
        conf = self.environment["SLURM_CONF"]
        processes = {p for p in psutil.process_iter() if environ(p).get("SLURM_CONF") == conf}
        if node:
            processes = {p for p in processes if environ(p).get("SLURMD_NODENAME") == node}
            if daemon := self._daemons.get(node):
                processes.add(psutil.Process(daemon.pid))
        # A slurmstepd, and an agent of Ray's, writes its title over its environment.
        stepds = {p for p in psutil.process_iter() if "slurmstepd" in command_line(p)}
        processes |= {p for p in stepds if _is_parent(p, processes)}
        for stepd in processes & stepds:
            with contextlib.suppress(psutil.Error):
                processes |= {*stepd.children(recursive=True)}
        return {process for process in processes if lives(process)}

    def kill_node(self, node: str) -> None:
        """Stop a node like a loss of power: all at once, so that none reports another's end."""
        stopped: set[psutil.Process] = set()
        while running := self.processes(node) - stopped:
            _signal(running, signal.SIGSTOP)
            stopped |= running
        _signal(stopped, signal.SIGKILL)
        self._daemons.pop(node).wait()

    def kill_ray(self, node: str) -> None:
        """A job's raylet there; the node stays."""
        raylets = {process for process in self.processes(node) if process.name() == "raylet"}
        assert raylets, node
        _signal(raylets, signal.SIGKILL)

    def stop(self) -> None:
        """Cancels all jobs, ends the daemons, and what is left by SIGKILL."""
        self.cancel_jobs()
        with contextlib.suppress(AssertionError):
            self.wait_until(lambda: not self.run("squeue", "-h").stdout, "jobs have ended", 20)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        _signal(self.processes(), signal.SIGKILL)
        for daemon in self._daemons.values():
            daemon.wait()

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        path = shutil.which(program, path=_PATH)
        assert path, program
        with (self.folder / "log" / (name or program)).open("ab") as log:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=_select_plain_environment(self.environment), start_new_session=True,
            )  # fmt: skip


def _is_parent(process: psutil.Process, processes: set[psutil.Process]) -> bool:
    with contextlib.suppress(psutil.Error):
        return not processes.isdisjoint(process.children())
    return False


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _select_plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of daemons, without those that a test has set for a job."""
    return {name: environment[name] for name in ("PATH", "SLURM_CONF")}


def _find_free_ports(count: int) -> list[int]:
    """Return free ports below those that launch scripts use."""
    ports: list[int] = []
    for port in random.sample(range(3000, 10000), 1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports between 3000 and 10000")


@contextlib.contextmanager
def start_slurm_cluster() -> Iterator[SlurmCluster]:
    """Start a cluster, and remove it at the end; skip the test on a machine without SLURM."""
    if missing := list_missing_programs():
        pytest.skip(f"no {', '.join(missing)}: Debian has them in slurm-wlm and munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    folder.chmod(0o755)
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)
