"""sft, dpo and rm give the same numbers on both engines, step by step."""

from __future__ import annotations

import pytest

from tests.e2e.outcomes import timeless
from tests.e2e.test_train_jobs import command, data, ended, settings
from tests.nightly import all_but

pytestmark = pytest.mark.job
__all__ = ["data"]  # the fixture
# A large epsilon: else the rounding of gradients near 0 decides the sign of Adam's step.
SHARED = ("trainer.batch_size=16", "trainer.num_steps=6", "engine.optimizer.eps=1e-3",
          "engine.optimizer.lr=3e-3")  # fmt: skip
LAYOUTS = {  # of the commands of the page: dpo has dp=2, rm tp=2
    "sft": {"megatron": (), "fsdp": ("engine.layout.dp=2",)},
    "dpo": {"megatron": (), "fsdp": ()},
    "rm": {"megatron": (), "fsdp": ("engine.layout.tp=1", "engine.layout.cp=2")},
}


@pytest.mark.parametrize("kind", all_but(("dpo",), LAYOUTS))
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
    assert len(rows["fsdp"]) == len(rows["megatron"]) >= 8
    gaps = [
        abs(row[metric] - value)
        for expected, row in zip(rows["megatron"], rows["fsdp"], strict=True)
        for metric, value in expected.items()
        if isinstance(value, float) and not metric.startswith("moe/")
    ]
    print(f"{kind}: {len(gaps)} numbers, the largest difference {max(gaps):.2g}")
    assert max(gaps) < 2e-5 and len(gaps) > 20
