"""vLLM's own server, started by hand and not by our worker classes.

It is fed by our trainer, and is the judge of the reward `judge`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
sys.path.insert(0, str(Path(__file__).parent))

import shards
import tiny_families

from mcore_rl.config.allowed import TRANSPORTS
from mcore_rl.config.schema import RewardConfig
from mcore_rl.controller import reaper
from mcore_rl.data.sample import Sample
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.rewards.manager import RewardManager
from mcore_rl.weight_sync.spec import TransferSpec
from mcore_rl.weight_sync.transport import WeightUpdate, connect
from tests.e2e import served
from tests.e2e.processes import free_port
from tests.unit.rewards.judging import response

pytestmark = pytest.mark.server

WAIT_S = 300.0  # a busy machine takes 100 to import vLLM twice
OF_OUR_SERVERS = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[served.Model]:
    config, folder = tiny_families.served_config("qwen3_moe"), tmp_path_factory.mktemp("models")
    return [served.Model(folder / str(seed), config, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def ask(models: list[served.Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """ask(path, **fields) of vLLM's HTTP server with our backend, engine and server in one."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with serving(models[0].path, log, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) as ask_server:
        yield ask_server


@contextlib.contextmanager
def serving(path: str, log: Path, settings: dict[str, str], tp: int = 1) -> Iterator[Any]:
    """Serve; `settings` are environment of vLLM. Without any the engine is another process."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--tensor-parallel-size", str(tp),
        "--max-model-len", "256", "--kv-cache-memory-bytes", str(32 << 20), "--enforce-eager",
        "--weight-transfer-config", '{"backend": "mcore_rl"}',
        "--chat-template", "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ]  # fmt: skip
    inherited = {n: v for n, v in os.environ.items() if n not in OF_OUR_SERVERS}
    environ = inherited | {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each worker wants a NUMA node of its own
        **settings,
    }

    def ask_server(path: str, **fields: Any) -> dict[str, Any]:
        url, headers = f"http://127.0.0.1:{port}{path}", {"Content-Type": "application/json"}
        data = json.dumps(fields).encode() if path != "/weight_info" else None
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            body: dict[str, Any] = json.loads(answer.read() or b"{}")
            return body

    with (
        log.open("w") as file,
        subprocess.Popen(
            command, env=environ, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        try:
            _wait_until_it_serves(process, ask_server, log)
            ask_server.url = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
            yield ask_server
        finally:
            _kill(process.pid)  # its engine does not notice by itself


def _kill(leader: int) -> None:
    """Kill a process and what it started; their shared memory goes, too."""
    inodes = reaper.list_mapped_inodes(
        reaper.list_descendants({leader}, reaper.list_processes()) | {leader}
    )
    os.killpg(leader, signal.SIGKILL)
    for name, inode in reaper.list_shared_memory().items():
        if inode in inodes:
            Path("/dev/shm", name).unlink(missing_ok=True)


def _wait_until_it_serves(process: subprocess.Popen[bytes], ask: Any, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            ask("/weight_info")
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)


def test_it_takes_versions_through_our_engine_and_answers_with_them(ask, models):
    trainer = shards.Trainer([Path(model.path) for model in models])
    check_versions(ask, models, trainer, trainer.spec())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tp", "transports"), [(1, ("colocated", *TRANSPORTS)), (2, TRANSPORTS)], ids=["tp1", "tp2"]
)
def test_an_engine_in_a_process_of_its_own_takes_them_too(models, tmp_path, tp, transports):
    # As vLLM starts it by default. It joins again for each transport.
    trainer = shards.Trainer([Path(model.path) for model in models])
    with serving(models[0].path, tmp_path / "log", {}, tp) as ask:
        for number, name in enumerate(transports):
            how = {} if name == "colocated" else {"method": "disaggregated", "transport": name}
            spec = trainer.spec(tp=tp, timeout_s=60.0, **how)
            check_versions(ask, models, trainer, spec, first=5 + 3 * number)


def check_versions(
    ask: Any,
    models: list[served.Model],
    trainer: shards.Trainer,
    spec: TransferSpec,
    first: int = 5,
) -> None:
    """Three versions, from `first` on, of the two models in turn."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer.rendezvous = RendezvousServer("127.0.0.1")
    endpoint = trainer.rendezvous.endpoint
    info = {"endpoint": asdict(endpoint), "spec": spec.to_dict(), "first_rank": 0}
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(connect, spec, endpoint, trainer.config, 0, torch.device("cpu"))
        ask("/init_weight_transfer_engine", init_info=info)
        transport = joining.result(WAIT_S)
        for number, version in ((1, first), (0, first + 1), (1, first + 2)):
            ask("/pause?mode=wait")
            ask("/start_weight_update")
            sending = thread.submit(transport.send, trainer.weights[number], WeightUpdate(version))
            ask("/update_weights", update_info={"version": version})
            sending.result(WAIT_S)
            ask("/finish_weight_update", weight_version=str(version))
            ask("/resume")
            assert ask("/weight_info") == {"weight_version": str(version)}
            _check_answer(ask, models, number)
        transport.close()


def run_judge(ask: Any, **settings: Any) -> Sample:
    """Let the server judge a response; the reward is the number of a word."""

    async def run() -> Sample:
        given = {
            "url": f"{ask.url}/v1", "template": "w20 {prompt} {response}", "pattern": r"w(\d+)",
            "high": 1000.0, "max_tokens": 8, "timeout_s": WAIT_S, **settings,
        }  # fmt: skip
        judge = RewardManager(RewardConfig("judge", given, on_error="zero"))
        sample = response()
        sample.messages = [{"role": "user", "content": "w21 w22"}]
        try:
            await judge([sample], ["w23"], 16, "row 0")
        finally:
            await judge.close()
        return sample

    return asyncio.run(run())


def test_it_judges_responses(ask, models):
    # The verdict is what its other route makes of the same text.
    name = models[0].path
    text = {"prompt": "w20 w21 w22 w23", "max_tokens": 8, "temperature": 0.0}
    [choice] = ask("/v1/completions", model=name, **text)["choices"]
    expected = float(re.findall(r"w(\d+)", choice["text"])[-1])
    sample = run_judge(ask, model=name)
    assert sample.reward == pytest.approx(expected / 1000), sample.reward_error
    sample = run_judge(ask, model=name, votes=3, temperature=1.0)
    assert (sample.reward_error, sample.reward_parts) == ("", {"parsed": 1.0})
    error = run_judge(ask, model="another").reward_error
    assert "answered 404" in error and "another" in error


def _check_answer(ask: Any, models: list[served.Model], number: int) -> None:
    request = {"prompt": served.PROMPT, "max_tokens": 12, "logprobs": 1, "temperature": 0.0}
    answer = ask("/v1/completions", model=models[0].path, return_token_ids=True, **request)
    [choice] = answer["choices"]
    ids, token_log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    right, wrong = (models[n].log_probs(served.PROMPT, ids) for n in (number, 1 - number))
    assert token_log_probs == pytest.approx(right, abs=1e-4)
    assert token_log_probs != pytest.approx(wrong, abs=1e-2)
