"""Indexers of sparse attention: the keys they pick, replay of them, and the loss that trains them.

The oracle of the loss is plain torch on transformers, whose indexers have no gradients: the scores
are computed again by the definition (DeepSeek-V3.2-Exp report, equation 1), and their distribution
over the picked keys follows that of the attention, summed over heads (equation 4).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_families
import tiny_models
import torch
import torch.nn.functional as F
import transformers
from megatron.core import parallel_state
from moe_reference import last_stages
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import PICKED_KEYS, Batch, Jagged
from tests.nightly import all_but

NAMES = ("deepseek_v32", "glm_moe_dsa")
COEF = 0.7
WIDE = {"max_logprob_gap": math.inf, "mean_logprob_gap": math.inf}
ALL_KEYS = 64  # more than any sequence has
FULL = {"recompute.granularity": "full"}
REPLAYS = all_but(
    [("none", "one"), ("full", "one"), ("none", "tp2 ep2")],
    [(recompute, layout) for recompute in ("none", "full") for layout in
     ("one", "tp2 ep2", "dp2", "pp2")],
)  # fmt: skip
LAYOUTS = {
    "one": Layout(),
    "tp2 ep2": Layout(tp=2, ep=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "tp2 cp2": Layout(tp=2, cp=2),
}


@ranks.spawn_on_ranks()
def train(path: Path, layout: Layout, batch: Batch, coef: float) -> ranks.Result:
    """Gradients of the first step by name, and the weights after two steps."""
    engine = ranks.start_engine_with(path, layout, {"indexer_loss_coef": coef})
    share = batch.take(ranks.list_rows(engine, batch))
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(share, ranks.LOSS, forward_only=False)
    gradients = ranks.read_gradients(engine)
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {
        "gradients": gradients, "steps": steps, "trained": dict(engine.get_per_tensor_param())
    }  # fmt: skip


@ranks.spawn_on_ranks()
def replay(path: Path, layout: Layout, batch: Batch, settings: ranks.Settings) -> ranks.Result:
    """A log-prob pass that records keys, and two steps with those or with the keys of the batch."""
    record = {"indexer_replay": "record", "indexer_loss_coef": COEF}
    engine = ranks.start_engine_with(path, layout, {**settings, **record})
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    box = [engine.infer_batch(share.drop_columns(PICKED_KEYS))]
    group = parallel_state.get_pipeline_model_parallel_group()
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast_object_list(box, src=last, group=group)
    [scored] = box
    assert scored is not None
    keys = scored.jagged(PICKED_KEYS)
    if PICKED_KEYS not in share:
        share = share.with_columns(**{PICKED_KEYS: keys})
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(share, ranks.LOSS, forward_only=False)
    gradients = ranks.read_gradients(engine)
    step = engine.train_batch_with_scores(share, ranks.LOSS, bounds=WIDE)
    result: ranks.Result = {
        "rows": rows,
        "log_probs": [torch.from_numpy(row.copy()) for row in scored.jagged("log_probs")],
        "keys": [torch.from_numpy(row.copy()) for row in keys],
        "gradients": gradients,
        "steps": [step.metrics, engine.train_batch(share, ranks.LOSS)],
    }
    if step.scores is not None:
        log_probs = step.scores.jagged("log_probs")
        result["replayed_log_probs"] = [torch.from_numpy(row.copy()) for row in log_probs]
    return result


@ranks.spawn_on_ranks()
def train_on_wrong_keys(path: Path, layout: Layout, batch: Batch) -> list[str]:
    """Return the errors of batches without keys, with keys of another model, and with late ones."""
    engine = ranks.start_engine_with(path, layout, {"indexer_replay": "record"})
    keys = batch.jagged(PICKED_KEYS)
    late = keys.values.copy()
    late[3, 1, 0] = 4
    columns = None, keys.with_values(keys.values[:, :2]), keys.with_values(late)
    messages = []
    for column in columns:
        changed = batch.drop_columns(PICKED_KEYS)
        if column is not None:
            changed = changed.with_columns(**{PICKED_KEYS: column})
        with pytest.raises(RuntimeError) as error:
            engine.train_batch(changed, ranks.LOSS)
        messages.append(str(error.value))
    return messages


class IndexerLoss:
    """Sums the loss of all indexers of a model of transformers over its forward calls."""

    def __init__(self, model: Any) -> None:
        self.total = torch.zeros(())
        self._inputs: dict[int, tuple[torch.Tensor, ...]] = {}
        for number, layer in enumerate(model.model.layers):
            indexer = layer.self_attn.indexer
            indexer.register_forward_pre_hook(self._keep(number))
            layer.self_attn.register_forward_hook(self._add(number, indexer))
        is_glm = model.config.model_type == "glm_moe_dsa"
        self._rotate = apply_rotary_pos_emb_interleave if is_glm else apply_rotary_pos_emb

    def _keep(self, number: int) -> Any:
        def keep(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            self._inputs[number] = inputs

        return keep

    def _add(self, number: int, indexer: Any) -> Any:
        def add(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
            hidden, latent, (cos, sin), *_ = self._inputs[number]
            target = output[1].detach()[0].double().sum(0)  # [queries, keys], 0 where not picked
            target = target / target.sum(-1, keepdim=True)
            scores = self._score(indexer, hidden[0].detach(), latent[0].detach(), cos, sin).double()
            log_probs = scores.masked_fill(target == 0, float("-inf")).log_softmax(-1)
            picked = target > 0
            terms = target[picked] * (target[picked].log() - log_probs[picked])
            self.total = self.total + terms.sum()

        return add

    def _score(
        self, indexer: Any, hidden: torch.Tensor, latent: torch.Tensor, cos: Any, sin: Any
    ) -> torch.Tensor:
        """[queries, keys] I = sum over heads of w * relu(q k)."""
        heads, dim, rotary = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
        q = (latent @ indexer.wq_b.weight.T).view(1, len(latent), heads, dim)
        norm = indexer.k_norm
        k = F.layer_norm(hidden @ indexer.wk.weight.T, (dim,), norm.weight, norm.bias, norm.eps)
        k = k.view(1, len(hidden), 1, dim)
        q_rotated, k_rotated = self._rotate(
            q[..., :rotary], k[..., :rotary], cos, sin, unsqueeze_dim=2
        )
        q = torch.cat([q_rotated, q[..., rotary:]], -1)[0]
        k = torch.cat([k_rotated, k[..., rotary:]], -1)[0, :, 0]
        weights = hidden @ indexer.weights_proj.weight.T * heads**-0.5 * dim**-0.5
        return torch.einsum("qh,qhk->qk", weights, torch.einsum("qhd,kd->qhk", q, k).relu())


class Picks:
    """Keys that the indexers of a model of transformers pick in a call, or are made to pick.

    Attributes:
        forced: [tokens, layers, k] As the column of a batch, of the sequence of the next call.
        picked: By layer, [tokens, k].
    """

    def __init__(self, model: Any) -> None:
        self.forced: torch.Tensor | None = None
        self.picked: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.indexer.register_forward_hook(self._replace(number))

    def _replace(self, number: int) -> Any:
        def replace(_: Any, __: Any, picked: torch.Tensor) -> torch.Tensor:
            if self.forced is not None:
                forced = self.forced[:, number]
                picked = torch.where(forced < 0, forced.amax(-1, keepdim=True), forced)[None]
            self.picked[number] = picked[0]
            return picked

        return replace


def reference(path: Path, batch: Batch) -> tuple[float, dict[str, torch.Tensor], Any]:
    """The indexers' loss, a mean over all tokens and layers, its gradients, and log-probs.

    With the keys of the batch, if it has any.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    loss, picks, log_probs = IndexerLoss(model), Picks(model), []
    for row, (prompt, response) in enumerate(
        zip(batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True)
    ):
        if PICKED_KEYS in batch:
            picks.forced = torch.from_numpy(batch.jagged(PICKED_KEYS)[row].astype(np.int64))
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        scores = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_probs.append(scores.detach().gather(1, ids[len(prompt) :, None])[:, 0])
    mean = loss.total / float(batch.num_tokens.sum())
    (COEF * mean).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if ".indexer." in n}
    return mean.item() / len(model.model.layers), gradients, log_probs


def draw_keys(batch: Batch, num_layers: int, topk: int) -> Batch:
    """Return the batch with keys of each token drawn from those up to its own."""
    rng = np.random.default_rng(3)
    positions = np.concatenate([np.arange(n) for n in batch.num_tokens])
    keys = np.full((len(positions), num_layers, topk), -1, dtype=np.int32)
    for token, position in enumerate(positions):
        for layer in range(num_layers):
            drawn = rng.permutation(position + 1)[:topk]
            keys[token, layer, : len(drawn)] = drawn
    offsets = np.concatenate([[0], np.cumsum(batch.num_tokens)])
    return batch.with_columns(**{PICKED_KEYS: Jagged(keys, offsets)})


class Runs:
    def __init__(self, folder: Path) -> None:
        # No query has two keys whose scores differ by less than 5e-5 where the picks end.
        self.batch = tiny_models.make_batch(num_samples=7, seed=2)
        masks = self.batch.jagged("response_mask")
        self.batch = self.batch.with_columns(  # train_batch_with_scores compares these
            rollout_log_probs=self.batch.jagged("log_probs"), gap_mask=masks
        )
        names = {name: name for name in NAMES} | {"all keys": NAMES[0]}
        configs = {key: tiny_families.cases()[name].config for key, name in names.items()}
        configs["all keys"].index_topk = ALL_KEYS
        self.models = {n: tiny_models.build_from(config) for n, config in configs.items()}
        self.paths = {n: tiny_families.save(model, folder / n) for n, model in self.models.items()}
        config = configs["deepseek_v32"]
        self.drawn = draw_keys(self.batch, config.num_hidden_layers, config.index_topk)

    def replay(self, batch: Batch, name: str, layout: str) -> list[ranks.Result]:
        settings = FULL if name == "full" else {}
        return replay(self.paths["deepseek_v32"], LAYOUTS[layout], batch, settings)

    def train(self, name: str, layout: str, coef: float = COEF) -> list[ranks.Result]:
        return train(self.paths[name], LAYOUTS[layout], self.batch, coef)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize(
    ("name", "layout"),
    all_but(
        [("deepseek_v32", "one"), ("glm_moe_dsa", "one"), ("deepseek_v32", "tp2 ep2"),
         ("deepseek_v32", "cp2")],
        [(name, layout) for name in NAMES for layout in LAYOUTS],
    ),
)  # fmt: skip
def test_loss_and_gradients_of_the_indexers_equal_plain_torch_on_transformers(runs, name, layout):
    loss, expected, _ = reference(runs.paths[name], runs.batch)
    by_rank = runs.train(name, layout)
    losses = [r["steps"][0]["indexer_loss"] for r in by_rank if "loss" in r["steps"][0]]
    assert losses and losses == pytest.approx([loss] * len(losses), rel=1e-5)
    actual = by_rank[0]["gradients"]
    assert len(expected) == 15
    for key, gradient in expected.items():
        assert gradient.norm() > 0, key
        assert (actual[key] - gradient).norm() <= 1e-4 * gradient.norm(), key


def test_the_loss_of_the_indexers_changes_no_other_gradient(runs):
    with_loss, without = (runs.train("deepseek_v32", "one", coef)[0] for coef in (COEF, 0.0))
    for key, gradient in without["gradients"].items():
        if ".indexer." not in key:
            assert torch.equal(with_loss["gradients"][key], gradient), key


def test_frozen_indexers_keep_their_weights_and_trained_ones_do_not(runs):
    original = runs.models["deepseek_v32"].state_dict()
    for coef in (COEF, 0.0):
        trained = runs.train("deepseek_v32", "one", coef)[0]["trained"]
        for key in (key for key in trained if ".indexer." in key):
            assert torch.equal(trained[key], original[key]) == (coef == 0), key


def test_a_top_k_above_every_length_is_full_attention(runs):
    reference, _, _ = tiny_models.reference_scores(runs.models["all keys"], runs.batch)
    [result] = ranks.run_parity(runs.paths["all keys"], Layout(), runs.batch)
    expected = torch.from_numpy(reference)
    torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-5)
    sparse, _, _ = tiny_models.reference_scores(runs.models["deepseek_v32"], runs.batch)
    assert np.abs(reference - sparse).max() > 0.1  # which the other models do not have


@pytest.mark.parametrize(("recompute", "layout"), REPLAYS)
def test_recorded_keys_are_those_of_transformers(runs, recompute, layout):
    model, batch = runs.models["deepseek_v32"], runs.batch
    picks = Picks(model)
    expected = []
    for prompt, response in zip(
        batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True
    ):
        with torch.no_grad():
            model(torch.from_numpy(np.concatenate([prompt, response]))[None], use_cache=False)
        expected.append(dict(picks.picked))
    rows = set()
    for result in runs.replay(batch, recompute, layout):
        for row, keys in zip(result["rows"], result["keys"], strict=True):
            rows.add(row)
            for layer, picked in expected[row].items():
                for position in range(len(keys)):
                    recorded = keys[position, layer]
                    names = [key for key in picked[position].tolist() if key <= position]
                    assert sorted(recorded[recorded >= 0].tolist()) == sorted(set(names))
    assert rows == set(range(len(batch)))


@pytest.mark.parametrize(("recompute", "layout"), REPLAYS)
def test_replay_of_recorded_keys_changes_no_log_prob(runs, recompute, layout):
    results = last_stages(runs.replay(runs.batch, recompute, layout), LAYOUTS[layout])
    for result in results:
        for actual, expected in zip(result["replayed_log_probs"], result["log_probs"], strict=True):
            assert (actual - expected).abs().max() < 2e-6


@pytest.mark.parametrize(("recompute", "layout"), REPLAYS)
def test_other_keys_give_what_transformers_gives_with_those_keys(runs, recompute, layout):
    loss, gradients, log_probs = reference(runs.paths["deepseek_v32"], runs.drawn)
    by_rank = runs.replay(runs.drawn, recompute, layout)
    for result in last_stages(by_rank, LAYOUTS[layout]):
        for row, actual in zip(result["rows"], result["replayed_log_probs"], strict=True):
            assert (actual - log_probs[row]).abs().max() < 1e-5
        free, replayed = (torch.cat(result[name]) for name in ("log_probs", "replayed_log_probs"))
        assert (free - replayed).abs().max() > 1e-2  # of the indexers' own keys
        assert result["steps"][0]["indexer_loss"] == pytest.approx(loss, rel=1e-5)
    for key, gradient in gradients.items():
        difference = (by_rank[0]["gradients"][key] - gradient).norm()
        assert difference <= 1e-4 * gradient.norm(), key
    [one_rank] = runs.replay(runs.drawn, "none", "one")
    for result in last_stages(by_rank, LAYOUTS[layout]):
        for actual, expected in zip(result["steps"], one_rank["steps"], strict=True):
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
            # Its two parts cancel in the first step.
            assert actual["loss"] == pytest.approx(expected["loss"], rel=2e-6, abs=1e-6)


def test_keys_that_no_pass_recorded_are_refused(runs):
    [messages] = train_on_wrong_keys(runs.paths["deepseek_v32"], Layout(), runs.drawn)
    missing, shape, late = messages
    assert "has no column 'picked_keys', which indexer_replay='record' takes" in missing
    assert "has int32 (2, 10) per token; the model needs integers [layers, index_topk]" in shape
    assert "allowed: -1 to that position" in late
