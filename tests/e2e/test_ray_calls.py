"""Calls of Ray that never return, as a process of Ray's is stopped: they end the driver."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.controller.reaper import list_processes, read_command_line
from tests.nightly import all_but

pytestmark = pytest.mark.job

DRIVER = """
import json, sys, threading, time
from pathlib import Path
import numpy as np
import ray
from mcore_rl.config.schema import Layout, TimeoutsConfig
from mcore_rl.controller import ray_calls, ray_session
from mcore_rl.controller.dispatch import register
from mcore_rl.controller.process_cleanup import clean_up_on_exit, _ray_pids
from mcore_rl.controller.resource_pool import ResourcePool
from mcore_rl.controller.worker_group import WorkerGroup

class Worker:
    @register()
    def take(self, array):
        return len(array)

ray_calls._MARGIN_S, ray_session._END_S = 0.5, 2.0
sys.argv[1:] = ["rl", *sys.argv[1:]]
logs, call = Path(sys.argv[2]), sys.argv[3]
timeouts = TimeoutsConfig(call_s=15.0 if call == "spill" else 2.0)

def spill():
    kept = []
    while True:
        kept.append(ray.put(np.zeros(16 << 20, np.int8)))

if __name__ == "__main__":
    with (
        clean_up_on_exit(logs=logs / "ray", trace_file=logs / "error.txt") as folder,
        ray_session.ray_session(
            temp_dir=folder, timeouts=timeouts, log_to_driver=False, object_store_bytes=100 << 20
        ),
    ):
        print(json.dumps(dict(_ray_pids)), flush=True)
        with ResourcePool(1, {"CPU": 0.5}) as pool:
            if call == "group":
                group = WorkerGroup(Worker, layout=Layout(), pool=pool, timeouts=TimeoutsConfig())
            array = np.zeros(1 << 20)
            print("ready", flush=True)
            sys.stdin.readline()
            if call in ("put", "nodes"):
                ray.put(array) if call == "put" else ray.nodes()
            if call == "thread":
                thread = threading.Thread(target=ResourcePool.close, args=[pool])
                thread.start()
                thread.join()
            if call == "group":
                group.call(Worker.take, array)
            if call == "spill":
                spill()
    print("returned", flush=True)
"""
CASES = {
    "put": ("raylet", "<module> (driver.py): put_object"),
    "group": ("raylet", "send_parts (worker_group.py): _actor_method_call"),
    "end": ("raylet", "_start_private_ray (ray_session.py): shutdown"),
    "nodes": ("GCS", "<module> (driver.py): node_table"),
    "thread": (
        "GCS",
        "ResourcePool.close (resource_pool.py): remove_placement_group",
    ),
}


@pytest.mark.parametrize("call", all_but(["put"], CASES))
def test_a_call_that_never_returns_ends_the_driver_with_a_report(tmp_path: Path, call: str):
    name, where = CASES[call]
    place, function = where.split(": ")
    driver, pids = start(tmp_path, call)
    os.kill(pids[name], signal.SIGSTOP)
    began = time.monotonic()
    line = end(driver)
    assert time.monotonic() - began < 25  # less than the limit for a process that is stopped
    assert line.startswith(f"mcore-rl rl: {place} has waited for Ray ({function}) for "), line
    assert f"process {pids[name]} (" in line and "is stopped by a signal" in line
    text = (tmp_path / "error.txt").read_text()
    assert "MainThread:\n" in text and "driver.py" in text
    assert not {*pids.values()} & list_processes().keys()


@pytest.mark.nightly
def test_a_spiller_of_objects_that_is_stopped_ends_the_driver_with_a_report(tmp_path: Path):
    driver, pids = start(tmp_path, "spill")
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()
    deadline = time.monotonic() + 60
    while not (spillers := find_spillers(pids["raylet"])):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for spiller in spillers:
        os.kill(spiller, signal.SIGSTOP)
    line = end(driver)
    assert "spill (driver.py) has waited for Ray (put_object) for " in line
    assert any(f"process {spiller} (ray::" in line for spiller in spillers)


def find_spillers(raylet: int) -> list[int]:
    children = [pid for pid, (parent, _) in list_processes().items() if parent == raylet]
    return [pid for pid in children if b"Spill" in read_command_line(pid)]


def start(folder: Path, call: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    script = folder / "driver.py"
    script.write_text(DRIVER)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(folder), call]
    driver = subprocess.Popen(command, text=True, env=environment, **pipes)
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    assert driver.stdout.readline() == "ready\n"
    return driver, pids


def end(driver: subprocess.Popen[str]) -> str:
    """Wait for the end with status 1; return the last line of stderr."""
    try:
        out, err = driver.communicate("\n", timeout=120)
    finally:
        driver.kill()
    assert (driver.returncode, out) == (1, ""), err
    return err.splitlines()[-1]
