"""When held-out rows are scored, and how far the loop over examples tells of them."""

import pytest

from mcore_rl.config.schema import HeldOutConfig, SFTConfig, StepsConfig
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample
from mcore_rl.observability.activity import ACTIVITY
from mcore_rl.trainers import supervised as offline
from mcore_rl.trainers.held_out import HeldOut

SAMPLE = Sample([5], [1], [1], [0.0], [0], "stop", 0)


class Rows:
    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def batch(self, rows):
        return Batch.of([SAMPLE] * len(rows))


class Objective:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.shown: list[str] = []

    def step(self, batch, clock):
        return {"loss": 1.0}

    def evaluate(self, batches):
        for batch in batches:
            self.sizes.append(len(batch))
            self.shown.append(str(ACTIVITY).partition(",")[0])
        return {"loss": float(len(self.sizes))}


def held_out(objective, recorded=None, *, num_steps=5, **settings) -> HeldOut:
    recorded = {} if recorded is None else recorded
    steps = StepsConfig(num_steps=num_steps, batch_size=2, eval_samples=3)
    config = SFTConfig(trainer=steps, evaluation=HeldOutConfig(**settings))
    return HeldOut(config, objective, {"a": Rows(4), "b": Rows(3)}, recorded.__setitem__)


def test_it_is_due_before_training_every_so_many_steps_and_at_the_end():
    made = held_out(Objective(), every=2)
    assert [step for step in range(6) if made.is_due(step)] == [0, 2, 4, 5]
    made = held_out(Objective(), every=2, before=False)
    assert [step for step in range(6) if made.is_due(step)] == [2, 4, 5]
    nothing = HeldOut(made.config, Objective(), {}, lambda when, found: None)
    assert not any(nothing.is_due(step) for step in range(6))


def test_a_loop_reports_them_by_set_in_the_row_of_their_step():
    objective, recorded, rows = Objective(), {}, {}
    made = held_out(objective, recorded, num_steps=2, every=1)
    batches = iter([Batch.of([SAMPLE])] * 2)
    offline.train(objective, batches, 2, rows.__setitem__, None, made)
    assert rows[1]["eval/a/loss"] == 2 and rows[2]["eval/b/loss"] == 8
    assert rows[1]["time/evaluate_s"] >= 0
    assert recorded == {"after": {"a": {"loss": 6.0}, "b": {"loss": 8.0}}}
    assert objective.sizes == [2, 1] * 4  # eval_samples, a training batch at a time
    assert objective.shown[:2] == [
        "step 1: evaluate 0/3 rows of a",
        "step 1: evaluate 2/3 rows of a",
    ]


@pytest.mark.parametrize(("step", "when"), [(0, "before"), (5, "after"), (2, None)])
def test_the_summary_has_those_of_before_and_after(step, when):
    recorded = {}
    held_out(Objective(), recorded).run(step)
    assert list(recorded) == ([when] if when else [])
