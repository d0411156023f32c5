"""Value head: float32 for any dtype, an engine of its own; multi-token prediction: its loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss

from mcore_rl.config.schema import EngineConfig, ModelConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.engine import ValueEngine
from mcore_rl.engine.megatron.heads import LanguageModelHead, ValueHead
from mcore_rl.engine.megatron.step import compute_training_loss
from mcore_rl.engine.packing import MicroBatch, PackSplit, pack_samples
from mcore_rl.engine.steps import ScoreSettings, TokenCounts
from mcore_rl.parallel.groups import use_single_rank_groups

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


def value_head(dtype, *, sequence_parallel=False, has_bias=True):
    config = SimpleNamespace(
        hidden_size=64, params_dtype=dtype, sequence_parallel=sequence_parallel
    )
    torch.manual_seed(0)
    return ValueHead(config, has_bias=has_bias)


@pytest.mark.parametrize("has_bias", [True, False])
def test_values_of_a_bfloat16_model_are_summed_in_float32(has_bias):
    head = value_head(torch.bfloat16, has_bias=has_bias)
    hidden = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    values = head(hidden)
    expected = hidden.double() @ head.weight.double().squeeze(0)
    expected = expected + head.bias.double() if has_bias else expected
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    values.sum().backward()
    torch.testing.assert_close(hidden.grad, head.weight.detach().expand(5, 64))
    assert head.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_parameter_tells_megatron_whether_tp_ranks_hold_parts_of_its_gradient(
    sequence_parallel,
):
    head = value_head(torch.float32, sequence_parallel=sequence_parallel)
    marks = [parameter.sequence_parallel for parameter in head.parameters()]
    assert marks == [sequence_parallel] * 2


def test_an_export_differs_from_a_language_model_in_head_and_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    engine = ValueEngine(EngineSpec(ModelConfig(str(tmp_path)), EngineConfig(), seed=0))
    assert engine.config_changes == {
        "architectures": ["Qwen3ForTokenClassification"],
        "tie_word_embeddings": False,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def test_an_export_has_the_config_of_the_value_model_that_it_began_with(tmp_path):
    changes = {"architectures": ["Qwen3ForTokenClassification"], "tie_word_embeddings": False}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | changes | labels))
    engine = ValueEngine(EngineSpec(ModelConfig(str(tmp_path)), EngineConfig(), seed=0))
    assert engine.config_changes == {}


VOCAB, HIDDEN = 13, 6


@pytest.fixture
def single_rank() -> Iterator[None]:
    device.install(1)
    with use_single_rank_groups():
        yield


def build_mtp_micro(
    prompts: list[list[int]], responses: list[list[int]], weights: list[list[float]], depths: int
) -> MicroBatch:
    batch = Batch(
        {
            "prompt_ids": Jagged.pack(prompts, np.int64),
            "response_ids": Jagged.pack(responses, np.int64),
            "loss_weights": Jagged.pack(weights, np.float32),
        }
    )
    rows, cpu = [*range(len(prompts))], torch.device("cpu")
    [micro] = pack_samples(batch, [rows], PackSplit(), cpu, num_mtp_layers=depths)
    return micro


def compute_mtp_loss(
    micro: MicroBatch, head: torch.Tensor, outputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    model = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False), head_weight=head)
    settings = ScoreSettings(temperature=0.7, chunk_bytes=0, with_entropy=False)
    return LanguageModelHead(len(head), settings).compute_mtp_loss(model, outputs, micro)


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_mtp_loss_is_the_mean_over_depths_of_the_weighted_tokens_that_have_a_prediction(
    single_rank, depths
):
    """The longest sample comes first in a pack; a prompt of one token predicts nothing behind it.

    Plain torch, token by token, at temperature 1 for any temperature of the policy.
    """
    samples = [([1, 2, 3], [4, 5, 6, 7]), ([8], [9, 10, 11])]
    weights = [[0.1, 0.2, 0.3, 0.4], [0.7, 0.5, 0.9]]
    micro = build_mtp_micro(*map(list, zip(*samples, strict=True)), weights, depths)
    torch.manual_seed(0)
    head, outputs = torch.randn(VOCAB, HIDDEN), torch.randn(depths, 11, 1, HIDDEN)
    expected, start = torch.zeros(()), 0
    for (prompt, response), row in zip(samples, weights, strict=True):
        for index, (target, weight) in enumerate(zip(response, row, strict=True)):
            for depth in range(depths):
                state = len(prompt) + index - 2 - depth  # depth 0 is one token before the policy's
                if state >= 0:
                    log_probs = (head @ outputs[depth, start + state, 0]).log_softmax(0)
                    expected -= weight * log_probs[target] / depths
        start += len(prompt) + len(response)
    actual = compute_mtp_loss(micro, head, outputs.unbind())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_mtp_gradients_are_those_of_megatron(single_rank, depths):
    """Megatron has the mean over tokens: all weights are alike, all tokens have predictions."""
    prompt, response = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]
    num_tokens, num_targets = len(prompt) + len(response), len(response)
    micro = build_mtp_micro([prompt], [response], [[1 / num_targets] * num_targets], depths)
    torch.manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    states = torch.randn((1 + depths) * num_tokens, 1, HIDDEN, requires_grad=True)
    loss = compute_mtp_loss(micro, head, states.chunk(1 + depths)[1:])
    gradients = torch.autograd.grad(loss, (states, head))

    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    is_trained = torch.tensor([[0.0] * (len(prompt) - 1) + [1.0] * num_targets + [0.0]])
    output = process_mtp_loss(
        states,
        labels=torch.tensor([[*prompt[1:], *response, 0]]),
        loss_mask=is_trained,
        output_layer=lambda hidden, weight, runtime_gather_output: (hidden @ weight.t(), None),
        output_weight=head,
        runtime_gather_output=None,
        is_training=False,  # logs nothing
        compute_language_model_loss=lambda labels, logits: F.cross_entropy(
            logits[:, 0], labels[0], reduction="none"
        )[None],
        config=SimpleNamespace(
            mtp_num_layers=depths,
            mtp_detach_heads=False,
            mtp_loss_scaling_factor=1.0,
            calculate_per_token_loss=False,
        ),
    )
    expected = torch.autograd.grad(output, (states, head), torch.zeros_like(output))
    torch.testing.assert_close(gradients, expected)
    assert expected[0].any()


@pytest.mark.parametrize("depths", [0, 1, 2])
def test_loss_of_a_step_adds_a_coefficient_times_the_mean_over_depths(single_rank, depths):
    """Plain torch; Megatron divides by the number of tokens, which the loss is multiplied by."""
    prompt, response, weights = [1, 2, 3], [4, 5, 6, 7], [0.1, 0.2, 0.3, 0.4]
    micro = build_mtp_micro([prompt], [response], [weights], depths)
    torch.manual_seed(0)
    head, states = torch.randn(VOCAB, HIDDEN), torch.randn(1 + depths, 7, 1, HIDDEN)
    model = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False), head_weight=head)
    settings = ScoreSettings(temperature=0.7, chunk_bytes=0, with_entropy=False)
    total, num_tokens, result = compute_training_loss(
        LanguageModelHead(VOCAB, settings),
        lambda inputs: (-inputs.scores["log_probs"], {}),
        TokenCounts(total=20, trained={"loss_weights": 9}),
        model,
        micro,
        states.flatten(0, 1),
        mtp_loss_coef=0.5,
    )

    def sum_losses(outputs: torch.Tensor, first_state: int, temperature: float) -> torch.Tensor:
        log_probs = (outputs[first_state:, 0] @ head.t() / temperature).log_softmax(-1)
        return -sum(
            weight * log_probs[n, target]
            for n, (target, weight) in enumerate(zip(response, weights, strict=True))
        )

    policy = sum_losses(states[0], 2, 0.7)
    predictions = [sum_losses(states[1 + n], 1 - n, 1.0) for n in range(depths)]
    mean = sum(predictions, torch.zeros(())) / max(depths, 1)
    torch.testing.assert_close(total, 20 * (policy + 0.5 * mean))
    assert int(num_tokens) == 7 and ("mtp_loss" in result) == (depths > 0)
    torch.testing.assert_close(result["loss"].float(), policy)
    torch.testing.assert_close(result.get("mtp_loss", mean), mean)
