"""Processes of a job: results and failures come back, and none outlives the one that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs import ranks
from mcore_rl.jobs.ranks import ProcessFailed, run_in_process, run_on_ranks
from mcore_rl.observability.stacks import ProcessState

LIMIT_S = 300.0

# A module that processes can import by name; with importlib mode this file is none.
JOBS = """
import os, sys, time
import psutil
from mcore_rl.config.errors import ConfigError

def whoami():
    import torch
    import torch.distributed as dist
    from mcore_rl.parallel.store import join_world
    print("chatter")
    join_world("gloo", timeout_s=60.0)
    total = torch.tensor(int(os.environ["RANK"]) + 1)
    dist.all_reduce(total)
    ports = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    listens_on = sorted({c.laddr.ip for c in ports})
    rank = int(os.environ["RANK"])
    return {"rank": rank, "sum": total, "names": ["a"], "listens_on": listens_on}

def stumble(how):
    if os.environ.get("RANK", "0") == "0":
        time.sleep(600)
    print("last words")
    if how == "exit":
        os._exit(3)
    if how == "bad input":
        raise ConfigError("the checkpoint is of another model")
    if how == "child":
        print("ERROR ValueError: head_dim=24 is not supported", file=sys.stderr, flush=True)
        raise RuntimeError("it failed. See root cause above.")
    raise ValueError("no such weight\\nsecond line")

def hang():
    looping = os.environ["RANK"] == "1"
    while looping:
        pass
    time.sleep(600)

def linger(file):
    with open(file, "a") as log:
        log.write(f"{os.getpid()} ")
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "rank_jobs.py").write_text(JOBS)
    sys.path.insert(0, str(folder))
    try:
        import rank_jobs

        yield rank_jobs
    finally:
        sys.path.remove(str(folder))


@pytest.mark.job
def test_ranks_meet_and_answer_in_order(jobs, tmp_path, capfd):
    result = run_on_ranks(jobs.whoami, 2, tmp_path, LIMIT_S)
    assert [rank["rank"] for rank in result] == [0, 1]
    assert [int(rank["sum"]) for rank in result] == [3, 3]
    assert result[0]["names"] == ["a"]
    assert [rank["listens_on"] for rank in result] == [["127.0.0.1"]] * 2  # gloo's
    assert capfd.readouterr() == ("", "")
    assert "chatter" in (tmp_path / "rank_1.log").read_text()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", ProcessFailed, r"^rank 1: ValueError: no such weight\n(.|\n)*last words"),
        ("exit", ProcessFailed, r"^rank 1: it ended with exit status 3\n"),
        ("bad input", ConfigError, r"^the checkpoint is of another model$"),
        ("child", ProcessFailed, r"^rank 1: ValueError: head_dim=24 is not supported\n"),
    ],
)
def test_the_failure_of_one_rank_ends_the_others_and_is_the_error(
    jobs, tmp_path, how, error, message
):
    started, before = time.monotonic(), spawned()
    with pytest.raises(error, match=message):
        run_on_ranks(partial(jobs.stumble, how), 2, tmp_path, LIMIT_S)
    assert time.monotonic() - started < 60  # rank 0 would sleep for ten minutes
    assert not spawned() - before


@pytest.mark.job
def test_timeout_error_names_the_busy_rank_first(jobs, tmp_path):
    before = spawned()
    with pytest.raises(ProcessFailed) as raised:
        run_on_ranks(jobs.hang, 2, tmp_path, 12)
    line = str(raised.value).partition("\n")[0]
    assert line.startswith("rank 1 has not answered in 12 s (--timeout): running, in hang (")
    assert ". Nor has rank 0: waiting, in hang (rank_jobs.py:" in line
    assert str(raised.value).count("MainThread") == 2
    assert not spawned() - before


def test_the_limit_is_of_all_ranks_together_and_not_of_each_answer(monkeypatch):
    """Answer every 4 s by the clock of the test."""
    clock_s, pipes = [0.0], [Pipe(duplex=False) for _ in range(4)]

    def wait(waiting, seconds):
        rank = len(pipes) - len(waiting)
        if 4.0 * rank > clock_s[0] + seconds:
            clock_s[0] += seconds
            return []
        clock_s[0] = 4.0 * rank
        pipes[rank][1].send(("done", ranks._serialize(rank)))
        return [pipes[rank][0]]

    monkeypatch.setattr(ranks, "wait", wait)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    monkeypatch.setattr(
        ranks, "inspect_process", lambda pid: [ProcessState(pid, "", "waiting", "")]
    )
    processes = [SimpleNamespace(name=f"rank {rank}", pid=rank) for rank in range(4)]
    with pytest.raises(ProcessFailed, match=r"^rank 3 has not answered in 10 s \(--timeout\)"):
        ranks._gather(processes, [current for current, _ in pipes], [Path()] * 4, 10.0)
    assert clock_s == [10.0]


def spawned() -> set[psutil.Process]:
    """Children of this process that multiprocessing started, other tests' among them."""
    children = (p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE)
    return {p for p in children if "spawn_main" in " ".join(p.cmdline())}


def test_a_process_of_its_own_is_no_rank(jobs, tmp_path):
    with pytest.raises(ConfigError, match=r"^RANK, WORLD_SIZE not set in the environment"):
        run_in_process(jobs.whoami, "transformers", tmp_path, LIMIT_S)


def test_ranks_end_with_their_parent_even_when_it_is_killed(jobs, tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "import rank_jobs\n"
        "from mcore_rl.jobs.ranks import run_on_ranks\n"
        "if __name__ == '__main__':\n"
        "    run_on_ranks(partial(rank_jobs.linger, sys.argv[2]), 2, Path(sys.argv[3]), 600)\n"
    )
    folder = str(Path(jobs.__file__).parent)
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, script, folder, pids, tmp_path])
    try:
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert parent.poll() is None
            time.sleep(0.1)
        ranks = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        parent.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert not alive
    finally:
        parent.kill()
        parent.wait()
