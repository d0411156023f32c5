"""A vLLM server with expert-parallel workers: what it gives, and that nothing outlives it.

Latent attention, shared experts and a router with groups, bias and scale; in a process of its own,
which can be killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import tiny_families
import tiny_models

from mcore_rl.inference.protocol import Completion, TokenScores
from tests.e2e import parallel_server, reference
from tests.e2e.processes import command_line, listeners, session, shared_memory
from tests.nightly import nightly

pytestmark = pytest.mark.server

_TOKENS = parallel_server.TOKENS


@pytest.fixture(scope="module")
def models() -> list[Any]:
    config = tiny_families.served_config("deepseek_v3")
    return [tiny_models.build_from(config, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def paths(models, tmp_path_factory) -> list[Path]:
    return [tiny_families.save_served(m, tmp_path_factory.mktemp("model")) for m in models]


@contextlib.contextmanager
def _started(
    paths: list[Path], folder: Path, method: str, dp: int = 1, tp: int = 2
) -> Iterator[subprocess.Popen[str]]:
    """The program as the leader of a session of its own; killed at the end."""
    arguments = map(str, (dp, tp, method, *paths, folder))
    command = [sys.executable, parallel_server.__file__, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def _num_workers(family: list[psutil.Process], method: str) -> int:
    """Children of the engine process; one that is spawned looks like it until it runs."""
    engines = {process.pid for process in family if "EngineCore" in command_line(process)}
    num_workers = 0
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            is_spawned = "spawn_main" in command_line(process)
            is_tracker = "resource_tracker" in command_line(process)
            is_worker = is_spawned if method == "spawn" else not (is_spawned or is_tracker)
            num_workers += is_worker and process.ppid() in engines
    return num_workers


def _check_session_gone(leader: int, files: set[Path], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        left = [*session(leader), *(f for f in files if f.exists())]
        if not left:
            return
        time.sleep(0.2)
    pytest.fail(f"still there after {within_s:g} s: {left}")


@pytest.mark.parametrize(
    ("method", "dp", "tp"),
    [
        nightly(("fork", 1, 2)),
        nightly(("nodes", 1, 2)),
        ("fork", 2, 1),
        nightly(("fork", 2, 2)),
        nightly(("nodes", 2, 1)),
    ],
)
def test_its_answers_are_right_before_and_after_updates_and_killed_it_leaves_nothing(
    paths, models, tmp_path, method, dp, tp
):
    with _started(paths, tmp_path, method, dp, tp) as process:
        reports = (json.loads(line) for line in process.stdout if line.startswith("{"))
        scores, loaded, *sharded = (next(reports) for _ in range(4))
        family = session(process.pid)
        memory = set().union(*map(shared_memory, family))
        ports = listeners(family)
        for tracker in family:  # a joined Ray kills an actor's children: who tidies up, too
            if "resource_tracker" in command_line(tracker):
                with contextlib.suppress(psutil.NoSuchProcess):
                    tracker.kill()
    _check_scores(scores, models[0], tmp_path / "trace.safetensors")
    assert (tmp_path / "trace.safetensors").exists() == (dp == 1)
    _check_completions([report["completion"] for report in (loaded, *sharded)], models[1])
    _check_across(loaded["across"], models, 0)
    for report, version in zip(sharded, (1, 3), strict=True):
        _check_across(report["across"][:4], [models[1]] * 2, version)
        _check_across(report["across"][4:], [models[1]] * 2, version + 1)
    for awake, asleep, again in (report["memory"] for report in sharded):
        assert asleep == {"weights_bytes": 0, "kv_cache_bytes": 0}
        assert again == awake
        assert awake["kv_cache_bytes"] > 0.9 * dp * tp * parallel_server.KV_CACHE_BYTES
        assert awake["weights_bytes"] > 0
    assert len(family) >= 4
    # gloo's of both workers, one for all groups among themselves and one with trainers.
    assert len(ports) >= 4
    assert {address for address, _ in ports} == {"127.0.0.1"}
    kinds = ["psm_"] * (tp > 1)  # semaphores of forked processes have no name
    # vLLM's all-reduce in shared memory is made of it, and is for the workers of one node.
    if torch.cpu._is_avx512_supported() and method != "nodes" and tp > 1:
        kinds.append(f"mcore_rl_{process.pid}-")
    assert all(any(f.name.startswith(kind) for f in memory) for kind in kinds)
    _check_session_gone(process.pid, memory)


def _check_scores(report: dict[str, Any], model: Any, trace: Path) -> None:
    prefilled = TokenScores(**report["scored"])
    assert prefilled.token_ids == _TOKENS[1:]
    reference.check(prefilled, model, _TOKENS[:1])
    decoded = [TokenScores(**scores) for scores in report["decoded"]]
    for scores in decoded:
        assert len(scores.token_ids) == parallel_server.NUM_DECODED
        reference.check(scores, model, _TOKENS)
    assert decoded[2].token_ids == decoded[0].token_ids != decoded[1].token_ids
    if trace.exists():
        reference.check_trace(load_file(trace), model, _TOKENS[: parallel_server.NUM_TRACED])


def _check_completions(rows: list[dict[str, Any]], model: Any) -> None:
    """After a folder, and after shards by each transport."""
    loaded, *sharded = (Completion(**row) for row in rows)
    log_probs, _ = reference.expected(model, _TOKENS + loaded.token_ids)
    assert loaded.log_probs == pytest.approx(log_probs[len(_TOKENS) - 1 :].tolist(), abs=1e-4)
    assert set(loaded.weight_versions) == {1}
    for other, last in zip(sharded, (3, 5), strict=True):
        assert set(other.weight_versions) == {last}
        assert other.token_ids == loaded.token_ids
        # On equal weights vLLM's latent attention gives two last bits.
        assert other.log_probs == pytest.approx(loaded.log_probs, abs=2e-6)


def _check_across(rows: list[dict[str, Any]], models: list[Any], version: int) -> None:
    """Each token is of the model of its version, which is this one or the next."""
    num_both = 0
    for fields in rows:
        completion = Completion(**fields)
        by_model = [reference.expected(m, _TOKENS + completion.token_ids)[0] for m in models]
        first = len(_TOKENS) - 1
        for number, version_of_token in enumerate(completion.weight_versions):
            expected = by_model[version_of_token - version][first + number].item()
            assert completion.log_probs[number] == pytest.approx(expected, abs=1e-4)
        num_both += set(completion.weight_versions) == {version, version + 1}
    assert num_both


@pytest.mark.nightly  # the test above kills it when it has answered
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_while_it_starts_it_takes_its_processes_along(paths, tmp_path, method):
    with _started(paths, tmp_path, method) as process:
        workers = 0
        while workers < 2 and process.poll() is None:
            time.sleep(0.01)
            workers = _num_workers(session(process.pid), method)
        process.send_signal(signal.SIGKILL)
    # Spawned, they import vLLM now, for longer than this, and know of no server before they have.
    assert workers >= 2
    _check_session_gone(process.pid, set(), within_s=8 if method == "spawn" else 60)
