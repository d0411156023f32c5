"""The engine of examples/hf_engine.py equals plain torch, and the Megatron engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ranks
import tiny_models
import torch
import torch_reference
import transformers
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import create_engine
from mcore_rl.parallel.mesh import Mesh

BACKEND = f"{Path(__file__).parents[2] / 'examples/hf_engine.py'}:BACKEND"
NAMES = ("qwen3", "qwen3_moe", "gpt_oss")
SCORES = ("log_probs", "entropy")
EPSILON, TEMPERATURE = torch_reference.EPSILON, 0.7


@ranks.spawn_on_ranks()
def run_steps(path: Path, layout: Layout, batch: Batch, backend: str) -> ranks.Result:
    """Score the batch and take two steps."""
    spec = ranks.build_engine_spec(path, layout)
    # A large epsilon: else the rounding of gradients near 0 decides the sign of Adam's step.
    optimizer = replace(spec.engine.optimizer, eps=EPSILON)
    spec = replace(spec, engine=replace(spec.engine, backend=backend, optimizer=optimizer))
    engine = ranks.start_engine(spec, lambda spec: create_engine("language_model", spec))
    engine.mesh = Mesh(layout)
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    scored = engine.infer_batch(share, temperature=TEMPERATURE)
    scores = {
        name: dict(
            zip(rows, [torch.from_numpy(r.copy()) for r in scored.jagged(name)], strict=True)
        )
        for name in SCORES
    }
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return scores | {"steps": steps, "trained": dict(engine.get_per_tensor_param())}


@dataclass(frozen=True)
class Runs:
    path: Path
    batch: Batch

    def run(self, dp: int, backend: str = BACKEND) -> ranks.Result:
        """Return the results of all ranks as one."""
        by_rank = run_steps(self.path, Layout(dp=dp), self.batch, backend)
        scores = {
            name: torch.cat([row for _, row in sorted(merge(by_rank, name).items())])
            for name in SCORES
        }
        assert all(result["steps"] == by_rank[0]["steps"] for result in by_rank)
        assert all(not result["trained"] for result in by_rank[1:])
        return scores | {name: by_rank[0][name] for name in ("steps", "trained")}


def merge(by_rank: list[ranks.Result], name: str) -> dict[int, torch.Tensor]:
    return {row: value for result in by_rank for row, value in result[name].items()}


@pytest.fixture(scope="module", params=NAMES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("hf_engine")
    return Runs(tiny_models.save(request.param, folder), tiny_models.make_batch())


@pytest.mark.parametrize("dp", [1, 2])
def test_scores_and_two_steps_equal_plain_torch(runs, dp):
    result = runs.run(dp)
    model = transformers.AutoModelForCausalLM.from_pretrained(runs.path)
    with torch.no_grad():
        for name, rows in torch_reference.score(model, runs.batch, TEMPERATURE).items():
            torch.testing.assert_close(result[name], torch.cat(rows), rtol=0, atol=3e-6)
    settings = ranks.build_engine_spec(runs.path, Layout()).engine.optimizer
    norms, weights = torch_reference.train(runs.path, runs.batch, settings, num_steps=2)
    assert [step["grad_norm"] for step in result["steps"]] == pytest.approx(norms, rel=1e-6)
    reference = load_file(runs.path / "model.safetensors")
    assert result["trained"].keys() == reference.keys()
    for name, weight in weights.items():
        if name in reference:  # all but a tied head
            torch.testing.assert_close(result["trained"][name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("dp", [1, 2])
def test_scores_and_two_steps_equal_the_megatron_engine(runs, dp):
    result, expected = runs.run(dp), runs.run(dp, "megatron")
    for name in SCORES:
        torch.testing.assert_close(result[name], expected[name], rtol=0, atol=1e-5)
    for step, expected_step in zip(result["steps"], expected["steps"], strict=True):
        shared = {n: value for n, value in expected_step.items() if not n.startswith("moe/")}
        assert step == pytest.approx(shared, rel=1e-5, abs=1e-5)
    for name, weight in expected["trained"].items():
        torch.testing.assert_close(result["trained"][name], weight, rtol=0, atol=1e-5, msg=name)
