"""Two ranks that torchrun has started: where they meet, and what is told of one that is stuck."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from mcore_rl.config.schema import Layout
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.torchrun import TorchrunRanks, get_rank
from mcore_rl.parallel.store import RendezvousStore


def file_of(rank):
    return Path(f"{__file__}.{rank}")


def loops_for_ever():
    while Path("/proc", file_of(0).read_text()).exists():
        time.sleep(0.1)
    os._exit(1)  # torchrun would wait 30 s for a rank that takes no signal


class Worker:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def store(self) -> str:
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return f"{type(store).__name__} {os.environ['GLOO_SOCKET_IFNAME']}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self) -> str:
        if get_rank() == 1:
            loops_for_ever()
        return ""


file_of(get_rank()).write_text(str(os.getpid()))
while not all(file_of(rank).exists() for rank in range(2)):
    time.sleep(0.05)  # for one that is still importing
limit_s = float(sys.argv[2])
ranks = TorchrunRanks("gloo", Layout(dp=2), limit_s, lambda name, number: Worker())
if get_rank():
    ranks.serve()
else:
    with ranks:
        worker = ranks.create_group("worker", 0)
        print(worker.call(Worker.store), flush=True)
        worker.call(getattr(Worker, sys.argv[1]))
"""


@pytest.fixture
def launched(tmp_path: Path):
    (tmp_path / "ranks.py").write_text(RANKS)

    def launch(method: str, limit_s: int) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).with_name("torchrun"))
        line = [program, "--standalone", "--nproc-per-node=2", str(tmp_path / "ranks.py")]
        line += [method, str(limit_s)]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)

    return launch


def test_ranks_of_one_machine_meet_behind_a_token_on_loopback(launched):
    done = launched("store", 600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['RendezvousStore lo', 'RendezvousStore lo']\n"


def test_a_rank_that_is_stuck_is_named_with_its_host_and_the_call_and_shows_its_stack(launched):
    done, host = launched("work", 8), socket.gethostname()
    assert done.returncode != 0
    message = f"RuntimeError: worker.work: rank 1 on {host} has not ended its part; the limit is "
    assert message in done.stderr, done.stderr
    title = f"rank 1 on {host}: worker.work takes longer than "
    stack = done.stderr.partition(title)[2]
    assert re.search(r'ranks\.py", line \d+ in loops_for_ever', stack), done.stderr
