"""Adapters on a server of vLLM give what weights merged with them give, by transformers.

One server may have those of several policies: the trained one, and frozen ones.
"""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file
from vllm.config.lora import MaxLoRARanks

import mcore_rl
from mcore_rl.checkpoint.peft import Factors, pack_adapters, write_adapters
from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.models.base import read_config
from tests.nightly import all_but

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))
import tiny_models

RANK, ALPHA = 6, 12.0
SHAPE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "phi3": {},  # its projections are stacked, and no family here has its rules
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
CASES = [(name, tp) for name in MODELS for tp in (1, 2)]


def build_model(name: str, folder: Path) -> Any:
    config = transformers.AutoConfig.for_model(name, **(SHAPE | MODELS[name]))
    model = tiny_models.build_from(config)
    model.save_pretrained(folder)
    return model


def merge_random_factors(
    model: Any, base: dict[str, torch.Tensor], seed: int, rank: int = RANK
) -> list[Factors]:
    """Merge new factors into the base weights of a model; return them."""
    generator, factors = torch.Generator().manual_seed(seed), []
    for name, module in model.base_model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            a = 0.2 * torch.randn(rank, module.in_features, generator=generator)
            b = 0.2 * torch.randn(module.out_features, rank, generator=generator)
            weight = f"model.{name}.weight"
            module.weight.data.copy_(base[weight] + ALPHA / rank * b @ a)
            factors.append(Factors(weight, a, b))
    return factors


def compute_log_probs(model: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    """Return the log-probs of a completion's tokens by transformers."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen: torch.Tensor = log_probs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return chosen


async def compute_gap(server: VLLMServer, model: Any) -> float:
    """Return the largest difference of log-probs to transformers."""
    gaps = []
    for prompt in ([5, 6, 7], list(range(3, 40))):
        sampling = SamplingParams(n=2, max_tokens=12, seed=3)
        for completion in await server.submit(prompt, sampling):
            chosen = compute_log_probs(model, prompt, completion)
            gaps.append((chosen - torch.tensor(completion.log_probs)).abs().max())
    return float(torch.stack(gaps).max())


async def check_versions(model: Any, folder: Path, tp: int) -> None:
    base = {name: value.clone() for name, value in model.state_dict().items()}
    config = RolloutConfig(kv_cache_bytes=64 << 20, max_num_seqs=8, tp=tp)
    server = VLLMServer(
        str(folder), "float32", 256, config, 0, adapter_rank=RANK, can_sleep=True, timeout_s=120.0
    )
    await server.start()
    try:
        assert await compute_gap(server, model) < 1e-5
        for version in (1, 2, 3):
            factors = merge_random_factors(model, base, version)
            if version == 2:  # the base model is there after a sleep
                await server.sleep()
                await server.wake("weights")
            await server.load_adapters(pack_adapters(factors), ALPHA, version)
            if version == 2:
                await server.wake("kv_cache")
            assert server.weight_version == version
            assert await compute_gap(server, model) < 1e-5
        unknown = Factors("model.layers.0.nope.weight", torch.zeros(6, 64), torch.zeros(64, 6))
        with pytest.raises(RuntimeError, match="no layer with adapters for model"):
            await server.load_adapters(pack_adapters([unknown]), ALPHA, 4)
        with pytest.raises(StateError):  # until an update succeeds
            await compute_gap(server, model)
        await server.load_adapters(pack_adapters(factors), ALPHA, 5)
        assert await compute_gap(server, model) < 1e-5
    finally:
        await server.close()


@pytest.mark.server
@pytest.mark.parametrize(("name", "tp"), all_but([("qwen3_moe", 1)], CASES))
def test_a_version_of_adapters_is_the_merged_model(name, tp, tmp_path):
    asyncio.run(check_versions(build_model(name, tmp_path), tmp_path, tp))


class Policies:
    """A server's policies, and the models that they are merged into: "" is the trained one.

    `folders` has those of the frozen ones, whose ranks differ from the policy's.
    """

    def __init__(self, folder: Path, name: str = "phi3") -> None:
        self.path, model = folder / "base", build_model(name, folder / "base")
        self.base = {name: value.clone() for name, value in model.state_dict().items()}
        self.models, self.folders = {"": model}, dict[str, str]()
        for seed, (frozen, rank) in enumerate({"first": 3, "last": 9}.items(), start=90):
            self.models[frozen] = transformers.AutoModelForCausalLM.from_pretrained(self.path)
            factors = merge_random_factors(self.models[frozen], self.base, seed, rank)
            self.folders[frozen] = str(folder / frozen)
            config = read_config(self.path)
            write_adapters(folder / frozen, partial(iter, factors), rank, ALPHA, config)

    async def compute_gaps(self, server: VLLMServer) -> tuple[float, float]:
        """Run requests of all policies at once, on the same prompt.

        Returns:
            The largest difference of log-probs to transformers, and the smallest one between the
            log-probs that two policies give the same response.
        """
        prompt, sampling = list(range(3, 40)), SamplingParams(n=2, max_tokens=12, seed=3)
        names = [*self.models] * 3  # the second and third find the prompt in the cache
        responses = await asyncio.gather(
            *(server.submit(prompt, replace(sampling, adapter=name)) for name in names)
        )
        gaps, distances = [], []
        for name, completions in zip(names, responses, strict=True):
            for completion in completions:
                chosen = torch.tensor(completion.log_probs)
                for other, model in self.models.items():
                    gap = (compute_log_probs(model, prompt, completion) - chosen).abs().max()
                    (gaps if other == name else distances).append(float(gap))
        return max(gaps), min(distances)


async def check_policies(policies: Policies, tp: int) -> None:
    config = RolloutConfig(kv_cache_bytes=64 << 20, max_num_seqs=32, tp=tp)
    server = VLLMServer(
        str(policies.path), "float32", 256, config, 0, adapter_rank=RANK,
        adapters=policies.folders, can_sleep=True, timeout_s=120.0,
    )  # fmt: skip
    await server.start()
    try:
        for version in range(4):  # 0: the policy is the base model, without an adapter
            if version == 2:
                await server.sleep()
                await server.wake("weights")
            if version:
                factors = merge_random_factors(policies.models[""], policies.base, version)
                await server.load_adapters(pack_adapters(factors), ALPHA, version)
            if version == 2:
                await server.wake("kv_cache")
            gap, distance = await policies.compute_gaps(server)
            assert gap < 1e-5 and distance > 0.1, (version, gap, distance)
        with pytest.raises(ConfigError, match="no adapter 'other'; allowed: first, last"):
            await server.submit([5], SamplingParams(adapter="other", max_tokens=8))
    finally:
        await server.close()


@pytest.mark.server
@pytest.mark.parametrize("tp", all_but((1,), (1, 2)))
def test_requests_of_three_policies_at_once_are_answered_by_their_own_adapters(tp, tmp_path):
    asyncio.run(check_policies(Policies(tmp_path), tp))


def test_the_highest_rank_of_the_servers_is_vllms():
    assert VLLMServer.features.max_adapter_rank == max(get_args(MaxLoRARanks))


@pytest.mark.job
@pytest.mark.parametrize("backend", all_but(("megatron",), ("megatron", "fsdp")))
def test_a_run_with_adapters_on_its_servers_has_the_trainers_log_probs(
    start_job, user_task_settings, tmp_path, backend
):
    layout = ("actor.layout.tp=1", "actor.layout.ep=1", "actor.layout.dp=2")
    job = start_job(
        *user_task_settings, *layout, f"actor.backend={backend}",
        "actor.lora.rank=8", "rollout.lora=adapter",
        *(("actor.lora.targets=[linear_qkv,linear_proj]",) if backend == "megatron" else ()),
        "warm_start.moe_aux_loss_coef=0", "warm_start.num_steps=4",
        "warm_start.optimizer.warmup_steps=0", "trainer.num_steps=3",
        "reward.name=tests/e2e/own_functions.py:fingerprint",  # differs whatever is said
        "trainer.prompts_per_step=16", "trainer.eval_samples=16", "algorithm.num_mini_batches=1",
        "actor.optimizer.lr=1e-2", "rollout.backend=tests/e2e/own_servers.py:CountingServer",
        output=tmp_path / "run",
    )  # fmt: skip
    assert job.process.wait(400) == 0, job.stderr[-3000:]
    rows = mcore_rl.load_run(tmp_path / "run").metrics
    assert len(rows) == 3
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert row["max_logprob_gap"] < 1e-4 and row["mean_logprob_gap"] < 1e-5
    check_received_bytes(tmp_path / "run", num_pushes=len(rows))


def check_received_bytes(output: Path, num_pushes: int) -> None:
    """Check that each push gave the server the adapters' tensors, and no call other weights."""
    logs = "".join(log.read_text() for log in (output / "logs").glob("rollout-*.log"))
    calls = re.findall(r"received (\w+) (\d+)", logs)
    adapters = load_file(output / "checkpoint" / "adapter" / "adapter_model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in adapters.values())
    model_bytes = (output / "checkpoint" / "model.safetensors").stat().st_size
    print(f"calls {calls}; adapters have {num_bytes} bytes, the model {model_bytes}")
    assert {name for name, _ in calls} == {"load_adapters"} and len(calls) == num_pushes
    for _, received in calls:  # names and shapes have a header
        assert num_bytes <= int(received) < 1.1 * num_bytes + 8192 < model_bytes / 10
