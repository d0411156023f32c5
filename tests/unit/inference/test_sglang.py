"""The rollout backend `sglang` against a stand-in for its server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

import tiny_families
import tiny_models

from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import RLConfig, RolloutConfig, SGLangConfig
from mcore_rl.inference.protocol import SamplingParams, ServerSpec
from mcore_rl.inference.registry import check_server_settings
from mcore_rl.inference.sglang import server as sglang_module
from mcore_rl.inference.sglang.client import SGLangClient, SGLangError
from mcore_rl.inference.sglang.server import SGLangServer, parse_completion
from mcore_rl.jobs.preflight import check_servers
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.testing import check_server
from tests import sglang_server
from tests.e2e.served import tokenizer

FLAGS = ("--enable-deterministic-inference", "--enable-memory-saver")
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_families.served_config("qwen3")
    path = tmp_path_factory.mktemp("models") / "qwen3"
    tiny_families.save_served(tiny_models.build_from(config), path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def build_spec(model: Path, *, can_sleep: bool = False, **sglang: Any) -> ServerSpec:
    settings = RolloutConfig(backend="sglang", sglang=SGLangConfig(**sglang))
    settings.max_num_seqs, settings.kv_cache_bytes = 64, 64 << 20
    return ServerSpec(
        str(model), "float32", 256, settings, seed=3, timeout_s=60.0, can_sleep=can_sleep
    )


def run(call: Callable[[SGLangServer], Coroutine[Any, Any, Any]], spec: ServerSpec) -> Any:
    """Start a server, run a function of it, and close it."""

    async def work() -> Any:
        server = SGLangServer(spec)
        try:
            async with asyncio.timeout(60):
                await server.start()
                return await call(server)
        finally:
            await server.close()

    return asyncio.run(work())


@pytest.mark.job
def test_a_running_server_keeps_the_contract_to_1e5_nats(model, stack):
    def create(spec: ServerSpec) -> SGLangServer:
        url, _ = stack.enter_context(sglang_server.serve("--model-path", spec.model_path, *FLAGS))
        settings = replace(spec.settings, sglang=SGLangConfig(url=url))
        return SGLangServer(replace(spec, settings=settings))

    names = check_server(create, model, tolerance=1e-5)
    assert len(names) == 15


@pytest.mark.job
def test_a_server_as_a_child_keeps_the_contract_and_leaves_nothing(model, tmp_path):
    python = sglang_server.write_python(tmp_path / "python")
    settings = RolloutConfig(
        max_num_seqs=64, kv_cache_bytes=64 << 20, sglang=SGLangConfig(python=str(python))
    )
    names = ["responses", "start_without_weights", "sleep", "close"]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert check_server(SGLangServer, model, tolerance=1e-5, settings=settings, only=names) == names
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before


def get_command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended, and nobody has collected it yet
        return ""


@pytest.mark.job
def test_a_child_takes_only_calls_with_its_key_and_is_dead_when_it_ends(model, tmp_path):
    python = sglang_server.write_python(tmp_path / "python")

    async def use(server: SGLangServer) -> None:
        [child] = [p for p in psutil.Process().children() if "--weight-version" in get_command(p)]
        process = server._process
        assert process is not None and process.key not in " ".join(child.cmdline())
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = httpx.get(f"{process.url}/server_info", headers=headers, trust_env=False)
            assert answer.status_code == 401
        options = httpx.get(
            f"{process.url}/server_info",
            headers={"Authorization": f"Bearer {process.key}"},
            trust_env=False,
        ).json()
        assert (options["host"], options["max_running_requests"]) == ("127.0.0.1", 64)
        assert options["random_seed"] == 3 and not Path(options["config"]).exists()
        assert not server.is_dead
        request = asyncio.create_task(server.submit(PROMPT, SamplingParams(max_tokens=200)))
        await asyncio.sleep(0.02)
        child.kill()
        with pytest.raises(SGLangError, match="/generate"):
            await request
        assert server.is_dead and server.death_reason

    run(use, build_spec(model, python=str(python)))


def test_a_child_ends_with_the_process_that_has_started_it(tmp_path):
    python, pid_file = tmp_path / "python", tmp_path / "pid"
    python.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new; mv {pid_file}.new {pid_file}\nexec sleep 60"
    )
    python.chmod(0o755)
    code = (
        "import sys, time\nfrom mcore_rl.inference.sglang.process import SGLangProcess\n"
        f"process = SGLangProcess({str(python)!r}, {{}})\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 30
        while not pid_file.exists():
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        child = psutil.Process(int(pid_file.read_text()))
    finally:
        parent.kill()
        parent.wait()
    assert psutil.wait_procs([child], timeout=10)[1] == []


def test_a_child_that_does_not_start_is_an_error_with_its_status(model, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="SGLang does not start: it has ended with status 7"):
        run(lambda _: asyncio.sleep(0), build_spec(model, python=str(python)))


@pytest.mark.parametrize(
    ("flags", "sglang", "message"),
    [
        ((), {}, "ignores the seeds of requests; allowed: a server with --enable-deterministic"),
        (FLAGS[:1], {}, "cannot free its memory; allowed: a server with --enable-memory-saver"),
        ((*FLAGS, "--preferred-sampling-params", "{}"), {}, "has --preferred-sampling-params {}"),
        ((*FLAGS, "--api-key", "k"), {}, "/server_info: HTTP 401"),
    ],
)
def test_a_running_server_that_breaks_the_contract_is_refused(model, stack, flags, sglang, message):
    url, _ = stack.enter_context(sglang_server.serve("--model-path", str(model), *flags))
    with pytest.raises((ConfigError, SGLangError), match=re.escape(message)):
        run(lambda _: asyncio.sleep(0), build_spec(model, can_sleep=True, url=url, **sglang))


def test_a_running_server_of_another_model_is_refused(model, stack, tmp_path):
    config = tiny_families.served_config("llama")
    path = tiny_families.save_served(tiny_models.build_from(config), tmp_path / "llama")
    url, _ = stack.enter_context(sglang_server.serve("--model-path", str(path), *FLAGS))
    with pytest.raises(ConfigError, match=r"serves a model of \['LlamaFor.*'Qwen3For"):
        run(lambda _: asyncio.sleep(0), build_spec(model, url=url))


def test_a_key_of_the_environment_opens_a_running_server(model, stack, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "secret")
    words = "--model-path", str(model), *FLAGS, "--api-key", "secret"
    url, fake = stack.enter_context(sglang_server.serve(*words))
    run(lambda _: asyncio.sleep(0), build_spec(model, url=url, api_key_env="SERVER_KEY"))
    assert [route for route, _ in fake.calls] == [
        "/pause_generation",
        "/update_weights_from_disk",  # the server may have weights of another run
        "/continue_generation",
    ]


def test_a_distribution_larger_than_the_servers_limit_is_refused(model, stack):
    words = "--model-path", str(model), *FLAGS, "--sampling-mask-max-tokens", "9"
    url, _ = stack.enter_context(sglang_server.serve(*words))

    async def use(server: SGLangServer) -> None:
        with pytest.raises(ConfigError, match="distributions of up to 9 tokens; allowed: a sm"):
            await server.submit(PROMPT, SamplingParams(top_p=0.9, max_tokens=4))
        params = SamplingParams(top_p=0.9, top_k=9, max_tokens=4)
        assert (await server.submit(PROMPT, params))[0].token_ids

    run(use, build_spec(model, url=url))


def test_an_update_that_fails_refuses_requests_until_the_next(model, stack, monkeypatch):
    url, fake = stack.enter_context(sglang_server.serve("--model-path", str(model), *FLAGS))

    async def fail(path: str, version: str) -> None:
        raise OSError("no such tensor")

    async def use(server: SGLangServer) -> None:
        params = SamplingParams(max_tokens=200, seed=1)
        for in_flight in (False, True):
            version, requests = server.weight_version, []
            if in_flight:
                requests = [asyncio.create_task(server.submit(PROMPT, params))]
                await asyncio.sleep(0.02)
            with monkeypatch.context() as context:
                context.setattr(fake.engine, "swap", fail)
                with pytest.raises(SGLangError, match="Failed to update weights: no such tensor"):
                    await server.load_checkpoint(str(model), version + 1, in_flight=in_flight)
            assert server.awaits_update == in_flight and server.weight_version == version
            if not in_flight:
                with pytest.raises(StateError):
                    await server.submit(PROMPT, params)
            await server.load_checkpoint(str(model), version + 1, in_flight=in_flight)
            await asyncio.gather(*requests)
            assert (await server.submit(PROMPT, params))[0].weight_versions[0] == version + 1

    run(use, build_spec(model, url=url))


def test_an_abort_ends_a_request_that_sglang_has_not_begun(model, stack, monkeypatch):
    monkeypatch.setattr(sglang_module, "_ABORT_S", 0.2)
    url, fake = stack.enter_context(sglang_server.serve("--model-path", str(model), *FLAGS))

    async def use(server: SGLangServer) -> None:
        await server._call("/pause_generation", mode="retract")  # by another client
        request = asyncio.create_task(
            server.submit(PROMPT, SamplingParams(n=2, max_tokens=9), request_id="a")
        )
        await asyncio.sleep(0.1)
        await server.abort("a")
        completions = await request
        assert [(c.token_ids, c.finish_reason) for c in completions] == [([], "abort")] * 2
        names = [body["rid"] for route, body in fake.calls if route == "/generate"]
        assert len({len(name) for name in names}) == 1  # none is the beginning of another

    run(use, build_spec(model, url=url))


def build_reply(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-1.0, 8, None], [-2.0, 9, None]],
        "weight_versions": [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 2},
        ],
    }
    meta |= {name: value for name, value in changes.items() if name != "output_ids"}
    return {"output_ids": changes.get("output_ids", [8, 9]), "meta_info": meta}


def test_each_token_has_the_version_of_its_span():
    completion = parse_completion(build_reply(), SamplingParams())
    assert completion.weight_versions == [3, 4] and completion.log_probs == [-1.0, -2.0]


def test_an_aborted_response_has_the_tokens_that_have_log_probs_and_versions():
    reply = build_reply(finish_reason={"type": "abort"}, output_ids=[8, 9, 10])
    completion = parse_completion(reply, SamplingParams(), is_aborted=True)
    assert (completion.token_ids, completion.finish_reason) == ([8, 9], "abort")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_ids": [8]}, "1 tokens, 2 log-probs and 1 versions"),
        ({"output_ids": [8, 7]}, "log-probs are not those of the tokens"),
        ({"output_token_logprobs": [[None, 8, None]]}, "no valid float"),
        ({"output_token_logprobs": [[float("nan"), 8, ""], [-1, 9, ""]]}, "are not those of"),
        ({"output_token_logprobs": None}, "no valid 'NoneType'"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "no valid invalid"),
        ({"weight_versions": []}, "2 tokens, 2 log-probs and 0 versions"),
        ({"finish_reason": {"type": "length", "length": 2}}, "after 2 of 1024 tokens: its context"),
        ({"finish_reason": {"type": "abort", "message": "too large"}}, "aborted a request: too la"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "response: NaN happened"),
        ({"finish_reason": {"type": "other"}}, "finish_reason is"),
        ({"finish_reason": None}, "no valid"),
    ],
)
def test_a_reply_that_lacks_something_is_refused(changes, message):
    with pytest.raises(SGLangError, match=re.escape(message)):
        parse_completion(build_reply(**changes), SamplingParams())


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the request of a route with what its name says."""
    route = (await reader.readline()).split()[1]
    if route == b"/long":
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"1" * 65536)
                await writer.drain()
    elif route == b"/slow":
        await asyncio.sleep(5)
    elif route == b"/elsewhere":
        writer.write(
            b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
        )
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{]}")
    writer.close()


@pytest.mark.parametrize(
    ("route", "error", "message"),
    [
        ("/long", SGLangError, "the reply has more than 4194304 bytes"),
        ("/slow", TimeoutError, "no reply within 0.5 s"),
        ("/elsewhere", SGLangError, "HTTP 307"),
        ("/wrong", SGLangError, "no JSON: {]}"),
    ],
)
def test_replies_have_limits(route, error, message):
    async def work() -> None:
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = SGLangClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", "k", 0.5)
        try:
            with pytest.raises(error, match=message):
                await client.get(route)
        finally:
            await client.close()
            listener.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("sglang", "message"),
    [
        ({"url": "ftp://a"}, "rollout.sglang.url='ftp://a'; allowed: http://HOST:PORT"),
        ({"url": "http://u:p@a:1"}, "rollout.sglang.url='http://u:p@a:1'; allowed"),
        ({"url": "http://a:1", "python": "p"}, "rollout.sglang.python='p' is of a server that the"),
        ({"url": "http://a:1", "arguments": {"x": 1}}, "rollout.sglang.arguments={'x': 1} is of"),
        ({"url": "http://a:1", "api_key_env": "NO_KEY"}, "names the environment variable 'NO_KEY'"),
        ({"api_key_env": "NO_KEY"}, "rollout.sglang.api_key_env='NO_KEY' is of a server at"),
        ({"arguments": {"host": "0.0.0.0"}}, "rollout.sglang.arguments.host: allowed: names of"),
        ({"arguments": {"tp-size": 2}}, "rollout.sglang.arguments.tp-size: allowed: names of"),
        ({"arguments": {"lora_paths": {}}}, "rollout.sglang.arguments.lora_paths={}; allowed: te"),
        ({}, "rollout.backend='sglang': SGLang's packages have no kernels for CPUs; allowed: a"),
    ],
)
def test_settings_are_refused_by_name_before_anything_starts(sglang, message):
    settings = RolloutConfig(backend="sglang", sglang=SGLangConfig(**sglang))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_server_settings(settings, device="cpu")


@pytest.mark.parametrize(
    ("sglang", "message"),
    [
        ({}, "the package sglang is not installed; allowed: rollout.sglang.python of an envir"),
        ({"python": "/nowhere"}, "rollout.sglang.python='/nowhere' is no program; allowed: the"),
    ],
)
def test_a_server_on_gpus_needs_a_package(sglang, message):
    settings = RolloutConfig(backend="sglang", sglang=SGLangConfig(**sglang))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_server_settings(settings, device="cuda")


def test_settings_of_sglang_are_refused_with_another_backend():
    settings = RolloutConfig(sglang=SGLangConfig(url="http://127.0.0.1:30000"))
    with pytest.raises(ConfigError, match=r"rollout.sglang=.* has no part in rollout.backend='vl"):
        check_server_settings(settings, device="cpu")


def test_one_url_is_one_server():
    settings = RolloutConfig(num_servers=2, sglang=SGLangConfig(url="http://127.0.0.1:30000"))
    with pytest.raises(ConfigError, match=r"num_servers=2: rollout.sglang.url is one server; all"):
        SGLangServer.check_settings(settings, "rollout")


@pytest.mark.parametrize("method", ["colocated", "disaggregated", "full_export"])
def test_weights_come_as_checkpoints_only(method):
    config = RLConfig()
    config.task.name, config.actor.layout.tp = "last_digit", 2
    config.rollout.backend = "sglang"
    config.rollout.sglang.url = "http://127.0.0.1:30000"
    config.weight_sync.method = method
    config.placement.rollout = "auto" if method == "colocated" else "own"
    validate_rl(config)
    config = resolve_for_device_type(config, "cpu")
    if method == "full_export":
        check_servers(config, plan_run(config))
        return
    message = f"weight_sync.method='{method}': servers of rollout.backend='sglang' take checkpoi"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_servers(config, plan_run(config))


def test_frozen_models_have_settings_of_sglang():
    config = RLConfig()
    config.task.name, config.actor.layout.tp = "last_digit", 2
    config.agent.loop, config.agent.environment = "environment", "guessing"
    config.models = {"judge": {"backend": "sglang", "sglang": {"url": "http://127.0.0.1:1"}}}
    validate_rl(config)
    check_servers(resolved := resolve_for_device_type(config, "cpu"), plan_run(resolved))
    config.models["judge"]["sglang"] = {"port": 1}
    message = "models.judge.sglang.port is unknown; allowed: url, api_key_env, python, arguments"
    with pytest.raises(ConfigError, match=message):
        validate_rl(config)
