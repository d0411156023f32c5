"""State of an FSDP engine on one rank: what fills it, moves, and goes on from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

import tiny_models

from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
)
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.fsdp.engine import FSDPEngine
from mcore_rl.models.base import use_family
from mcore_rl.trainers.policy_loss import PolicyLoss

LOSS = PolicyLoss(AlgorithmConfig(kl_coef=0.1))
LORA = LoRAConfig(rank=2, alpha=8.0, targets=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The only rank of a world, and a model of one layer."""
    path = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=tiny_models.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    tiny_models.build_from(config).save_pretrained(path)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    use_family("transformers")
    yield path
    use_family("")
    dist.destroy_process_group()


def start(path: Path, lora: LoRAConfig | None = None, total_steps: int = 6) -> Any:
    settings = EngineConfig(
        backend="fsdp",
        lora=lora or LoRAConfig(),
        optimizer=OptimizerConfig(lr=1e-3, beta2=0.98, warmup_steps=4),
        max_tokens_per_micro_batch=132,
    )
    model = ModelConfig(path=str(path), dtype="float32", family="transformers")
    engine = FSDPEngine(EngineSpec(model, settings, seed=3, total_steps=total_steps))
    engine.initialize()
    return engine


def export(engine: Any) -> dict[str, torch.Tensor]:
    return dict(engine.get_per_tensor_param())


def test_gradients_are_dropped_when_they_move_and_with_no_other_part(model_path):
    engine, batch = start(model_path), tiny_models.make_batch(3)
    engine.train_batch(batch, LOSS)
    trained = export(engine)
    engine.to("host", grad=False)
    assert all(parameter.grad is not None for parameter in engine.parameters)
    engine.to("device")
    engine.to("host", model=False, optimizer=False)
    assert all(parameter.grad is None for parameter in engine.parameters)
    with pytest.raises(StateError, match="gradients are away"):
        engine.train_batch(batch, LOSS)
    engine.to("device")
    assert all(torch.equal(value, trained[name]) for name, value in export(engine).items())
    start(model_path, total_steps=0).to("host")  # has no optimizer


def test_parts_are_the_storages_of_parameters_with_buffers_and_of_moments(model_path):
    """Adam has two moments and a step count of 4 bytes per parameter."""
    engine = start(model_path)
    engine.train_batch(tiny_models.make_batch(3), LOSS)

    def count_bytes(part: str) -> int:
        tensors = engine.list_tensors(part)
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    num_bytes = [4 * parameter.numel() for parameter in engine.parameters]
    assert count_bytes("optimizer state") == 2 * sum(num_bytes) + 4 * len(num_bytes)
    buffers = [buffer.untyped_storage().nbytes() for buffer in engine.root.buffers()]
    assert buffers and count_bytes("parameters") == sum(num_bytes) + sum(buffers)


@pytest.mark.parametrize("lora", [None, LORA])
def test_resumed_steps_are_those_of_a_run_without_an_end(model_path, tmp_path, lora):
    """Four steps of warm-up to 1e-3: 0.25e-3 at the first step, 0.75e-3 at the third."""
    batch = tiny_models.make_batch(3)
    engine = start(model_path, lora)
    rates = [engine.train_batch(batch, LOSS)["lr"] for _ in range(2)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3])
    engine.save_checkpoint(tmp_path / "saved")
    resumed = start(model_path, lora)
    resumed.load_checkpoint(tmp_path / "saved")
    steps = [trained.train_batch(batch, LOSS) for trained in (engine, resumed)]
    assert steps[1] == steps[0] and steps[1]["lr"] == pytest.approx(0.75e-3)
    expected = export(engine)
    assert all(torch.equal(value, expected[name]) for name, value in export(resumed).items())


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoRAConfig(), "has lora_rank=2; this run needs 0"),
        (LoRAConfig(4, 8.0, ["q_proj", "v_proj"]), "has lora_rank=2; this run needs 4"),
        (LoRAConfig(2, 16.0, ["q_proj", "v_proj"]), r"has lora_alpha=8\.0; this run needs 16\.0"),
        (
            LoRAConfig(2, 8.0, ["q_proj"]),
            r"has lora_targets=\['q_proj', 'v_proj'\]; this run needs \['q_proj'\]",
        ),
        (
            LoRAConfig(2, 8.0, ["o_proj", "v_proj", "q_proj"]),
            r"has lora_targets=\['q_proj', 'v_proj'\]; this run needs \['o_proj', 'q_proj', 'v_",
        ),
        (LoRAConfig(2, 8.0, ["v_proj", "q_proj", "q_proj"]), None),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_by_what_differs(
    model_path, saved_adapters, lora, message
):
    engine = start(model_path, lora)
    before = export(engine)
    if message is None:
        engine.load_checkpoint(saved_adapters)
        return
    with pytest.raises(ConfigError, match=message):
        engine.load_checkpoint(saved_adapters)
    assert all(torch.equal(value, before[name]) for name, value in export(engine).items())


@pytest.fixture(scope="module")
def saved_adapters(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "saved"
    start(model_path, LORA).save_checkpoint(folder)
    return folder


def test_weights_alone_are_loaded_from_a_trained_state_and_no_optimizer_from_weights(
    model_path, tmp_path
):
    trained = start(model_path)
    trained.train_batch(tiny_models.make_batch(3), LOSS)
    trained.save_checkpoint(tmp_path / "trained")
    scorer = start(model_path, total_steps=0)
    scorer.load_checkpoint(tmp_path / "trained")
    expected = export(trained)
    assert all(torch.equal(value, expected[name]) for name, value in export(scorer).items())
    scorer.save_checkpoint(tmp_path / "weights")
    with pytest.raises(ConfigError, match="has has_optimizer=False; this run needs True"):
        trained.load_checkpoint(tmp_path / "weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("is_filled", [False, True])
def test_buffer_that_nothing_fills_is_refused_by_its_name(
    model_path, monkeypatch, dtype, is_filled
):
    build, initialize = transformers.Qwen3Model.__init__, transformers.Qwen3Model._init_weights

    def build_with_buffer(model: Any, config: Any) -> None:
        build(model, config)
        model.register_buffer("scales", torch.ones(3, dtype=dtype), persistent=False)

    def fill_scales(model: Any, module: Any) -> None:
        initialize(model, module)
        if hasattr(module, "scales"):
            module.scales.fill_(1)

    monkeypatch.setattr(transformers.Qwen3Model, "__init__", build_with_buffer)
    if is_filled:
        monkeypatch.setattr(transformers.Qwen3PreTrainedModel, "_init_weights", fill_scales)
        assert (
            dict(start(model_path).root.named_buffers())["model.model.scales"].tolist() == [1] * 3
        )
        return
    with pytest.raises(ConfigError, match=r"model\.scales of Qwen3ForCausalLM has values"):
        start(model_path)


def test_checkpoint_with_a_weight_that_is_no_number_is_refused_by_its_name(model_path, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[47, 31] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj\.weight of Qwen3ForCausalLM"):
        start(tmp_path)
