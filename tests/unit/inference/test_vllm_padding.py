"""A worker of a server gets the rows of the vocabulary that it has, and zeros for the others."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from mcore_rl.inference.vllm import weights as vllm_weights
from mcore_rl.inference.vllm.weights import ShardWriter
from mcore_rl.reshard.executor import ReceivedSlice
from mcore_rl.reshard.rules import LogicalTensor, Shard, Split

DIM = 16


@functools.cache
def build_config() -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig("cpu"))


def build_layer(kind: type[Any], vocab: int, rank: int, tp: int, **options: Any) -> torch.nn.Module:
    """Return a model of one layer of the vocabulary, as a worker of `tp` has it."""
    model: Any = torch.nn.Module()
    with set_current_vllm_config(build_config()):
        if kind is VocabParallelEmbedding:
            group = SimpleNamespace(rank_in_group=rank, world_size=tp)
            model.layer = kind(vocab, DIM, parallel_group=group, **options)
        else:
            model.layer = kind(vocab, DIM, disable_tp=True, **options)
    model.config = SimpleNamespace(tie_word_embeddings=False)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    record_metadata_for_reloading(model)
    return model


def write(model: Any, tensors: dict[str, torch.Tensor], rank: int, tp: int) -> None:
    """Send an update of whole tensors to a worker, by the rule of a vocabulary."""
    initialize_layerwise_reload(model)
    writer = ShardWriter(model, rank)
    for name, tensor in tensors.items():
        padded = -(-tensor.shape[0] // 64) * 64
        rule = Split(LogicalTensor(name, tuple(tensor.shape)), dim=0, padded=padded)
        writer.write(
            ReceivedSlice(
                f"layer.{name}", block.local_offset, tensor[block.box.slices].clone(), rank
            )
            for block in rule.get_blocks(Shard(rank, tp))
        )
    writer.finish()


@pytest.mark.parametrize(("vocab", "tp"), [(30, 2), (259, 8), (64, 4), (65, 2), (1, 16)])
def test_update_fills_the_rows_of_each_worker_and_zeroes_the_others(vocab, tp):
    weight = torch.randn(vocab, DIM)
    padded = torch.zeros(-(-vocab // 64) * 64, DIM)
    padded[:vocab] = weight
    for rank, expected in enumerate(padded.chunk(tp)):
        model = build_layer(VocabParallelEmbedding, vocab, rank, tp)
        for _ in range(2):  # an update after an update
            write(model, {"weight": weight}, rank, tp)
            assert torch.equal(model.layer.weight, expected)


def test_update_of_a_head_with_a_bias_zeroes_the_padding_of_both():
    tensors = {"weight": torch.randn(30, DIM), "bias": torch.randn(30)}
    model = build_layer(ParallelLMHead, 30, 0, 1, bias=True)
    write(model, tensors, 0, 1)
    for name, tensor in tensors.items():
        values = getattr(model.layer, name)
        assert torch.equal(values[:30], tensor) and not values[30:].any()


def test_update_without_a_workers_rows_is_refused():
    model = build_layer(VocabParallelEmbedding, 30, 0, 2)
    with pytest.raises(ValueError, match=r"1 modules did not get all weights: \['layer'\]"):
        write(model, {}, 0, 2)


@pytest.mark.parametrize("kind", [ParallelLMHead, VocabParallelEmbedding])
def test_update_has_no_rows_of_a_head_that_is_tied_to_the_embedding(kind):
    model = build_layer(kind, 64, 0, 1)
    model.config.tie_word_embeddings = True
    if kind is ParallelLMHead:
        write(model, {}, 0, 1)
    model.config.tie_word_embeddings = kind is VocabParallelEmbedding
    with pytest.raises(ValueError, match=r"1 modules did not get all weights: \['layer'\]"):
        write(model, {}, 0, 1)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_output_heads_are_packed_again_after_an_update_on_a_cpu(monkeypatch, is_cpu):
    model, packed = build_layer(ParallelLMHead, 64, 0, 1), []
    model.embedding = build_layer(VocabParallelEmbedding, 64, 0, 1).layer
    for layer in (model.layer, model.embedding):
        layer.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)
    platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setattr(vllm_weights, "current_platform", platform)
    vllm_weights.repack_output_heads(model)
    assert packed == ([model.layer] if is_cpu else [])
