"""Every axis alone, in pairs and together equals one rank: log-probs, losses, gradient norms.

The models are small. The values of one rank in float32 are in golden.json, which this makes again:

    PYTHONPATH=. python tests/dist_cpu/test_golden_matrix.py
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import golden_models
import pytest
import ranks
import tiny_models

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from tests.nightly import all_but

GOLDEN = Path(__file__).with_name("golden.json")

MODELS = ("dense", "moe", "deepseek", "gpt_oss", "minimax", "hybrid", "sparse")
# Settings of a model in every case: layouts have the gradients of its indexers, too.
SETTINGS: dict[str, dict[str, Any]] = {"sparse": {"indexer_loss_coef": 0.5}}
DEPTHS = (2, 4)  # layers of the model; four where more than two stages share them, or two unevenly


@dataclass(frozen=True)
class Case:
    """A layout and what differs from the default settings of the engine."""

    layout: Layout
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_experts(self) -> bool:
        return self.layout.ep > 1 or self.layout.etp > 1 or "moe.dispatcher" in self.settings

    @property
    def num_layers(self) -> int:
        uneven = 1 in (self.layout.first_stage_layers, self.layout.last_stage_layers)
        return 4 if self.layout.pp * self.layout.vpp > 2 or uneven else 2


_SHARDED = {"optimizer.distributed": True}
_OVERLAP = {"optimizer.overlap": True}
_FULL = {"recompute.granularity": "full"}
_SELECTIVE = {"recompute.granularity": "selective"}
_ALLGATHER = {"moe.dispatcher": "allgather"}

CASES: dict[str, Case] = {
    "full recompute": Case(Layout(), _FULL),
    "selective recompute": Case(Layout(), _SELECTIVE),
    # Each axis alone.
    "tp2": Case(Layout(tp=2)),
    "pp2": Case(Layout(pp=2)),
    "cp2": Case(Layout(cp=2)),
    "dp2": Case(Layout(dp=2)),
    "pp2 vpp2": Case(Layout(pp=2, vpp=2)),
    "dp2 ep2": Case(Layout(dp=2, ep=2)),
    "dp2 etp2": Case(Layout(dp=2, etp=2)),
    # Uneven pipelines; the embedding alone, the head alone.
    "pp2 first1": Case(Layout(pp=2, first_stage_layers=1)),
    "pp2 last1": Case(Layout(pp=2, last_stage_layers=1)),
    "pp2 embedding": Case(Layout(pp=2, first_stage_layers=0)),
    "pp2 head": Case(Layout(pp=2, last_stage_layers=0)),
    "pp2 vpp2 embedding head": Case(Layout(pp=2, vpp=2, first_stage_layers=0, last_stage_layers=0)),
    # Experts over the ranks of another axis.
    "tp2 ep2": Case(Layout(tp=2, ep=2)),
    "tp2 etp2": Case(Layout(tp=2, etp=2)),
    "cp2 ep2": Case(Layout(cp=2, ep=2)),
    "cp2 etp2": Case(Layout(cp=2, etp=2)),
    # Ways of running.
    "dp2 sharded": Case(Layout(dp=2), _SHARDED),
    "dp2 overlap": Case(Layout(dp=2), _OVERLAP),
    "dp2 sharded overlap": Case(Layout(dp=2), _SHARDED | _OVERLAP),
    "cp2 sharded": Case(Layout(cp=2), _SHARDED),
    "dp2 ep2 sharded": Case(Layout(dp=2, ep=2), _SHARDED),
    "tp2 full": Case(Layout(tp=2), _FULL),
    "pp2 full": Case(Layout(pp=2), _FULL),
    "pp2 vpp2 full": Case(Layout(pp=2, vpp=2), _FULL),
    "cp2 selective": Case(Layout(cp=2), _SELECTIVE),
    "dp2 ep2 allgather": Case(Layout(dp=2, ep=2), _ALLGATHER),
    "tp2 ep2 allgather": Case(Layout(tp=2, ep=2), _ALLGATHER),
    # Each pair on four ranks.
    "tp4": Case(Layout(tp=4)),
    "pp4": Case(Layout(pp=4)),
    "cp4": Case(Layout(cp=4)),
    "dp4": Case(Layout(dp=4)),
    "pp4 embedding head": Case(Layout(pp=4, first_stage_layers=0, last_stage_layers=0)),
    "tp2 pp2": Case(Layout(tp=2, pp=2)),
    "tp2 cp2": Case(Layout(tp=2, cp=2)),
    "tp2 dp2": Case(Layout(tp=2, dp=2)),
    "pp2 cp2": Case(Layout(pp=2, cp=2)),
    "pp2 dp2": Case(Layout(pp=2, dp=2)),
    "cp2 dp2": Case(Layout(cp=2, dp=2)),
    "tp2 pp2 vpp2": Case(Layout(tp=2, pp=2, vpp=2)),
    "cp2 pp2 vpp2": Case(Layout(cp=2, pp=2, vpp=2)),
    "dp2 pp2 vpp2": Case(Layout(dp=2, pp=2, vpp=2)),
    # Three axes and more.
    "dp4 ep4": Case(Layout(dp=4, ep=4)),
    "dp4 ep2": Case(Layout(dp=4, ep=2)),
    "dp4 ep2 etp2": Case(Layout(dp=4, ep=2, etp=2)),
    "tp2 dp2 ep2": Case(Layout(tp=2, dp=2, ep=2)),
    "tp2 dp2 ep4": Case(Layout(tp=2, dp=2, ep=4)),
    "tp2 dp2 etp2": Case(Layout(tp=2, dp=2, etp=2)),
    "tp2 dp2 ep2 etp2": Case(Layout(tp=2, dp=2, ep=2, etp=2)),
    "tp2 pp2 ep2": Case(Layout(tp=2, pp=2, ep=2)),
    "tp2 pp2 etp2": Case(Layout(tp=2, pp=2, etp=2)),
    "tp2 cp2 ep2": Case(Layout(tp=2, cp=2, ep=2)),
    "tp2 cp2 ep4": Case(Layout(tp=2, cp=2, ep=4)),
    "tp2 cp2 ep2 etp2": Case(Layout(tp=2, cp=2, ep=2, etp=2)),
    "pp2 dp2 ep2": Case(Layout(pp=2, dp=2, ep=2)),
    "pp2 cp2 ep2": Case(Layout(pp=2, cp=2, ep=2)),
    "cp2 dp2 ep2": Case(Layout(cp=2, dp=2, ep=2)),
    "cp2 dp2 ep4": Case(Layout(cp=2, dp=2, ep=4)),
    "tp2 pp2 vpp2 ep2": Case(Layout(tp=2, pp=2, vpp=2, ep=2)),
    "dp2 pp2 vpp2 ep2": Case(Layout(dp=2, pp=2, vpp=2, ep=2)),
    "cp2 pp2 vpp2 ep2": Case(Layout(cp=2, pp=2, vpp=2, ep=2)),
    "pp2 dp2 sharded": Case(Layout(pp=2, dp=2), _SHARDED),
    "cp2 dp2 sharded": Case(Layout(cp=2, dp=2), _SHARDED),
    "tp2 dp2 ep2 sharded": Case(Layout(tp=2, dp=2, ep=2), _SHARDED),
    "tp2 dp2 sharded overlap full": Case(Layout(tp=2, dp=2), _SHARDED | _OVERLAP | _FULL),
    "pp2 vpp2 dp2 sharded": Case(Layout(pp=2, vpp=2, dp=2), _SHARDED),
    "tp2 dp2 ep4 allgather": Case(Layout(tp=2, dp=2, ep=4), _ALLGATHER),
}


def cases_of(model: str) -> dict[str, Case]:
    """All, without those of experts for the dense model, and on four ranks for `moe`.

    Experts with biases are never split.
    """
    most = {"dense": 0, "moe": 2}.get(model, 4)
    return {
        n: c
        for n, c in CASES.items()
        if (not c.needs_experts or c.layout.world_size <= most)
        and (model != "gpt_oss" or c.layout.etp == 1)
    }


NAMES = [(m, n) for m in MODELS for n in cases_of(m)]
# Each axis alone and each way of running, with one model; three axes and more. Axes that
# one of these has are not repeated one by one for the other models.
DAILY = {
    "dense": (
        "full recompute", "tp2", "pp2 head", "pp2 vpp2 embedding head", "cp2", "dp2",
        "dp2 sharded overlap", "pp2 cp2", "tp2 dp2 sharded overlap full",
    ),
    "moe": ("tp2 ep2", "tp2 etp2", "dp2 ep2 allgather"),
    "deepseek": (
        "selective recompute", "pp2 first1", "pp2 last1", "pp2 vpp2 full", "cp2 selective",
        "dp2 etp2", "cp2 etp2", "tp4", "pp4 embedding head", "dp4 ep2 etp2", "tp2 cp2 ep4",
        "tp2 pp2 vpp2 ep2", "tp2 dp2 ep2 sharded", "cp2 dp2 ep2",
    ),
    "gpt_oss": ("selective recompute", "cp2", "tp2 pp2 ep2", "tp2 dp2 ep2 sharded"),
    "minimax": ("full recompute", "cp2", "tp4", "tp2 pp2 ep2"),
    "hybrid": (
        "full recompute", "selective recompute", "pp2 vpp2", "tp2 etp2", "tp4", "cp4", "tp2 cp2",
        "tp2 pp2 ep2", "tp2 dp2 ep2 sharded", "cp2 dp2 ep2",
    ),
    "sparse": ("selective recompute", "tp2 cp2", "tp2 pp2 ep2"),
}  # fmt: skip


@ranks.spawn_on_ranks()
def two_steps(path: Path, layout: Layout, settings: ranks.Settings, batch: Batch) -> ranks.Result:
    """Log-probs of this rank's rows, where the last stage is, and two optimizer steps."""
    # Adam divides by the size of a gradient: without a floor it blows the rounding of one that is
    # nearly zero up to a whole step, and the loss of the second step shows it.
    engine = ranks.start_engine_with(path, layout, {**settings, "optimizer.eps": 1e-5})
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    scored = engine.infer_batch(share)
    result = {} if scored is None else {"log_probs": _index_by_row(rows, scored)}
    return {**result, "steps": [engine.train_batch(share, ranks.LOSS) for _ in range(2)]}


def _index_by_row(rows: list[int], scored: Batch) -> dict[int, list[float]]:
    columns = scored.jagged("log_probs")
    return {row: columns[place].tolist() for place, row in enumerate(rows)}


@dataclass(frozen=True)
class Runs:
    batch: Batch
    paths: dict[tuple[str, int], Path]  # by model and depth

    @classmethod
    def build(cls, folder: Path) -> Runs:
        paths = {
            (m, depth): golden_models.save(m, folder, depth) for m in MODELS for depth in DEPTHS
        }
        return cls(tiny_models.make_batch(), paths)

    def case(self, model: str, case: Case, depth: int | None = None) -> list[ranks.Result]:
        path, settings = self.paths[model, depth or case.num_layers], SETTINGS.get(model, {})
        return two_steps(path, case.layout, case.settings | settings, self.batch)

    def one_rank(self, model: str, depth: int) -> list[ranks.Result]:
        return self.case(model, Case(Layout()), depth)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs.build(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


def log_probs(by_rank):
    """By row of the batch; ranks that score the same row must agree, and no row may be missing."""
    values_by_row = {}
    for result in by_rank:
        for row, values in result.get("log_probs", {}).items():
            assert values_by_row.setdefault(row, values) == pytest.approx(values, abs=1e-6)
    return [values_by_row[row] for row in sorted(values_by_row)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_gives_the_golden_values(runs, golden, model, depth):
    [result], values = runs.one_rank(model, depth), golden[f"{model}/{depth}"]
    for actual, expected in zip(log_probs([result]), values["log_probs"], strict=True):
        assert actual == pytest.approx(expected, abs=1e-5)
    for place, step in enumerate(result["steps"]):
        assert step["loss"] == pytest.approx(values["loss"][place], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(values["grad_norm"][place], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "name"), all_but([(model, name) for model in DAILY for name in DAILY[model]], NAMES)
)
def test_a_layout_equals_one_rank(runs, model, name):
    [reference] = runs.one_rank(model, CASES[name].num_layers)
    by_rank = runs.case(model, CASES[name])
    for actual, expected in zip(log_probs(by_rank), log_probs([reference]), strict=True):
        assert actual == pytest.approx(expected, abs=1e-5)
    assert any("loss" in result["steps"][0] for result in by_rank)
    for result in by_rank:
        for step, expected in zip(result["steps"], reference["steps"], strict=True):
            if "loss" in step:
                assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_the_steps_move_the_loss(golden):
    """Guards the tests above: the second step starts from other weights."""
    for values in golden.values():
        first, second = values["loss"]
        assert abs(first - second) > 1e-3


def remake() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs.build(Path(folder))
        for model, depth in runs.paths:
            [result] = runs.one_rank(model, depth)
            rows = result["log_probs"].values()
            golden[f"{model}/{depth}"] = {
                "log_probs": [[round(value, 7) for value in row] for row in rows],
                "loss": [step["loss"] for step in result["steps"]],
                "grad_norm": [step["grad_norm"] for step in result["steps"]],
            }
    text = json.dumps(golden, indent=1).replace("\n   ", " ").replace("\n  ]", " ]")
    GOLDEN.write_text(text + "\n")


if __name__ == "__main__":
    remake()
