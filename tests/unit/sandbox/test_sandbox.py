"""Sandbox as its callers use it: results, files, several at once, cancelled calls, no tier."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox import sandbox, tiers
from mcore_rl.sandbox.sandbox import Sandbox, SandboxError
from mcore_rl.sandbox.tiers import Tier
from tests.notebook import run_in_cell
from tests.pages import FENCE, ROOT
from tests.unit.sandbox.places import CONTAINER, PLACES, require
from tests.unit.sandbox.test_containment import DAEMON, find_processes, marked

PAGE = (ROOT / "docs" / "sandbox.md").read_text()
needs_a_tier = pytest.mark.skipif(
    not isinstance(sandbox.probe_tiers("auto"), Tier),
    reason=f"no sandbox: {sandbox.probe_tiers('auto')}",
)


@needs_a_tier
@pytest.mark.parametrize(
    ("program", "status", "code", "stdout", "stderr"),
    [
        ("print('é', input())", "ok", 0, "é given\n", ""),
        ("import sys\nsys.exit(3)", "error", 3, "", ""),
        ("1 / 0", "error", 1, "", "ZeroDivisionError"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed", 139, "", ""),
        ("import os\nos.write(1, bytes([255, 10]))", "ok", 0, "�\n", ""),
        ("print('\ud800')", "error", 1, "", "SyntaxError"),
        ("import numpy\nprint(numpy.arange(3).sum())", "ok", 0, "3\n", ""),
        ("import helper\nprint(helper.N, open('data/a.txt').read())", "ok", 0, "7 text\n", ""),
        (["/bin/sh", "-c", "cat; exit 4"], "error", 4, "given", ""),
        (["no such program"], "error", 127, "", "no such program: No such file or directory"),
    ],
)
def test_results(program, status, code, stdout, stderr):
    if isinstance(program, list) and Sandbox().tier.name == "landlock":
        pytest.skip("a shell starts processes")
    files = {"helper.py": "N = 7", "data/a.txt": "text"}
    result = Sandbox().run(program, stdin="given", files=files)
    assert (result.status, result.exit_code, result.stdout) == (status, code, stdout)
    assert stderr in result.stderr and bool(stderr) == bool(result.stderr)
    assert 0 < result.cpu_s < 10 and 0 < result.wall_s < 20


@needs_a_tier
def test_a_large_input_that_nobody_reads():
    result = run_in_cell(lambda: Sandbox().run("print('done')", stdin="x" * (4 << 20)))
    assert result.stdout == "done\n"
    assert Sandbox().run("print(len(input()))", stdin="x" * (4 << 20)).stdout == f"{4 << 20}\n"


@needs_a_tier
def test_half_a_surrogate_pair_in_the_input_is_read_as_it_is():
    source = "import sys\nprint(sys.stdin.buffer.read())"
    assert Sandbox().run(source, stdin="\ud800").stdout == "b'\\xed\\xa0\\x80'\n"


@needs_a_tier
@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ".", "a/", "a/./b"])
def test_files_outside_of_the_scratch_folder_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(f"files[{name!r}]; allowed: a relative path")):
        Sandbox().run("", files={name: ""})


@needs_a_tier
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a\0b"], "without NUL characters"),
        (["\ud800"], "UTF-8"),
        (["ü" * 128], "256 in one name"),
        (["d/" * 3000 + "d"], "6001 bytes"),
        (["a", "a/b"], r"files\['a/b'\] is in files\['a'\]"),
    ],
    ids=["NUL", "surrogate", "long name", "long path", "file and folder"],
)
def test_name_that_no_file_can_have_is_refused(names, message):
    with pytest.raises(ValueError, match=message):
        Sandbox().run("", files=dict.fromkeys(names, ""))


@needs_a_tier
def test_calls_at_once_are_limited_and_do_not_block_the_loop():
    sandbox = Sandbox(max_parallel=2)
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.time())
            await asyncio.sleep(0.02)

    async def calls() -> list[float]:
        ticking = asyncio.create_task(tick())
        source = "import time\nprint(time.time(), flush=True)\ntime.sleep(0.5)\nprint(time.time())"
        results = await asyncio.gather(*(sandbox.run_async(source) for _ in range(4)))
        ticking.cancel()
        return [tuple(map(float, result.stdout.split())) for result in results]

    spans = asyncio.run(calls())
    at_once = [sum(start <= item < end for start, end in spans) for item, _ in spans]
    assert max(at_once) == 2
    # A call that blocked the loop would leave no tick in its half second.
    assert all(sum(start < tick < end for tick in ticks) > 3 for start, end in spans)


@needs_a_tier
def test_nothing_is_left_of_a_call_that_is_cancelled():
    marker = marked()

    async def cancelled() -> None:
        sleep = f"import os\nos.execv('/bin/sleep', ['sleep', '{marker}'])"
        task = asyncio.create_task(Sandbox(SandboxSettings(wall_s=300)).run_async(sleep))
        deadline = time.monotonic() + 20
        while not find_processes(marker):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert find_processes(marker) == []

    asyncio.run(cancelled())


def test_the_unsafe_tier_cleans_up_too():
    sandbox, marker = Sandbox(SandboxSettings(tier="unsafe")), marked()
    result = sandbox.run(DAEMON.replace("MARKER", marker))
    assert result.status == "ok"
    assert find_processes(marker) == []
    assert not Path(result.stdout.strip()).exists()


def test_no_tier_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(tiers.shutil, "which", lambda name: "/missing/bwrap")
    monkeypatch.setattr(tiers, "_can_change_user", lambda: False)
    sandbox.probe_tiers.cache_clear()
    try:
        with pytest.raises(
            SandboxError, match=r"no sandbox works.*bwrap.*No such file.*tier=unsafe"
        ):
            Sandbox(SandboxSettings(tier="bwrap"))
    finally:
        sandbox.probe_tiers.cache_clear()


def test_in_a_container_landlock_works_and_bubblewrap_is_refused():
    place = require(next(place for place in PLACES if place.name == CONTAINER))
    assert place.ask({"auto": "auto"})["name"] == "landlock"
    [first, *_] = place.ask({"auto": "bwrap"})["reasons"]
    assert "namespace" in first or "No such file" in first


def test_the_probe_finds_a_tier_that_contains_nothing():
    result = sandbox.check_tier(Tier("unsafe"))
    expected = [
        "connect to a port",
        "read a file",
        "write a file",
        "the environment",
        "end another",
    ]
    assert all(escape in result for escape in expected), result


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tier": "docker"}, "tier='docker'; allowed: 'auto', 'bwrap', 'landlock', 'unsafe'"),
        ({"cpu_s": 0}, "cpu_s=0; allowed: above 0"),
        ({"wall_s": float("inf")}, "wall_s=inf; allowed: above 0, finite"),
        ({"memory_mb": 8}, "memory_mb=8; allowed: at least 64"),
        ({"processes": 0}, "processes=0; allowed: at least 1"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SandboxSettings(**settings)


@needs_a_tier
def test_the_page_has_the_settings_and_its_example_runs():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) ?", PAGE, re.MULTILINE))
    defaults = vars(SandboxSettings())
    assert {name: float(value) for name, value in rows.items()} == {
        name: float(value) for name, value in defaults.items() if name != "tier"
    }
    [example] = [text for language, text in FENCE.findall(PAGE) if language == "python"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", example], check=True, env=environment)
