"""Calls of Ray that count as hanging; tests/e2e/test_ray_calls.py has a real Ray."""

import threading
import time
from collections.abc import Iterator

import pytest

from mcore_rl.controller import ray_calls
from mcore_rl.controller.pending_call import Timeout
from mcore_rl.controller.ray_calls import limit_ray_calls

# Code that stands in for Ray's, by the name of its file, and for this project's.
SOURCE = """
import time
def wait(seconds, reports=()):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not reports:
        time.sleep(0.01)
"""
CALLER = "def call(function, *args): function(*args)"


def load(source: str, folder: str, name: str):
    variables: dict = {}
    exec(compile(source, f"{folder}fake.py", "exec"), variables)
    return variables[name]


wait = load(SOURCE, ray_calls._RAY, "wait")
call = load(CALLER, ray_calls._PROJECT, "call")


@pytest.fixture
def reports(monkeypatch) -> Iterator[list[str]]:
    """Return the reports of hangs while calls have a limit of 0.3 s."""
    texts: list[str] = []
    monkeypatch.setattr(ray_calls, "end_hanging_process", texts.append)
    monkeypatch.setattr(ray_calls, "_POLL_S", 0.02)
    monkeypatch.setattr(ray_calls, "_MARGIN_S", 0.1)
    with limit_ray_calls(Timeout(0.2, "timeouts.call_s")):
        yield texts


def test_a_long_call_is_reported_with_its_caller_and_all_stacks(reports):
    call(wait, 10, reports)
    [report] = reports
    line, _, *stacks = report.split("\n")
    assert line.startswith(
        "call (fake.py) has waited for Ray (wait) for 0 s (timeouts.call_s=0.2): "
    )
    assert line.endswith("no process of the run is stopped")
    assert any("test_a_long_call_is_reported" in stack for stack in stacks)


def test_many_short_calls_from_one_line_are_not(reports):
    end = time.monotonic() + 1
    while time.monotonic() < end:
        wait(0.1)
    assert reports == []


class Reference:
    """Stands in for an ObjectRef: records which thread released it."""

    def __init__(self, threads: list[str]) -> None:
        self.threads = threads

    def __del__(self) -> None:
        self.threads.append(threading.current_thread().name)


def test_what_a_call_held_is_released_by_its_own_thread_at_once(reports):
    threads: list[str] = []

    def hold(reference: Reference) -> None:
        call(wait, 0.1)

    for number in range(5):
        hold(Reference(threads))
        assert threads == [threading.current_thread().name] * (number + 1)


def test_a_wait_of_this_project_is_no_call_of_ray(reports):
    call(time.sleep, 0.6)
    assert reports == []


@pytest.mark.parametrize(("function", "count"), [(call, 1), (wait, 0)], ids=["ours", "Ray's own"])
def test_calls_of_threads_count_unless_the_thread_is_rays_own(reports, function, count):
    args = (wait, 10, reports) if function is call else (0.6,)
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()
    assert len(reports) == count


def test_a_new_limit_holds_for_calls_that_have_begun(monkeypatch, reports):
    monkeypatch.setattr(ray_calls, "_MARGIN_S", 0.0)
    with limit_ray_calls(Timeout(60.0, "timeouts.start_s")) as limit:
        thread = threading.Thread(target=call, args=(wait, 10, reports))
        thread.start()
        time.sleep(0.05)
        limit.set_timeout(Timeout(0.05, "the end of a session"))
        thread.join()
    assert any("(the end of a session=0.05)" in report for report in reports)
