"""What is said of ranks that do not answer, from looks at their processes."""

from __future__ import annotations

from types import SimpleNamespace

from ray.exceptions import RayError

from mcore_rl.controller import silence
from mcore_rl.controller.rank_actor import WorkerInfo
from mcore_rl.controller.silence import Silent, find_stopped, report
from mcore_rl.observability.stacks import ProcessState

LIMIT = "9 s (timeouts.call_s)"
UP, GONE, BUSY = (letter * 56 for letter in "abc")  # ids of nodes


class Nodes:
    """Ray's tasks on nodes: one answers with its looks, one fails, one is never done."""

    def __init__(self, looks: dict[int, ProcessState]) -> None:
        self.looks, self.waited, self.cancelled = looks, [], []
        self.children: dict[int, list[ProcessState]] = {}

    def options(self, scheduling_strategy):
        node = scheduling_strategy.node_id
        return SimpleNamespace(remote=lambda pids: (node, tuple(pids)))

    def wait(self, tasks, num_returns, timeout):
        assert num_returns == len(tasks)
        self.waited.append(timeout)
        late = [task for task in tasks if task[0] == BUSY]
        return [task for task in tasks if task not in late], late

    def get(self, task):
        if task[0] == GONE:
            raise RayError("the node is gone")
        return [[self.looks[pid], *self.children.get(pid, [])] for pid in task[1]]

    def cancel(self, task, force):
        self.cancelled.append((task[0], force))


stopped: list[int] = []  # of the ranks that `told` was given last


def told(
    monkeypatch, states: dict[int, tuple[str, str]], child: tuple[int, str] | None = None
) -> tuple[list[str], Nodes]:
    """Paragraphs of the report on ranks, given (node, state) by rank; pids are 100 + rank.

    `child` is a rank that has started another process, and the state of that.
    """
    looks = {
        100 + rank: ProcessState(
            100 + rank, "ray::Rank", state, f'Thread 1 "MainThread"\n    f{rank} (a)'
        )
        for rank, (_, state) in states.items()
    }
    nodes = Nodes(looks)
    if child is not None:
        nodes.children[100 + child[0]] = [ProcessState(200, "engine", child[1], "")]
    monkeypatch.setattr(silence, "ray", nodes)
    monkeypatch.setattr(silence, "_look_at_all", nodes)
    silent = [
        Silent("actor.update", rank, WorkerInfo("h", node, 100 + rank, "") if node else None)
        for rank, (node, _) in states.items()
    ]
    stopped[:] = [rank.rank for rank in find_stopped(silent)]
    nodes.waited.clear(), nodes.cancelled.clear()
    return report(silent, LIMIT).split("\n\n"), nodes


def test_the_rank_that_holds_up_the_others_is_told_first_and_no_rank_is_left_out(monkeypatch):
    states = dict.fromkeys(range(6), (UP, "waiting")) | {4: (UP, "stopped by a signal")}
    (line, *stacks), _ = told(monkeypatch, states)
    assert stopped == [4]
    first, *others = line.split(". Nor has ")[0], *line.split("or has ")[1:]
    who = "rank 4 (host h, pid 104)"
    assert (
        first == f"actor.update: {who} has not answered in {LIMIT}: stopped by a signal, in f4 (a)"
    )
    assert others == [
        "rank 0 (host h, pid 100): waiting, in f0 (a); n",
        "rank 1 (host h, pid 101): waiting, in f1 (a); n",
        "rank 2 (host h, pid 102): waiting, in f2 (a); n",
        "ranks 3, 5",
    ]
    assert [stack.split("\n")[0] for stack in stacks] == [
        f"actor.update, rank {rank} (host h, pid {100 + rank}):" for rank in (4, 0, 1, 2, 3, 5)
    ]


def test_a_rank_whose_child_is_gone_is_told_before_those_that_wait_and_run(monkeypatch):
    states = {0: (UP, "running"), 1: (UP, "waiting"), 2: (UP, "waiting")}
    (line, *_), _ = told(monkeypatch, states, child=(2, "gone"))
    assert line.startswith("actor.update: rank 2 (host h, pid 102) has not answered in ")
    assert "its process 200 (engine) is gone" in line


def test_a_node_that_does_not_answer_does_not_hold_up_the_report(monkeypatch):
    states = {0: (UP, "running"), 1: (GONE, "running"), 2: (BUSY, "running"), 3: ("", "")}
    (line, *stacks), nodes = told(monkeypatch, states)
    assert line.count("no look at it in 60 s") == 2
    assert "rank 3: its process has not come up" in line
    assert "rank 0 (host h, pid 100): running, in f0 (a)" in line
    assert len(stacks) == 1
    assert nodes.waited == [60.0]
    assert nodes.cancelled == [(BUSY, True)]
    assert stopped == []  # of ranks that nobody sees, nothing is known


def test_a_process_that_is_gone_or_stopped_holds_up_the_others(monkeypatch):
    states = ("gone", "stopped by a signal", "stopped by a debugger", "running", "waiting")
    told(monkeypatch, {rank: (UP, state) for rank, state in enumerate(states)})
    assert stopped == [0, 1]
