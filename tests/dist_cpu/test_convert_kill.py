"""Conversions that are killed at any moment, and their memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import transformers
from rich.console import Console

from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert import to_hf, to_megatron
from mcore_rl.jobs.convert.plan import Resources
from mcore_rl.jobs.convert.run import run
from tests.nightly import all_but
from tests.waiting import wait_until

pytestmark = pytest.mark.job


class Conversions:
    """Conversions of a model of 110 MB, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = Path(__file__).with_name("convert_server.py")
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen([sys.executable, script], **streams)
        assert self._server.stdout.readline() == "ready\n"  # or waiting would count as converting

    def start(self, name: str, output: Path, workers: int) -> int:
        """Return its process id; what it prints goes to the file output.txt."""
        line = [str(self.folder / name), str(output), workers, f"{output}.txt"]
        print(json.dumps(line), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversions]:
    folder = tmp_path_factory.mktemp("larger")
    config = transformers.Qwen3Config(
        vocab_size=8192, hidden_size=512, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, intermediate_size=1536, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder / "hf")
    there = to_megatron.plan_conversion(folder / "hf", folder / "mcore", Layout(tp=2), None)
    run(there, Resources(workers=1), Console(quiet=True))
    back = to_hf.plan_conversion(
        folder / "mcore", folder / "again", None, None, 20_000_000, "merge"
    )
    run(back, Resources(workers=1), Console(quiet=True))
    (folder / "hf-to-mcore").write_bytes(pickle.dumps(there))
    (folder / "mcore-to-hf").write_bytes(pickle.dumps(back))
    started = Conversions(folder)
    yield started
    started.close()


OUTPUTS = {"hf-to-mcore": "mcore", "mcore-to-hf": "again"}


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("name", "workers", "times"),
    all_but(
        [("hf-to-mcore", 2, 2)],
        [
            ("hf-to-mcore", 2, 2), ("hf-to-mcore", 1, 7), ("hf-to-mcore", 2, 7),
            ("mcore-to-hf", 1, 7),
        ],
    ),
)  # fmt: skip
def test_killed_at_random_moments_it_comes_to_the_same_bytes(
    conversions, tmp_path, name, workers, times
):
    out, rng = tmp_path / "out", random.Random(workers)
    expected = contents(conversions.folder / OUTPUTS[name])

    def finish() -> float:
        started = time.monotonic()
        pid = conversions.start(name, out, workers)
        wait_until(lambda: not psutil.pid_exists(pid))
        assert contents(out) == expected
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.txt"]
        shutil.rmtree(out)
        return time.monotonic() - started

    whole_s, kills = finish(), 0
    while kills < times:
        pid = conversions.start(name, out, workers)
        time.sleep(rng.uniform(0, whole_s))
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.kill(pid, signal.SIGKILL)
            kills += 1
        wait_until(lambda pid=pid: not psutil.pid_exists(pid))
        if out.exists():
            assert contents(out) == expected
            if not (tmp_path / ".out.partial").exists():
                shutil.rmtree(out)
    finish()


@pytest.mark.parametrize(
    ("name", "workers"),
    all_but(
        [("hf-to-mcore", 2), ("mcore-to-hf", 1)],
        [(name, workers) for name in OUTPUTS for workers in (1, 2)],
    ),
)
def test_memory_stays_under_what_is_printed(conversions, tmp_path, name, workers):
    """Read the largest resident memory until the process has ended."""
    out, peak = tmp_path / "out", 0
    pid = conversions.start(name, out, workers)
    while psutil.pid_exists(pid):
        time.sleep(0.005)
        with contextlib.suppress(OSError):
            if match := re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()):
                peak = int(match[1]) * 1024
    bound = read_bound(Path(f"{out}.txt").read_text())
    assert peak <= bound * 1.005  # three digits are printed
    assert peak > bound * 0.6


def read_bound(printed: str) -> float:
    size, unit = re.search(r"at most ([\d.]+) (MB|GB) of memory", printed).groups()
    return float(size) * {"MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.nightly
def test_memory_of_the_command_stays_under_what_is_printed_to_its_end(conversions, tmp_path):
    checkpoint, out = conversions.folder / "mcore", tmp_path / "out"
    line = f"convert mcore-to-hf --checkpoint {checkpoint} --output {out} --workers 1"
    command = [sys.executable, "-m", "mcore_rl.cli.main", *line.split()]
    # A process counts the memory of the one that started it, which is not this test's.
    script = (
        "import os, sys; pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ);"
        "_, status, usage = os.wait4(pid, 0); print(status, usage.ru_maxrss)"
    )
    printed = subprocess.check_output([sys.executable, "-c", script, *command], text=True)
    status, peak = map(int, printed.split()[-2:])
    assert status == 0
    assert peak * 1024 <= read_bound(printed) * 1.005
