"""Tokens that a draft model proposes are those of the served model, and so are their log-probs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import tiny_families

from mcore_rl.config.schema import RolloutConfig, SpeculativeConfig
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.testing import check_server
from tests.e2e.hosting import hosting
from tests.nightly import all_but

pytestmark = pytest.mark.server

PROMPT = [3, *range(10, 40)]
NATS = 1e-5


def settings(num_tokens: int = 2, **changes: Any) -> RolloutConfig:
    speculative = SpeculativeConfig(num_tokens)
    return RolloutConfig(
        max_num_seqs=64, kv_cache_bytes=64 << 20, speculative=speculative, **changes
    )


def save(folder: Path, seed: int, family: str = "deepseek_v3") -> Path:
    config = tiny_families.served_config(family)
    folder.mkdir()
    path = tiny_families.save_with_mtp(family, folder, config)
    return tiny_families.make_predictable(path, seed)


@dataclass(frozen=True)
class Served:
    server: VLLMServer
    run: Callable[[Any], Any]
    paths: list[Path]

    def load(self, index: int) -> Any:
        """Serve a checkpoint, and return transformers' model of it."""
        version = self.server.weight_version + 1
        self.run(self.server.load_checkpoint(str(self.paths[index]), version))
        return transformers.AutoModelForCausalLM.from_pretrained(self.paths[index]).float()

    def submit(self, **sampling: Any) -> tuple[list[Completion], float]:
        """Return completions, and the share of drafted tokens that were accepted."""
        self.run(self.server.take_draft_counts())
        completions = self.run(self.server.submit(PROMPT, SamplingParams(**sampling)))
        counts = self.run(self.server.take_draft_counts())
        assert counts.num_draft_tokens == 2 * counts.num_drafts > 0
        return completions, counts.num_accepted_tokens / counts.num_draft_tokens


@contextlib.contextmanager
def serve(folder: Path, family: str) -> Iterator[Served]:
    paths = [save(folder / str(seed), seed, family) for seed in (0, 1)]
    server = VLLMServer(str(paths[0]), "float32", 256, settings(), seed=0, can_sleep=True)
    with hosting(), asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            yield Served(server, runner.run, paths)
        finally:
            runner.run(server.close())


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("drafts"), "deepseek_v3") as served:
        yield served


@torch.no_grad()
def compute_log_probs(model: Any, response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[tokens, vocabulary] by transformers."""
    logits = model(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1]
    table: torch.Tensor = (logits / temperature).log_softmax(-1)
    return table


def check_log_probs(table: torch.Tensor, completion: Completion) -> None:
    expected = table[torch.arange(len(table)), completion.token_ids]
    assert completion.log_probs == pytest.approx(expected.tolist(), abs=NATS)


def test_greedy_tokens_are_the_likeliest_of_the_served_model_and_most_drafts_are_accepted(served):
    model = served.load(0)
    [completion], acceptance = served.submit(temperature=0.0, max_tokens=60)
    table = compute_log_probs(model, completion.token_ids)
    assert table.argmax(-1).tolist() == completion.token_ids
    check_log_probs(table, completion)
    assert 0.5 < acceptance <= 1


def test_sampled_tokens_follow_the_served_model_at_each_temperature(served):
    """The sums of log-probs of a sample, and its number of likeliest tokens, have known moments."""
    model = served.load(0)
    for temperature in (1.0, 0.6):
        completions, acceptance = served.submit(
            n=64, max_tokens=50, temperature=temperature, seed=11
        )
        assert 0.1 < acceptance < 0.98
        scores = {"log_probs": [0.0, 0.0], "likeliest": [0.0, 0.0]}  # excess, variance
        for completion in completions:
            table = compute_log_probs(model, completion.token_ids, temperature)
            check_log_probs(table, completion)
            tokens, probs = torch.tensor(completion.token_ids), table.exp()
            is_likeliest = torch.zeros_like(probs).scatter(1, table.argmax(-1, keepdim=True), 1.0)
            for name, values in (("log_probs", table), ("likeliest", is_likeliest)):
                mean = (probs * values).sum(-1)
                scores[name][0] += float((values[torch.arange(len(tokens)), tokens] - mean).sum())
                scores[name][1] += float(((probs * values**2).sum(-1) - mean**2).sum())
        for name, (excess, variance) in scores.items():
            assert abs(excess) < 4 * variance**0.5, (name, temperature)


def test_a_seed_repeats_a_response_with_drafts_alone_and_in_a_batch(served):
    served.load(0)
    first, _ = served.submit(n=6, max_tokens=30, seed=3)
    again, _ = served.submit(n=6, max_tokens=30, seed=3)
    [alone], _ = served.submit(max_tokens=30, seed=5)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert alone.token_ids == first[2].token_ids


def test_an_update_reaches_the_prediction_layers_also_after_sleep(served):
    greedy = {"temperature": 0.0, "max_tokens": 40}
    shares = []
    for index in (0, 1):
        model = served.load(index)
        [completion], share = served.submit(**greedy)
        assert compute_log_probs(model, completion.token_ids).argmax(-1).tolist() == (
            completion.token_ids
        )
        shares.append((completion.token_ids, share))
    served.run(served.server.sleep())
    served.run(served.server.wake("weights"))
    version = served.server.weight_version + 1
    served.run(served.server.load_checkpoint(str(served.paths[1]), version))
    served.run(served.server.wake("kv_cache"))
    [completion], share = served.submit(**greedy)
    assert (completion.token_ids, share) == shares[1]
    assert shares[0][1] > 0.5 < shares[1][1]


def test_drafts_read_no_keys_and_values_of_older_weights(tmp_path):
    """Latent attention has no prefix cache on a CPU: this is a model with heads.

    Of a cached prompt of 97 tokens vLLM computes the last of three blocks of 32 again, for the
    hidden states that drafts begin with.
    """
    prompt = [3, *range(10, 106)]

    async def generate(server: VLLMServer) -> tuple[int, tuple[list[int], int]]:
        """Return the number of cached tokens; the response and its number of accepted tokens."""
        await server.take_draft_counts()
        async for output in server._generate(prompt, max_tokens=60, temperature=0.0):
            num_cached, response = output.num_cached_tokens, list(output.outputs[0].token_ids)
        counts = await server.take_draft_counts()
        return num_cached, (response, counts.num_accepted_tokens)

    with serve(tmp_path, "glm4_moe") as served:
        server, responses = served.server, []
        for index, in_flight in ((0, False), (1, False), (0, True), (1, True)):
            path, version = str(served.paths[index]), server.weight_version + 1
            served.run(server.load_checkpoint(path, version, in_flight=in_flight))
            first, again = (served.run(generate(server)) for _ in range(2))
            assert (first[0], again[0]) == (0, 64)
            assert first[1] == again[1]
            responses.append(first[1])
    assert responses[:2] == responses[2:]
    assert responses[0] != responses[1]


@pytest.mark.parametrize("family", all_but([], ["deepseek_v3", "glm4_moe", "glm4_moe_lite"]))
def test_a_server_that_drafts_keeps_the_contract(tmp_path, family):
    path = save(tmp_path / "model", 0, family)
    with hosting():
        check_server(VLLMServer.create, path, tolerance=NATS, settings=settings())
