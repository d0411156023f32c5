"""sft, dpo and rm give the same numbers on both engines, step by step."""

from __future__ import annotations

import pytest

from tests.e2e.outcomes import list_gaps, timeless
from tests.e2e.test_train_jobs import command, data, ended, settings

# tests/dist_cpu/test_fsdp_engine.py compares the engines step by step.
pytestmark = [pytest.mark.job, pytest.mark.nightly]
__all__ = ["data"]  # the fixture
# A large epsilon: else the rounding of gradients near 0 decides the sign of Adam's step.
SHARED = ("trainer.batch_size=16", "trainer.num_steps=6", "engine.optimizer.eps=1e-3",
          "engine.optimizer.lr=3e-3")  # fmt: skip
LAYOUTS = {  # of the commands of the page: dpo has dp=2, rm tp=2
    "sft": {"megatron": (), "fsdp": ("engine.layout.dp=2",)},
    "dpo": {"megatron": (), "fsdp": ()},
    "rm": {"megatron": (), "fsdp": ("engine.layout.tp=1", "engine.layout.cp=2")},
}


def test_an_rl_run_is_the_same_on_both_engines(start_job, tmp_path):
    first = start_job("warm_start.num_steps=120", "trainer.num_steps=1", "trainer.eval_samples=16")
    assert first.process.wait(400) == 0, first.stderr[-3000:]
    task, rows = first.output / "task", {}
    shared = (
        "task.name=''", f"model.path={first.output / 'warm_start'}",
        f"data.train_file={task / 'train.parquet'}", f"data.test_file={task / 'test.parquet'}",
        "warm_start.num_steps=0", "warm_start.train_file=''", "trainer.num_steps=6",
        "trainer.prompts_per_step=16", "trainer.eval_samples=64", "algorithm.kl_coef=0.01",
        "algorithm.num_mini_batches=2", "actor.optimizer.eps=1e-3", "actor.optimizer.lr=1e-3",
        "actor.layout.tp=1", "actor.layout.ep=1",
    )  # fmt: skip
    for backend, dp in (("megatron", 1), ("fsdp", 2)):
        output = tmp_path / backend
        job = start_job(*shared, f"actor.backend={backend}", f"actor.layout.dp={dp}", output=output)
        assert job.process.wait(400) == 0, job.stderr[-3000:]
        rows[backend] = timeless(output)
    gaps = list_gaps(rows["fsdp"], rows["megatron"])
    print(f"rl: {len(gaps)} numbers a step, largest differences: {gaps}")
    assert len(gaps) > 20 and len(rows["fsdp"]) >= 7
    assert gaps.pop("max_logprob_gap") < 1e-4  # the largest of some thousand roundings
    assert max(gaps.values()) < 1e-5


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_run_is_the_same_on_both_engines(data, kind, tmp_path):
    rows = {}
    for backend, layout in LAYOUTS[kind].items():
        output = tmp_path / backend
        name = "sft" if kind == "sft" else "pairs"
        done = command(
            kind, *settings(data, name, output, f"engine.backend={backend}", *SHARED, *layout)
        )
        summary = ended(done, output)
        rows[backend] = [*timeless(output), summary["evaluation"]["after"]["test"]]
    assert len(rows["fsdp"]) >= 8
    gaps = list_gaps(rows["fsdp"], rows["megatron"])
    print(f"{kind}: {len(gaps)} numbers a step, the largest difference {max(gaps.values()):.2g}")
    assert max(gaps.values()) < 1e-5 and len(gaps) > 3
