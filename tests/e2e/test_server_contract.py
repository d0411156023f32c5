"""vLLM's server keeps the contract of rollout backends, and chooses the tokens of the example."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import SamplingParams, ServerSpec
from mcore_rl.inference.registry import create_server
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.testing import check_server
from tests.e2e.hosting import hosting
from tests.e2e.served import MAX_TOKENS, PROMPT, Model, tiny_families

pytestmark = pytest.mark.server

BACKEND = f"{Path(__file__).parents[2]}/examples/hf_server.py:HFServer"


def test_a_server_of_vllm_keeps_the_contract(tmp_path):
    model = Model(tmp_path / "model", tiny_families.served_config("qwen3_moe"), 0)
    with hosting():
        names = check_server(VLLMServer.create, model.path, tolerance=1e-5)
    assert len(names) == 15


def test_greedy_tokens_of_vllm_and_of_the_example_are_the_same(server, run, moe):
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    prompts = [PROMPT[:length] for length in (2, 9, 31)]
    settings = RolloutConfig(backend=BACKEND)

    async def generate_by_example() -> list[list[int]]:
        example = create_server(ServerSpec(moe[0].path, "float32", MAX_TOKENS, settings, seed=0))
        await example.start()
        completions = await asyncio.gather(*(example.submit(p, greedy) for p in prompts))
        await example.close()
        return [completion.token_ids for [completion] in completions]

    expected = [run(server.submit(prompt, greedy))[0].token_ids for prompt in prompts]
    assert run(generate_by_example()) == expected
