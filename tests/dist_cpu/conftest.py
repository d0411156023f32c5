"""Ranks are started once and serve every module; tests read from their results."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ranks
import tiny_models

from mcore_rl.config.schema import Layout

DENSE = {"tp1": Layout(), "tp2": Layout(tp=2), "dp2": Layout(dp=2)}
MOE = DENSE | {
    "ep2": Layout(dp=2, ep=2),
    "tp2ep2": Layout(tp=2, ep=2),
    "tp2etp2": Layout(tp=2, etp=2),
    "tp2dp2ep2etp2": Layout(tp=2, dp=2, ep=2, etp=2),
}
LAYOUTS = {"qwen3": DENSE, "qwen3_moe": MOE, "qwen3_moe_mixed": MOE}


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the ranks with their lane. The threads of their groups poll, which slows others down.

    (A fixture of the package would end with the session: the folder is no package to pytest.)
    """
    if nextitem is None or not nextitem.get_closest_marker("ranks"):
        ranks.dismiss()


@dataclass
class Runs:
    batch: Any
    results: dict[str, list[dict[str, Any]]]  # by "model/layout" or the name of a special case
    checkpoints: dict[str, Path]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("models")
    checkpoints = {name: tiny_models.save(name, folder) for name in LAYOUTS}
    batch = tiny_models.make_batch()
    jobs: dict[int, dict[str, Any]] = {1: {}, 2: {}, 4: {}}
    for model, layouts in LAYOUTS.items():
        for name, layout in layouts.items():
            case = ranks.job(ranks.parity, checkpoints[model], layout, batch)
            jobs[layout.world_size][f"{model}/{name}"] = case
    moe = checkpoints["qwen3_moe"]
    for name in ("tp1", "tp2ep2"):
        case = ranks.job(ranks.parity, moe, MOE[name], batch, "bfloat16")
        jobs[MOE[name].world_size][f"bfloat16/{name}"] = case
    few = ranks.fewer_samples_than_ranks
    jobs[1]["few/tp1"] = ranks.job(few, moe, Layout(), batch)
    jobs[2]["few/ep2"] = ranks.job(few, moe, Layout(dp=2, ep=2), batch)
    for name in ("dp2", "ep2"):
        case = ranks.job(ranks.distributed_optimizer, moe, MOE[name], batch)
        jobs[2][f"distributed_optimizer/{name}"] = case
    jobs[2]["resume"] = ranks.job(ranks.resume, moe, Layout(tp=2, ep=2), batch, folder)
    return Runs(batch, ranks.Results(jobs), checkpoints)
