"""A vLLM server's scores and traces are transformers' on the same checkpoint, in float32.

A dense model with a tied head on one worker; on two workers one with latent attention, shared
experts and a router with groups, bias and scale.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import tiny_families
import tiny_models

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.protocol import SamplingParams, TokenScores
from mcore_rl.rollout.vllm_server import VLLMServer
from mcore_rl.weight_sync.stream import StreamEndpoint, StreamSender
from tests.e2e.hosting import hosting

_MAX_TOKENS, _EOS = 256, 1
_NATS, _RELATIVE = 1e-5, 1e-5  # measured: 1.5e-6 and 1.1e-6
_LONG = torch.randint(2, tiny_models.VOCAB, (200,), generator=torch.manual_seed(4)).tolist()
_TRACED = re.compile(
    r"model\.embed_tokens|model\.norm|lm_head|model\.layers\.\d+\."
    r"(input_layernorm|self_attn|post_attention_layernorm|mlp|mlp\.gate)"
)


@dataclass(frozen=True)
class Served:
    """A server, how to run on its loop, and two models: it starts with the first one's weights."""

    server: VLLMServer
    run: Callable[[Any], Any]
    tp: int
    models: list[Any]
    paths: list[Path]

    async def update(self, seed: int) -> None:
        version = self.server.weight_version + 1
        weights = load_file(self.paths[seed] / "model.safetensors").items()
        with StreamSender("127.0.0.1", self.tp, timeout_s=20.0) as sender:
            sent = asyncio.to_thread(sender.send, weights, version)
            await asyncio.gather(sent, self.server.update_weights(sender.endpoint, version))


@pytest.fixture(scope="module", params=[("qwen3", 1), ("deepseek_v3", 2)])
def served(request, tmp_path_factory) -> Iterator[Served]:
    name, tp = request.param
    models = [tiny_models.build_from(tiny_families.served_config(name), seed) for seed in (0, 1)]
    paths = [tiny_families.save_served(m, tmp_path_factory.mktemp(name)) for m in models]
    config = RolloutConfig(tp=tp, max_num_seqs=16, kv_cache_bytes=32 << 20)
    server = VLLMServer(str(paths[0]), "float32", _MAX_TOKENS, config, seed=0)
    with hosting(tp), asyncio.Runner() as runner:
        runner.run(server.start())
        yield Served(server, runner.run, tp, models, paths)
        runner.run(server.close())


def _reference(model: Any, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """Outputs of transformers' modules; of a router the weights, spread over all experts."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, module: Any, output: Any) -> None:
        if name.endswith("gate"):
            _, weights, ids = output
            output = torch.zeros(len(weights), len(module.weight)).scatter_(1, ids, weights)
        output = output[0] if isinstance(output, tuple) else output
        seen[name] = output.reshape(len(token_ids), -1)

    hooks = [
        module.register_forward_hook(lambda m, _, output, name=name: keep(name, m, output))
        for name, module in model.named_modules()
        if _TRACED.fullmatch(name)
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return seen


def _expected(model: Any, token_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Log-probs of all tokens but the first, and the most likely token there."""
    log_probs = _reference(model, token_ids)["lm_head"][:-1].log_softmax(-1)
    own = log_probs[torch.arange(len(token_ids) - 1), token_ids[1:]]
    return own, log_probs.argmax(-1).tolist()


def _check(scores: TokenScores, model: Any, before: list[int]) -> None:
    """`scores` of what follows `before`."""
    log_probs, top_ids = _expected(model, before + scores.token_ids)
    own = torch.tensor(scores.log_probs)
    torch.testing.assert_close(own, log_probs[len(before) - 1 :], atol=_NATS, rtol=0)
    assert scores.top_ids == top_ids[len(before) - 1 :]


def _check_trace(traced: dict[str, torch.Tensor], model: Any, token_ids: list[int]) -> None:
    expected = _reference(model, token_ids)
    assert set(traced) == set(expected)
    for name, tensor in traced.items():
        assert tensor.shape == expected[name].shape, name
        gap = (tensor - expected[name]).abs().max() / expected[name].abs().max()
        assert gap < _RELATIVE, name


def test_scores_are_the_references_at_every_position_of_a_cached_prompt_too(served):
    for _ in range(2):
        served.run(served.server.generate(_LONG, SamplingParams(max_tokens=1)))
        scores = served.run(served.server.score(_LONG))
        assert scores.token_ids == _LONG[1:]
        _check(scores, served.models[0], _LONG[:1])
    assert served.run(served.server.score(_LONG[:1])) == TokenScores([], [], [])


def test_sampled_tokens_are_scored_as_the_reference_and_a_prefill_score_them(served):
    prompt = _LONG[:30]
    num_seeds, num_tokens = (4, 200) if served.tp == 1 else (2, 20)  # two workers take their time
    scored = [
        served.run(served.server.decode(prompt, num_tokens, seed)) for seed in range(num_seeds)
    ]
    for scores in scored:
        assert len(scores.token_ids) == num_tokens
        _check(scores, served.models[0], prompt)
    # An end of sequence ends nothing here.
    assert served.tp > 1 or any(_EOS in s.token_ids[:-1] for s in scored)
    again = served.run(served.server.decode(prompt, num_tokens, seed=1))
    assert again.token_ids == scored[1].token_ids != scored[0].token_ids
    prefilled = served.run(served.server.score(prompt + scored[0].token_ids))
    assert prefilled.log_probs[29:] == pytest.approx(scored[0].log_probs, abs=2 * _NATS)


def test_every_module_of_a_trace_is_the_references_and_a_trace_leaves_nothing_behind(served):
    before = served.run(served.server.score(_LONG))
    for token_ids in (_LONG, _LONG[:1], _LONG):
        traced = served.run(served.server.trace(token_ids))
        assert {t.dtype for t in traced.values()} == {torch.float32}
        _check_trace(traced, served.models[0], token_ids)
    assert served.run(served.server.score(_LONG)) == before


def test_a_trace_has_the_engine_to_itself(served):
    async def among_others() -> Any:
        asked = SamplingParams(n=2, max_tokens=20)
        early = [asyncio.create_task(served.server.generate(_LONG[:9], asked)) for _ in range(3)]
        cancelled = asyncio.create_task(served.server.generate(_LONG[9:20], asked))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        trace = asyncio.create_task(served.server.trace(_LONG[:40]))
        await asyncio.sleep(0)
        late = [served.server.score(_LONG[:50]), served.server.decode(_LONG[:50], 9, seed=0)]
        return await asyncio.gather(trace, *late, *early)

    traced, scores, decoded, *early = served.run(among_others())
    _check_trace(traced, served.models[0], _LONG[:40])
    _check(scores, served.models[0], _LONG[:1])
    _check(decoded, served.models[0], _LONG[:50])
    assert [len(completions) for completions in early] == [2] * 3


def test_scores_and_traces_are_of_the_weights_after_an_update_and_of_none_after_a_failed_one(
    served,
):
    old, new = served.models
    gap = _expected(old, _LONG)[0] - _expected(new, _LONG)[0]
    assert gap.abs().max() > 0.1  # the test can tell the two apart
    served.run(served.update(1))
    _check(served.run(served.server.score(_LONG)), new, _LONG[:1])
    _check_trace(served.run(served.server.trace(_LONG)), new, _LONG)
    nobody = StreamEndpoint("127.0.0.1", 9, "0" * 32, 1.0)
    with pytest.raises(RuntimeError, match="failed"):
        served.run(served.server.update_weights(nobody, served.server.weight_version + 1))
    for call in _calls(served.server, 10):
        with pytest.raises(RuntimeError, match=r"does not serve: its update .* did not complete"):
            served.run(call)
    served.run(served.update(0))
    _check(served.run(served.server.decode(_LONG[:5], 9, seed=0)), old, _LONG[:5])


def _calls(server: VLLMServer, num_tokens: int) -> list[Any]:
    token_ids = [2] * num_tokens
    return [server.score(token_ids), server.decode(token_ids, 1, seed=0), server.trace(token_ids)]


def test_what_does_not_fit_is_refused_and_the_last_that_fits_is_not(served):
    for call in _calls(served.server, _MAX_TOKENS):
        with pytest.raises(ConfigError, match="256 tokens and 1 exceed the server's 256 tokens"):
            served.run(call)
    fitting = [served.run(call) for call in _calls(served.server, _MAX_TOKENS - 1)]
    assert len(fitting[0].token_ids) == _MAX_TOKENS - 2
    assert len(fitting[2]["lm_head"]) == _MAX_TOKENS - 1


def test_compiled_graphs_are_not_traced(served, monkeypatch):
    monkeypatch.setattr(served.server._engine.model_config, "enforce_eager", False)
    with pytest.raises(RuntimeError, match="start it with eager"):
        served.run(served.server.trace(_LONG))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", "head_dim is 24; vLLM on a CPU takes 32, 64"),
        ("deepseek_v3", r"kv_lora_rank \+ qk_rope_head_dim is 40; vLLM on a CPU takes 576"),
    ],
)
def test_heads_that_the_cpu_does_not_take_are_refused_before_the_engine_starts(
    name, message, tmp_path
):
    path = tiny_families.save_served(
        tiny_models.build_from(tiny_families.cases()[name].config), tmp_path
    )
    server = VLLMServer(str(path), "float32", _MAX_TOKENS, RolloutConfig(), seed=0)
    with hosting(), pytest.raises(ConfigError, match=message):
        asyncio.run(server.start())
    with pytest.raises(RuntimeError, match="it has not been started"):
        asyncio.run(server.trace(_LONG))


def test_an_engine_that_does_not_start_is_an_error_and_the_server_has_not_started(tmp_path):
    model = tiny_models.build_from(tiny_families.served_config("qwen3"))
    path = tiny_families.save_served(model, tmp_path)
    config = RolloutConfig(kv_cache_bytes=1)
    server = VLLMServer(str(path), "float32", _MAX_TOKENS, config, seed=0)
    with hosting(), pytest.raises(RuntimeError, match="vLLM's engine does not start"):
        asyncio.run(server.start())
    with pytest.raises(RuntimeError, match="it has not been started"):
        asyncio.run(server.score(_LONG))
