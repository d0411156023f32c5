"""Messages and metrics of the loop over examples while it runs."""

from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample
from mcore_rl.observability.activity import ACTIVITY, Stopwatch
from mcore_rl.trainers import supervised

SAMPLE = Sample([5, 6], [1], [1], [0.0], [0], "stop", 0)


class Objective:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def step(self, batch, clock):
        with clock("update"):
            self.shown.append(str(ACTIVITY))
        return {"loss": 1.0}


def test_a_step_says_which_one_it_is_and_what_it_does():
    objective = Objective()
    batches = iter([Batch.collate([SAMPLE])] * 2)
    supervised.train(objective, batches, 2, lambda step, metrics: None)
    assert [text.partition(",")[0] for text in objective.shown] == [
        "step 1: update",
        "step 2: update",
    ]


def test_the_speed_of_a_step_is_in_tokens_of_prompts_and_responses(monkeypatch):
    monkeypatch.setattr(Stopwatch, "total_s", 2.0)
    rows = []
    batches = iter([Batch.collate([SAMPLE] * 4)])
    supervised.train(Objective(), batches, 1, lambda step, metrics: rows.append(metrics))
    assert [row["tokens_per_s"] for row in rows] == [4 * 3 / 2.0]
