"""Heads at every layout: scores over a split vocabulary, and value models against transformers.

Long because: both kinds of head are compared on the same models, batches and layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_models
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from mcore_rl.algorithms.inputs import LossInputs, LossResult
from mcore_rl.algorithms.losses import ValueClipSettings, value_clip
from mcore_rl.checkpoint.hf_writer import write_checkpoint
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.megatron.engine import ValueEngine
from mcore_rl.parallel.store import join_world

# (tokens, vocabulary, rows a rank): padding on the last rank, a rank of padding alone, no tokens.
SPLITS = {"odd": (13, 131, 66), "padding": (13, 3, 4), "nothing": (0, 131, 66)}
CHUNKS = {"tiles": 8 * 5 * 256, "whole": 1 << 20}
ONE_RANK = {"tp1": Layout()}
LAYOUTS = {
    "qwen3": ONE_RANK | {"tp2": Layout(tp=2), "pp2": Layout(pp=2)},
    "qwen3_moe": ONE_RANK
    | {
        "tp2": Layout(tp=2),
        "dp2": Layout(dp=2),
        "cp2": Layout(cp=2),
        "pp2": Layout(pp=2),
        "tp2ep2": Layout(tp=2, ep=2),
    },
}
CASES = [(model, name) for model, layouts in LAYOUTS.items() for name in layouts]
PARALLEL = [(model, name) for model, name in CASES if name != "tp1"]


def split_problem(tokens: int, vocab: int, hidden: int = 7) -> tuple[torch.Tensor, ...]:
    """(hidden states, whole head, targets, weights of log-probs and entropies), in float64."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return h, w, targets, weights


@ranks.spawn_on_ranks(2)
def split_scores(tokens: int, vocab: int, rows: int, chunk_bytes: int) -> ranks.Result:
    """Scores with `rows` rows of the head on each rank, and their gradients put together."""
    from mcore_rl.engine.logprob import VocabShard, compute_log_probs

    if not dist.is_initialized():
        join_world("gloo", timeout_s=60.0)
    h, w, targets, weights = split_problem(tokens, vocab)
    start = dist.get_rank() * rows
    shard = torch.full((rows, w.shape[1]), 1e3, dtype=w.dtype)  # padding that must not be seen
    head_rows = w[start : start + rows]
    shard[: len(head_rows)] = head_rows
    h.requires_grad_()
    shard.requires_grad_()
    scores = compute_log_probs(
        h, shard, targets, VocabShard(start, vocab, dist.group.WORLD),
        temperature=0.7, chunk_bytes=chunk_bytes, with_entropy=True, with_squares=True,
        num_top=min(3, vocab),
    )  # fmt: skip
    loss = (scores.log_probs * weights[0] + scores.entropy * weights[1]).sum()
    grad_h, grad_shard = torch.autograd.grad(loss, (h, shard))
    dist.all_reduce(grad_h)
    shards = [torch.empty_like(grad_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, grad_shard)
    return {
        "log_probs": scores.log_probs.detach(),
        "entropy": scores.entropy.detach(),
        "squares": scores.sum_pi_squared,
        "top_log_probs": scores.top_log_probs,
        "top_ids": scores.top_ids,
        "grad_hidden": grad_h,
        "grad_head": torch.cat(shards),
    }


@ranks.spawn_on_ranks()
def top_log_probs(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """By row of the batch, of each response token: the three likeliest ids, their log-probs, and
    the sum of all squared probabilities."""
    spec = replace(
        ranks.build_engine_spec(path, layout), num_top_log_probs=3, with_sum_pi_squared=True
    )
    engine = ranks.start_engine(spec)
    rows = ranks.list_rows(engine, batch)
    scored = engine.infer_batch(batch.take(rows), temperature=0.7)
    if scored is None:
        return {}
    columns = {n: scored.jagged(n) for n in ("top_log_probs", "top_ids", "sum_pi_squared")}
    return {
        name: {row: torch.from_numpy(c[place].copy()) for place, row in enumerate(rows)}
        for name, c in columns.items()
    }


def value_loss(inputs: LossInputs) -> LossResult:
    return value_clip(inputs, ValueClipSettings(clip_range=0.3))


def value_engine(path: Path, layout: Layout, dtype: str = "float32", lora: int = 0) -> ValueEngine:
    spec = ranks.build_engine_spec(path, layout, dtype)
    spec.engine.lora.rank = lora
    # Adam divides by the size of a gradient: without a floor it blows the rounding of one that is
    # nearly zero up to a whole step, and the loss of the second step shows it.
    spec.engine.optimizer.eps = 1e-5
    return ranks.start_engine(spec, ValueEngine)


def values_of(engine: ValueEngine, batch: Batch, rows: list[int]) -> dict[int, torch.Tensor]:
    """By row of the batch; empty on pipeline stages without the head."""
    scored = engine.infer_batch(batch.take(rows).select("prompt_ids", "response_ids"))
    if scored is None:
        return {}
    assert scored.jagged("values").values.dtype == np.float32
    columns = scored.jagged("values")
    return {row: torch.from_numpy(columns[place].copy()) for place, row in enumerate(rows)}


@ranks.spawn_on_ranks()
def value_training(
    path: Path, layout: Layout, batch: Batch, dtype: str = "float32", lora: int = 0
) -> ranks.Result:
    """Values and export before, and both after two optimizer steps on the batch."""
    engine = value_engine(path, layout, dtype, lora)
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    return {
        "values": values_of(engine, batch, rows),
        "exported": dict(engine.get_per_tensor_param()),
        "steps": [engine.train_batch(share, value_loss) for _ in range(2)],
        "values_after": values_of(engine, batch, rows),
        "trained": dict(engine.get_per_tensor_param()),
    }


@ranks.spawn_on_ranks()
def value_export(path: Path, layout: Layout, batch: Batch, folder: Path) -> ranks.Result:
    """Two steps from a language model's checkpoint, then an export and a training checkpoint."""
    engine = value_engine(path, layout)
    rows = ranks.list_rows(engine, batch)
    before = values_of(engine, batch, rows)
    for _ in range(2):
        engine.train_batch(batch.take(rows), value_loss)
    after = values_of(engine, batch, rows)
    tensors = engine.get_per_tensor_param()
    if engine.is_main_rank:
        write_checkpoint(
            folder / "export", tensors, reference=path, config_changes=engine.config_changes
        )
    else:
        list(tensors)
    engine.save_checkpoint(folder / "training")
    other = value_engine(path, layout)
    other.load_checkpoint(folder / "training")
    dist.barrier()
    again = value_engine(folder / "export", layout)
    return {
        "before": before,
        "after": after,
        "resumed": values_of(other, batch, rows),
        "loaded": values_of(again, batch, rows),
        "next": [e.train_batch(batch.take(rows), value_loss) for e in (engine, other)],
    }


@dataclass(frozen=True)
class Runs:
    batch: Batch
    checkpoints: dict[str, Path]
    folder: Path

    def trained(self, model: str, layout: str, *settings: Any) -> list[ranks.Result]:
        parallel_layout = LAYOUTS[model][layout]
        return value_training(self.checkpoints[model], parallel_layout, self.batch, *settings)

    def top(self, layout: str) -> list[ranks.Result]:
        parallel_layout = LAYOUTS["qwen3_moe"][layout]
        return top_log_probs(self.checkpoints["language"], parallel_layout, self.batch)

    def exported(self) -> list[ranks.Result]:
        return value_export(self.checkpoints["language"], Layout(tp=2), self.batch, self.folder)


def build(name: str) -> transformers.PreTrainedModel:
    """A value model by transformers, with weights far from the tame initial ones."""
    config = tiny_models.configs()[name]
    config.num_labels = 1
    torch.manual_seed(1)
    model = transformers.AutoModelForTokenClassification.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            elif "norm" in key:
                parameter.uniform_(0.7, 1.3)
            elif key.startswith("score"):
                parameter.fill_(0.25)
    return model


def make_batch() -> Batch:
    batch = tiny_models.make_batch()
    rng = np.random.default_rng(5)
    lengths = batch.jagged("response_ids").lengths
    columns = {n: Jagged.pack([rng.normal(0, 0.5, k) for k in lengths], np.float32) for n in "vr"}
    return batch.select("prompt_ids", "response_ids", "loss_weights").with_columns(
        values=columns["v"], returns=columns["r"]
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("heads")
    checkpoints = {name: folder / name for name in LAYOUTS}
    for name, path in checkpoints.items():
        build(name).save_pretrained(path)
    checkpoints["language"] = tiny_models.save("qwen3", folder)
    return Runs(make_batch(), checkpoints, folder)


def join_rows(by_rank: list[dict[str, Any]], name: str) -> list[torch.Tensor]:
    """A column of the whole batch; ranks that have the same row must agree bit for bit."""
    values_by_row: dict[int, torch.Tensor] = {}
    for result in by_rank:
        for row, values in result.get(name, {}).items():
            assert torch.equal(values_by_row.setdefault(row, values), values)
    return [values_by_row[row] for row in range(len(values_by_row))]


def logits_by_row(model: Any, batch: Batch) -> list[torch.Tensor]:
    """The outputs of a transformers model at the states before each response token."""
    outputs = []
    for prompt, response in zip(
        batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True
    ):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        outputs.append(model(ids).logits[0, len(prompt) - 1 : -1])
    return outputs


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("split", SPLITS)
def test_scores_over_two_ranks_equal_the_plain_softmax(split, chunk):
    tokens, vocab, rows = SPLITS[split]
    h, w, targets, weights = split_problem(tokens, vocab)
    h.requires_grad_()
    w.requires_grad_()
    scores = (h @ w.t() / 0.7).log_softmax(-1)
    log_probs = scores.gather(1, targets[:, None]).squeeze(1)
    entropy = -(scores.exp() * scores).sum(-1)
    loss = (log_probs * weights[0] + entropy * weights[1]).sum()
    grad_h, grad_w = torch.autograd.grad(loss, (h, w))
    top = scores.detach().topk(min(3, vocab))
    for actual in split_scores(tokens, vocab, rows, CHUNKS[chunk]):
        torch.testing.assert_close(actual["log_probs"], log_probs.detach())
        torch.testing.assert_close(actual["entropy"], entropy.detach())
        torch.testing.assert_close(actual["squares"], scores.detach().exp().square().sum(-1))
        assert not actual["squares"].requires_grad
        torch.testing.assert_close(actual["top_log_probs"], top.values)
        assert torch.equal(actual["top_ids"], top.indices)
        torch.testing.assert_close(actual["grad_hidden"], grad_h)
        torch.testing.assert_close(actual["grad_head"][:vocab], grad_w)
        assert actual["grad_head"].shape == (2 * rows, w.shape[1])
        assert not actual["grad_head"][vocab:].any()


@pytest.mark.parametrize("layout", ["tp1", "tp2", "cp2", "pp2"])
def test_the_likeliest_tokens_and_the_squared_probabilities_equal_transformers(runs, layout):
    with torch.no_grad():
        logits = logits_by_row(tiny_models.build("qwen3"), runs.batch)
    results = runs.top(layout)
    log_probs, ids = join_rows(results, "top_log_probs"), join_rows(results, "top_ids")
    squares = join_rows(results, "sum_pi_squared")
    for row, scores in enumerate(logits):
        scores = (scores.double() / 0.7).log_softmax(-1)
        expected = scores.topk(3)
        squared = scores.exp().square().sum(-1)
        torch.testing.assert_close(squares[row].double(), squared, rtol=1e-4, atol=0)
        assert torch.equal(ids[row], expected.indices)
        torch.testing.assert_close(log_probs[row].double(), expected.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_values_equal_transformers(runs, model, layout):
    with torch.no_grad():
        expected = logits_by_row(build(model), runs.batch)
    actual = join_rows(runs.trained(model, layout), "values")
    for values, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(values, reference.squeeze(-1), rtol=0, atol=1e-5)
    assert torch.cat(actual).std() > 0.1


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_export_gives_back_each_tensor_of_a_value_model_bit_for_bit(runs, model, layout):
    original = load_file(runs.checkpoints[model] / "model.safetensors")
    first, *other_ranks = runs.trained(model, layout)
    assert first["exported"].keys() == original.keys()
    assert {"score.weight", "score.bias"} < original.keys()
    for name, tensor in original.items():
        assert torch.equal(first["exported"][name], tensor), name
    assert all(result["exported"] == {} for result in other_ranks)


@pytest.mark.parametrize(("model", "layout"), PARALLEL)
def test_two_steps_of_a_value_model_equal_one_rank(runs, model, layout):
    assert_same_training(runs.trained(model, layout), runs.trained(model, "tp1")[0])


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_with_adapters_the_value_head_is_still_trained(runs, layout):
    reference = runs.trained("qwen3", "tp1", "float32", 4)[0]
    assert_same_training(runs.trained("qwen3", layout, "float32", 4), reference)
    changed = {
        n for n, t in reference["exported"].items() if not torch.equal(t, reference["trained"][n])
    }
    assert {"score.weight", "score.bias"} < changed
    assert "model.embed_tokens.weight" not in changed


def assert_same_training(by_rank: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert any("loss" in result["steps"][0] for result in by_rank)
    for result in by_rank:
        for step, expected in zip(result["steps"], reference["steps"], strict=True):
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            if "loss" in step:
                assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
                assert step["value_clipped"] == pytest.approx(expected["value_clipped"], rel=1e-6)
    for name, tensor in reference["trained"].items():
        torch.testing.assert_close(by_rank[0]["trained"][name], tensor, rtol=0, atol=2e-6, msg=name)


def test_the_first_step_equals_a_plain_torch_step_on_transformers(runs):
    """Loss, gradient norm and the share of clipped values, by autograd through transformers."""
    model = build("qwen3_moe")
    total, clipped = torch.zeros((), dtype=torch.float64), 0.0
    for row, logits in enumerate(logits_by_row(model, runs.batch)):
        old, target, weights = (
            torch.from_numpy(runs.batch.jagged(n)[row].copy()).double()
            for n in ("values", "returns", "loss_weights")
        )
        values = logits.squeeze(-1).double()
        free = (values - target) ** 2
        held = (torch.minimum(torch.maximum(values, old - 0.3), old + 0.3) - target) ** 2
        total = total + (weights * torch.maximum(free, held) / 2).sum()
        clipped += float((weights * (held > free)).sum())
    total.backward()
    squares = sum(
        float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None
    )
    step = runs.trained("qwen3_moe", "tp1")[0]["steps"][0]
    assert step["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(squares**0.5, rel=1e-4)
    assert step["value_clipped"] == pytest.approx(clipped, rel=1e-5)
    assert 0.05 < clipped < 0.95


def test_the_steps_do_train_the_value_head(runs):
    """Guards the tests above: two steps at this rate move weights far beyond their tolerance."""
    result = runs.trained("qwen3_moe", "tp1")[0]
    for name in ("score.weight", "score.bias", "model.layers.0.self_attn.q_proj.weight"):
        assert (result["trained"][name] - result["exported"][name]).abs().max() > 5e-4, name


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_bfloat16_values_stay_close_to_float32(runs, layout):
    exact = torch.cat(join_rows(runs.trained("qwen3_moe", "tp1"), "values"))
    actual = torch.cat(join_rows(runs.trained("qwen3_moe", layout, "bfloat16"), "values"))
    assert (actual - exact).abs().mean() < 0.02 * exact.std()
    # Sums in float32: a value is not one of the few numbers that bfloat16 has.
    assert not torch.equal(actual, actual.bfloat16().float())


def test_a_value_model_that_starts_from_a_language_model_begins_at_zero(runs):
    for result in runs.exported():
        assert all(not values.any() for values in result["before"].values())


def test_transformers_loads_an_exported_value_model_and_gives_the_same_values(runs):
    actual = join_rows(runs.exported(), "after")
    model, report = transformers.AutoModelForTokenClassification.from_pretrained(
        runs.folder / "export", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_labels == 1
    with torch.no_grad():
        expected = logits_by_row(model.eval(), runs.batch)
    for values, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(values, reference.squeeze(-1), rtol=0, atol=1e-5)
    assert torch.cat(actual).abs().min() > 0


def test_an_exported_value_model_and_a_resumed_one_have_the_same_values(runs):
    for result in runs.exported():
        for name in ("loaded", "resumed"):
            assert all(torch.equal(result[name][row], v) for row, v in result["after"].items())
        trained, resumed = result["next"]
        assert trained == resumed
