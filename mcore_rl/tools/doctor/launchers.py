"""How the doctor gets to nodes: this one, or all of a SLURM allocation.

For Ray it is controller/each_node.py.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Protocol

from mcore_rl.config.errors import ConfigError
from mcore_rl.parallel.network import find_address
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.tools.doctor import node

_ASK_S = 20.0  # for an answer of SLURM's controller
_END_S = 10.0


class Launcher(Protocol):
    @property
    def nodes(self) -> Sequence[str]:
        """Their names, in the order of their numbers."""

    @property
    def address(self) -> str:
        """Of this machine, by which the nodes reach it."""

    def start(self, endpoint: RendezvousEndpoint) -> None:
        """Run `node.examine` on each of them."""

    def ended(self) -> bool:
        """Whether all have ended, so that nothing more will come."""

    def why(self, name: str) -> str:
        """What is known of a node that did not answer; empty for nothing."""

    def stop(self) -> None:
        """May be called at any time."""


class ThisNode:
    def __init__(self) -> None:
        self.nodes = [os.environ.get("SLURMD_NODENAME") or socket.gethostname()]
        self.address = "127.0.0.1"
        self._thread: threading.Thread | None = None

    def start(self, endpoint: RendezvousEndpoint) -> None:
        self._thread = threading.Thread(target=node.examine, args=(endpoint, 0), daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def why(self, name: str) -> str:
        return ""

    def stop(self) -> None:
        pass


class SlurmNodes:
    """All nodes of the allocation that this process is in, by one task of srun on each."""

    def __init__(self, interface: str) -> None:
        """Raises ConfigError outside of an allocation, or in a task of srun on several nodes."""
        listed = os.environ.get("SLURM_JOB_NODELIST")
        if not listed or shutil.which("srun") is None:
            raise ConfigError(
                "--on=slurm: SLURM_JOB_NODELIST is not set, or there is no srun; allowed: inside "
                "an allocation of sbatch or salloc"
            )
        if int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
            raise ConfigError(
                "this is a task of srun, and the doctor starts one on each node itself: run it "
                "once, without srun, or with --on=this"
            )
        self.nodes = _asked("scontrol", "show", "hostnames", listed).split()
        self.address = find_address(interface)
        self._srun: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)

    def start(self, endpoint: RendezvousEndpoint) -> None:
        count = str(len(self.nodes))
        command = [
            "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap",
            "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL", "--input=none",
            "--quit-on-interrupt",
        ]  # fmt: skip
        self._srun = subprocess.Popen(
            [*command, sys.executable, "-m", node.__name__],
            env=os.environ | endpoint.to_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
        )

    def ended(self) -> bool:
        return self._srun is not None and self._srun.poll() is not None

    def why(self, name: str) -> str:
        """The last line of srun that names the node, or else its last error."""
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if re.search("error|Error", line)] or lines
        named = [line for line in errors if re.search(rf"\b{re.escape(name)}\b", line)]
        return ((named or errors)[-1:] or [""])[0].strip()

    def stop(self) -> None:
        if self._srun is None:
            return
        self._srun.terminate()
        try:
            self._srun.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()


def _asked(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_ASK_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        raise ConfigError(f"{' '.join(command)}: {reason}") from error
