"""Indexers of sparse attention: the keys they pick, and the loss that trains them.

The oracle of the loss is plain torch on transformers, whose indexers have no gradients: the scores
are computed again by the definition (DeepSeek-V3.2-Exp report, equation 1), and their distribution
over the picked keys follows that of the attention, summed over heads (equation 4).
"""

from __future__ import annotations

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
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from tests.nightly import all_but

NAMES = ("deepseek_v32", "glm_moe_dsa")
COEF = 0.7
ALL_KEYS = 64  # more than any sequence has
LAYOUTS = {
    "one": Layout(),
    "tp2 ep2": Layout(tp=2, ep=2),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2, first_stage_layers=1),
    "tp2 cp2": Layout(tp=2, cp=2),
}


@ranks.on_ranks()
def train(path: Path, layout: Layout, batch: Batch, coef: float) -> ranks.Result:
    """Gradients of the first step by name, and the weights after two steps."""
    engine = ranks.started_with(path, layout, {"indexer_loss_coef": coef})
    mine = batch.take(ranks.share_of(engine, batch))
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(mine, ranks.LOSS, forward_only=False)
    gradients = ranks.gradients(engine)
    steps = [engine.train_batch(mine, ranks.LOSS) for _ in range(2)]
    return {
        "gradients": gradients, "steps": steps, "trained": dict(engine.get_per_tensor_param())
    }  # fmt: skip


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


def reference(path: Path, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The indexers' loss, a mean over all tokens and layers, and its gradients."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    loss = IndexerLoss(model)
    for prompt, response in zip(
        batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True
    ):
        model(torch.from_numpy(np.concatenate([prompt, response]))[None], use_cache=False)
    mean = loss.total / float(batch.num_tokens.sum())
    (COEF * mean).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if ".indexer." in n}
    return mean.item() / len(model.model.layers), gradients


class Runs:
    def __init__(self, folder: Path) -> None:
        # No query has two keys whose scores differ by less than 5e-5 where the picks end.
        self.batch = tiny_models.make_batch(num_samples=7, seed=2)
        names = {name: name for name in NAMES} | {"all keys": NAMES[0]}
        configs = {key: tiny_families.cases()[name].config for key, name in names.items()}
        configs["all keys"].index_topk = ALL_KEYS
        self.models = {n: tiny_models.build_from(config) for n, config in configs.items()}
        self.paths = {n: tiny_families.save(model, folder / n) for n, model in self.models.items()}

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
    loss, expected = reference(runs.paths[name], runs.batch)
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
    [result] = ranks.parity(runs.paths["all keys"], Layout(), runs.batch)
    expected = torch.from_numpy(reference)
    torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-5)
    sparse, _, _ = tiny_models.reference_scores(runs.models["deepseek_v32"], runs.batch)
    assert np.abs(reference - sparse).max() > 0.1  # which the other models do not have
