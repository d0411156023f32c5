"""A real vLLM server records the experts of each token: those that transformers' routers choose.

The first of the model's layers is dense. An id may differ only where a router is nearly tied.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from tests.e2e.hosting import hosting, run_module
from tests.e2e.served import MAX_TOKENS, Model, Served, tiny_families, tiny_models
from tests.nightly import nightly

pytestmark = pytest.mark.server

NUM_LAYERS, TOPK = 3, 2
LONG = [3, *range(10, 90)]  # more than two blocks of the prefix cache
ALL = SamplingParams(n=3, max_tokens=24, seed=1, experts_from=0)
SAMPLING = SamplingParams(max_tokens=24, seed=5, experts_from=0)
_TIED = 1e-5  # difference of router logits


@contextlib.contextmanager
def started(folder: Path, **settings: Any) -> Iterator[Served]:
    """Start with a cache of 21 blocks of 32 tokens."""
    config = transformers.Qwen3MoeConfig(
        **{**tiny_families._GROUPED, "head_dim": 32},
        num_experts=8, num_experts_per_tok=TOPK, moe_intermediate_size=64, norm_topk_prob=True,
        mlp_only_layers=[0],
    )  # fmt: skip
    both = [Model(Path(folder, str(seed)), config, seed) for seed in (0, 1)]
    rollout = RolloutConfig(max_num_seqs=32, kv_cache_bytes=1 << 20, **settings)
    server = VLLMServer(
        both[0].path, "float32", MAX_TOKENS, rollout, seed=0, can_sleep=True, records_experts=True
    )
    with hosting(), asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            yield Served(server, runner.run, both, [])
        finally:
            runner.run(server.close())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with started(tmp_path_factory.mktemp("recording")) as served:
        yield served


def ids_of(completion: Completion) -> np.ndarray:
    assert completion.routed_experts is not None
    return completion.routed_experts.ids


def assert_transformers_agrees(
    model: Model, prompt: list[int], completion: Completion, start: int = 0
) -> None:
    """Check that tokens from `start`, except the last, have the experts with largest logits."""
    expert_ids, tokens = ids_of(completion), prompt + completion.token_ids
    assert completion.routed_experts.start == start
    assert expert_ids.dtype == np.uint8
    assert expert_ids.shape == (len(tokens) - 1 - start, NUM_LAYERS, TOPK)
    assert not expert_ids[:, 0].any()  # the dense layer
    assert_chosen(model, tokens, expert_ids, start)


def assert_chosen(model: Model, tokens: list[int], expert_ids: np.ndarray, start: int) -> None:
    """[tokens, layers, experts] from the token `start` on have the largest logits."""
    for layer, logits in router_logits(model, tokens).items():
        logits = logits[start : start + len(expert_ids)]
        best = logits.topk(TOPK + 1).values
        given = logits.gather(1, torch.from_numpy(expert_ids[:, layer].astype(np.int64)))
        assert (given.amin(1) >= best[:, TOPK - 1] - _TIED).all()
        assert (best[:, TOPK - 1] - best[:, TOPK] > _TIED).sum() > 0.9 * len(best)


@torch.no_grad()
def router_logits(model: Model, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Return by layer with experts: float32 [tokens, experts]."""
    logits: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(gate: Any, inputs: Any, _: Any) -> None:
            logits[layer] = inputs[0].view(-1, gate.weight.shape[1]) @ gate.weight.T

        return hook

    layers = enumerate(model.reference.model.layers)
    gates = {i: layer.mlp.gate for i, layer in layers if hasattr(layer.mlp, "gate")}
    handles = [gate.register_forward_hook(keep(layer)) for layer, gate in gates.items()]
    model.reference(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    assert sorted(logits) == [1, 2]
    return logits


def test_all_tokens_have_their_experts_whether_the_prompt_was_cached_or_not(recording):
    recording.take(0)
    for _ in range(2):
        for completion in recording.run(recording.server.submit(LONG, ALL)):
            assert_transformers_agrees(recording.models[0], LONG, completion)
    [plain] = recording.run(recording.server.submit(LONG, SamplingParams(max_tokens=4)))
    assert plain.routed_experts is None


def test_a_turn_has_the_experts_of_its_own_tokens_and_of_the_weights_that_chose_them(recording):
    # A later turn, after an update, brings those of the new tokens, with the new weights.
    old, new = recording.models
    recording.take(0)
    [first] = recording.run(recording.server.submit(LONG, SAMPLING))
    assert_transformers_agrees(old, LONG, first)
    prompt = [*LONG, *first.token_ids, *range(40, 75)]
    start = len(ids_of(first))
    sampling = SamplingParams(max_tokens=24, seed=6, experts_from=start)
    [second] = recording.run(recording.server.submit(prompt, sampling))
    assert_transformers_agrees(old, prompt, second, start)
    recording.take(1)
    [later] = recording.run(recording.server.submit(prompt, sampling))
    assert_transformers_agrees(new, prompt, later, start)
    assert len(ids_of(first)) + len(ids_of(later)) == len(prompt) + len(later.token_ids) - 1


@pytest.mark.parametrize("how", [nightly("kept"), "recomputed", nightly("slept")])
def test_a_token_keeps_the_experts_that_its_successor_was_chosen_with_as_weights_change(
    recording, how
):
    # In flight: those of older tokens are of the old weights, also where they run again.
    recording.take(0)
    server, number = recording.server, recording.server.weight_version + 1

    async def across() -> list[Completion]:
        sampling = SamplingParams(n=2, max_tokens=150, seed=seed, experts_from=0)
        running = asyncio.create_task(server.submit(LONG, sampling))
        await server.submit([5, 6], SamplingParams(max_tokens=5, seed=4))
        path, recompute = recording.models[1].path, how == "recomputed"
        if how == "slept":
            await server.sleep(keep=True)
            await server.wake("weights")
        await server.load_checkpoint(path, number, in_flight=True, recompute_cache=recompute)
        if how == "slept":
            await server.wake("kv_cache")
        return await running

    seed = longest_of(recording, 2)
    both = [c for c in recording.run(across()) if len(set(c.weight_versions)) == 2]
    assert both
    for completion in both:
        expert_ids, tokens = ids_of(completion), LONG + completion.token_ids
        assert len(expert_ids) == len(tokens) - 1
        # The first token of the new weights was chosen as they ran the one before it.
        first = len(LONG) + completion.weight_versions.index(number) - 1
        assert_chosen(recording.models[0], tokens, expert_ids[:first], 0)
        if how != "kept":  # else the new weights read what the old ones had cached
            assert_chosen(recording.models[1], tokens, expert_ids[first:], first)


def longest_of(served: Served, num: int) -> int:
    """Return a seed from which so many responses to LONG do not end soon."""
    many = served.run(served.server.submit(LONG, SamplingParams(n=16, max_tokens=150, seed=1)))
    lengths = [len(completion.token_ids) for completion in many]
    return 1 + max(range(16 - num), key=lambda start: min(lengths[start : start + num]))


def test_requests_that_wait_for_room_in_the_cache_have_the_experts_of_their_tokens(recording):
    # The cache has 21 blocks: seven prompts fit, and two responses of 150 tokens with theirs.
    #
    # So requests are preempted, and their tokens run again.
    recording.take(0)
    prompts = [[4 + number, *LONG] for number in range(16)]
    requests = [SamplingParams(max_tokens=150, seed=seed, experts_from=0) for seed in range(16)]

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*map(recording.server.submit, prompts, requests))

    completions = recording.run(together())
    assert sum(len(completion.token_ids) == 150 for [completion] in completions) >= 3
    for prompt, [completion] in zip(prompts, completions, strict=True):
        assert_transformers_agrees(recording.models[0], prompt, completion)


def test_a_request_that_was_ended_has_the_experts_of_its_tokens(recording):
    recording.take(0)
    server = recording.server
    requests = [SamplingParams(max_tokens=150, seed=seed, experts_from=0) for seed in range(8)]
    complete = [recording.run(server.submit(LONG, request))[0] for request in requests]
    longest = max(range(8), key=lambda index: len(complete[index].token_ids))
    assert len(complete[longest].token_ids) == 150

    async def ended_beside(num: int) -> Completion:
        """End a request when another one has so many tokens."""
        task = asyncio.create_task(server.submit(LONG, requests[longest], request_id=f"a{num}"))
        async for _ in server.stream([9, *LONG], SamplingParams(max_tokens=num, seed=3)):
            pass
        await server.abort(f"a{num}")
        return (await task)[0]

    # The other one may be ahead of it.
    ended = (recording.run(ended_beside(num)) for num in (5, 15, 45))
    completion = next(c for c in ended if c.token_ids)
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 150
    assert completion.token_ids == complete[longest].token_ids[: len(completion.token_ids)]
    assert_transformers_agrees(recording.models[0], LONG, completion)


def test_a_server_that_slept_records_as_before(recording):
    async def through_sleep() -> list[Completion]:
        server, model = recording.server, recording.models[1]
        await server.sleep()
        await server.wake("weights")
        await server.load_checkpoint(model.path, server.weight_version + 1)
        await server.wake("kv_cache")
        return await server.submit(LONG, ALL)

    for completion in recording.run(through_sleep()):
        assert_transformers_agrees(recording.models[1], LONG, completion)


def test_latent_attention_which_has_no_prefix_cache_on_a_cpu_is_refused(tmp_path):
    model = tiny_models.build_from(tiny_families.served_config("deepseek_v3"), 0)
    path, config = str(tiny_families.save_served(model, tmp_path)), RolloutConfig()
    with hosting(), pytest.raises(ConfigError, match=r"cannot be recorded.*latent attention"):
        VLLMServer(path, "float32", 64, config, seed=0, records_experts=True).build_engine_config()


def test_a_server_that_records_nothing_refuses_requests_for_experts(shared_server):
    with pytest.raises(StateError, match="records no experts"):
        shared_server.run(shared_server.server.submit([3, 4], SAMPLING))


@pytest.mark.nightly
def test_workers_that_share_the_experts_record_them(tmp_path):
    run_module(__name__, tmp_path)  # its workers are forks, of a process that has run nothing else


def check_two_workers(folder: Path) -> None:
    with started(folder, tp=2, ep=True) as served:
        for seed in (0, 1):
            served.take(seed)
            for completion in served.run(served.server.submit(LONG, ALL)):
                assert_transformers_agrees(served.models[seed], LONG, completion)


def test_vllms_own_model_runner_of_the_cpu_still_reports_no_experts():
    """Else record_experts of inference/vllm/patches/cpu.py is to go."""
    folder = Path(importlib.util.find_spec("vllm").origin).parent / "v1" / "worker"
    for name in ("cpu_model_runner.py", "gpu_model_runner.py"):
        assert "aux_output_connector" not in (folder / name).read_text()
    assert "aux_output_connector" in (folder / "gpu" / "model_runner.py").read_text()


if __name__ == "__main__":
    check_two_workers(Path(sys.argv[1]))
