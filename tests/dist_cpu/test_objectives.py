"""SFT, preference losses and reward models against transformers and torch, on whole sequences.

Loss and gradients of a batch: scores by the engine, weights by the driver, a pass by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_models
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from mcore_rl.algorithms.losses import linear_in_scores, negative_log_likelihood
from mcore_rl.algorithms.preference import (
    PREFERENCE_LOSSES,
    bradley_terry,
    build_pair_inputs,
    compute_pair_weights,
)
from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.examples import build_scoring_batch
from mcore_rl.engine.base import create_engine
from tests.nightly import all_but

LAYOUTS = {
    "tp1": Layout(),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "cp2": Layout(cp=2),
    "cp2pp2": Layout(cp=2, pp=2),
}
EACH = all_but(["pp2", "dp2"], LAYOUTS)
DPO, ORPO = {"beta": 0.5, "label_smoothing": 0.1}, {"lam": 0.7}
MARGIN = 0.25


@ranks.spawn_on_ranks()
def scores(path: Path, layout: Layout, batch: Batch, kind: str, column: str) -> ranks.Result:
    """By row of the batch; empty where there is no head."""
    engine = started(path, layout, kind)
    rows = ranks.list_rows(engine, batch)
    scored = engine.infer_batch(batch.take(rows).select("prompt_ids", "response_ids"))
    if scored is None:
        return {}
    values = scored.jagged(column)
    return {row: torch.from_numpy(values[place].copy()) for place, row in enumerate(rows)}


@ranks.spawn_on_ranks()
def gradients(
    path: Path, layout: Layout, batch: Batch, kind: str, loss: Any = linear_in_scores
) -> ranks.Result:
    engine = started(path, layout, kind)
    share = batch.take(ranks.list_rows(engine, batch))
    engine.optimizer_zero_grad()
    results = engine.forward_backward_batch(share, loss, forward_only=False)
    return {"metrics": engine._reduce_metrics(results), "gradients": ranks.read_gradients(engine)}


@ranks.spawn_on_ranks()
def exported(path: Path, layout: Layout, batch: Batch, folder: Path) -> ranks.Result:
    """A reward model after a step, as a checkpoint; and its scores, by row."""
    engine = started(path, layout, "reward_model")
    rows = ranks.list_rows(engine, batch)
    engine.train_batch(batch.take(rows), linear_in_scores)
    tensors = engine.get_per_tensor_param()
    if engine.is_main_rank:
        write_checkpoint(folder, tensors, reference=path, config_changes=engine.config_changes)
    else:
        list(tensors)
    scored = engine.infer_batch(batch.take(rows).select("prompt_ids", "response_ids"))
    if scored is None:
        return {}
    return {row: scored.jagged("values")[place].item() for place, row in enumerate(rows)}


def started(path: Path, layout: Layout, kind: str) -> Any:
    return ranks.start_engine(ranks.build_engine_spec(path, layout), partial(create_engine, kind))


@dataclass(frozen=True)
class Runs:
    paths: dict[str, Path]
    pairs: Batch  # with reference_log_probs by transformers, of another model
    folder: Path

    def scored(self, batch: Batch, layout: str, kind: str, column: str) -> Batch:
        """Return a batch with scores as a driver gets it back."""
        by_rank = scores(self.paths[kind], LAYOUTS[layout], batch, kind, column)
        by_row = {row: values for result in by_rank for row, values in result.items()}
        rows = [by_row[row].numpy() for row in range(len(batch))]
        return batch.with_columns(**{column: Jagged.pack(rows, np.float32)})

    def gradients(self, batch: Batch, layout: str, *of: Any) -> list[ranks.Result]:
        return gradients(self.paths[of[0]], LAYOUTS[layout], batch, *of)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("objectives")
    reward_model().save_pretrained(folder / "reward")
    paths = {
        "language_model": tiny_models.save("qwen3", folder),
        "reward_model": folder / "reward",
    }
    pairs, reference = pair_batch(), tiny_models.build("qwen3", seed=9)
    log_probs = [log_probs_of(reference, pairs, row).detach().numpy() for row in range(len(pairs))]
    pairs = pairs.with_columns(reference_log_probs=Jagged.pack(log_probs, np.float32))
    return Runs(paths, pairs, folder)


def reward_model() -> Any:
    config = tiny_models.configs()["qwen3"]
    config.num_labels, config.tie_word_embeddings = 1, False
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.2)
    return model


def pair_batch() -> Batch:
    """Both responses of a pair have one prompt; some of their tokens are not trained."""
    batch = tiny_models.make_batch(12).select("prompt_ids", "response_ids", "response_mask")
    prompts = [batch.jagged("prompt_ids")[row // 2 * 2] for row in range(12)]
    return batch.with_columns(prompt_ids=Jagged.pack(prompts, np.int64))


def ids_of(batch: Batch, row: int) -> torch.Tensor:
    parts = [batch.jagged(name)[row] for name in ("prompt_ids", "response_ids")]
    return torch.from_numpy(np.concatenate(parts))[None]


def log_probs_of(model: Any, batch: Batch, row: int) -> torch.Tensor:
    """[response tokens], float64, with gradient."""
    num_prompt = len(batch.jagged("prompt_ids")[row])
    table = model(ids_of(batch, row)).logits[0, num_prompt - 1 : -1].double().log_softmax(-1)
    targets = torch.from_numpy(batch.jagged("response_ids")[row].copy())
    return table.gather(1, targets[:, None])[:, 0]


def mask_of(batch: Batch, row: int) -> torch.Tensor:
    return torch.from_numpy(batch.jagged("response_mask")[row] != 0)


def reference_gradients(model: Any, loss: torch.Tensor, folder: Path) -> dict[str, torch.Tensor]:
    """By the names of a checkpoint: transformers writes them as if they were the weights."""
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_gradients(actual: list[ranks.Result], expected: dict[str, torch.Tensor]) -> None:
    assert actual[0]["gradients"].keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[0]["gradients"][name], tensor, rtol=1e-3, atol=2e-6 * largest, msg=name
        )


@pytest.mark.parametrize("layout", EACH)
def test_supervised_loss_and_gradients_equal_transformers(runs, layout):
    """make_batch has masks with gaps, as those of a conversation with several turns."""
    batch = tiny_models.make_batch().select(
        "prompt_ids", "response_ids", "response_mask", "loss_weights"
    )
    model = tiny_models.build("qwen3")
    trained = [log_probs_of(model, batch, row)[mask_of(batch, row)] for row in range(len(batch))]
    loss = -torch.cat(trained).mean()
    results = runs.gradients(batch, layout, "language_model", negative_log_likelihood)
    [metrics] = {m["loss"] for m in (f["metrics"] for f in results) if m}
    assert metrics == pytest.approx(loss.item(), rel=1e-5)
    assert_gradients(results, reference_gradients(model, loss, runs.folder / f"sft-{layout}"))


def dpo_by_torch(new: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
    """cDPO of one pair."""
    h = DPO["beta"] * ((new[0] - old[0]).sum() - (new[1] - old[1]).sum())
    return -(1 - DPO["label_smoothing"]) * logsigmoid(h) - DPO["label_smoothing"] * logsigmoid(-h)


def orpo_by_torch(new: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
    odds = [p.mean().exp() / (1 - p.mean().exp()) for p in new]
    return -new[0].mean() - ORPO["lam"] * logsigmoid((odds[0] / odds[1]).log())


LOSSES = {"dpo": (DPO, dpo_by_torch), "orpo": (ORPO, orpo_by_torch)}


@pytest.mark.parametrize("layout", EACH)
@pytest.mark.parametrize("name", LOSSES)
def test_preference_loss_and_gradients_equal_torch_on_transformers(runs, name, layout):
    settings, by_torch = LOSSES[name]
    model, pairs = tiny_models.build("qwen3"), runs.pairs
    masks = [mask_of(pairs, row) for row in range(len(pairs))]
    new = [log_probs_of(model, pairs, row)[mask] for row, mask in enumerate(masks)]
    old = [
        torch.from_numpy(column.copy()).double()[mask]
        for column, mask in zip(pairs.jagged("reference_log_probs"), masks, strict=True)
    ]
    expected = [by_torch(new[i : i + 2], old[i : i + 2]) for i in range(0, len(new), 2)]
    batch = runs.scored(pairs, layout, "language_model", "log_probs")
    losses = PREFERENCE_LOSSES.bind(name, settings)(build_pair_inputs(batch))
    np.testing.assert_allclose(losses.loss, [w.item() for w in expected], rtol=1e-4)
    batch = batch.with_columns(loss_weights=compute_pair_weights(batch, losses))
    results = runs.gradients(batch, layout, "language_model")
    loss = torch.stack(expected).mean()
    assert_gradients(results, reference_gradients(model, loss, runs.folder / f"{name}-{layout}"))


def reward_batch(runs: Runs, layout: str) -> tuple[Batch, Any]:
    pairs = runs.scored(build_scoring_batch(runs.pairs), layout, "reward_model", "values")
    pairs = pairs.select("prompt_ids", "response_ids", "response_mask", "values")
    values = pairs.jagged("values").values.astype(np.float64)
    losses = bradley_terry(values[::2], values[1::2], np.full(len(pairs) // 2, MARGIN))
    return pairs.with_columns(loss_weights=compute_pair_weights(pairs, losses)), losses


@pytest.mark.parametrize("layout", EACH)
def test_reward_scores_loss_and_gradients_equal_transformers(runs, layout):
    model = reward_model()
    expected = torch.cat(
        [model(ids_of(runs.pairs, row)).logits[0] for row in range(len(runs.pairs))]
    ).double()
    loss = -logsigmoid(expected[::2] - expected[1::2] - MARGIN).mean()
    batch, losses = reward_batch(runs, layout)
    np.testing.assert_allclose(batch.jagged("values").values, expected.detach(), atol=1e-5)
    assert losses.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    results = runs.gradients(batch, layout, "reward_model")
    assert_gradients(results, reference_gradients(model, loss, runs.folder / f"rm-{layout}"))


@pytest.mark.parametrize("start", ["language_model", "reward_model"])
def test_transformers_loads_a_trained_reward_model_and_gives_the_same_scores(runs, start):
    batch, _ = reward_batch(runs, "pp2")
    folder = runs.folder / f"trained-{start}"
    by_rank = exported(runs.paths[start], LAYOUTS["pp2"], batch, folder)
    scores_by_row = {row: score for result in by_rank for row, score in result.items()}
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.config.num_labels, model.score.weight.shape[0]) == (1, 1)
    with torch.no_grad():
        for row in range(len(batch)):
            score = model.eval()(ids_of(runs.pairs, row)).logits.item()
            assert scores_by_row[row] == pytest.approx(score, abs=1e-5)
    assert min(map(abs, scores_by_row.values())) > 0
