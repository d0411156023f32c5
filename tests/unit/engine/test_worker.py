"""The methods of a training rank, as its group calls them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import EngineConfig
from mcore_rl.controller.dispatch import Dispatch, get_registered_methods
from mcore_rl.data.batch import Batch
from mcore_rl.engine.worker import ModelWorker


def test_ranks_that_share_a_model_get_the_same_samples():
    """Their collectives would wait for ever, or mix samples, if each got others."""
    methods = get_registered_methods(ModelWorker)
    takes_batches = {"compute_log_probs", "compute_reference_log_probs", "compute_values", "update"}
    for name, registration in methods.items():
        assert registration.dispatch_mode not in (
            Dispatch.DP_COMPUTE,
            Dispatch.DP_COMPUTE_WITH_FUNC,
            Dispatch.MEGATRON_PP_AS_DP,
        ), name
        expected = Dispatch.MINI_BATCHES if name == "update" else Dispatch.MEGATRON_COMPUTE
        assert name not in takes_batches or registration.dispatch_mode is expected


class Engine:
    """Records its calls; batches stay as they are."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.updates: list[tuple[Any, ...]] = []
        self.fails = False

    def to(self, place: str, **parts: bool) -> None:
        if self.fails and place == "device":
            raise MemoryError("no device memory")
        names = [name for name in ("model", "optimizer", "grad") if parts.get(name, True)]
        self.calls.append(f"{place} {' '.join(names)}")

    def infer_batch(self, batch: Batch, **settings: Any) -> Batch:
        self.calls.append("infer")
        return batch

    def train_batch(self, batch: Batch, loss: Any, *, temperature: float) -> dict[str, float]:
        self.calls.append("train")
        self.updates.append((batch.array("row").tolist(), loss, temperature))
        return {"loss": float(len(self.updates))}

    def load_checkpoint(self, path: Path) -> None:
        self.calls.append("load")

    def get_local_weights(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr("mcore_rl.engine.worker.create_engine", lambda *_: engine)
    return engine


def build_worker() -> ModelWorker:
    spec: Any = SimpleNamespace(engine=EngineConfig())
    return ModelWorker(spec, len)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "trained"),
    [
        (None, [[0, 1, 2, 3, 4]]),
        ([5], [[0, 1, 2, 3, 4]]),
        ([2, 3], [[0, 1], [2, 3, 4]]),
        ([0, 4, 1], [[], [0, 1, 2, 3], [4]]),  # a rank may have no row of one
    ],
)
def test_an_update_is_a_step_on_the_rows_of_each_mini_batch_in_their_order(engine, sizes, trained):
    metrics = build_worker().update(Batch({"row": np.arange(5)}), sizes=sizes, temperature=0.5)
    assert engine.updates == [(rows, len, 0.5) for rows in trained]
    assert metrics == [{"loss": 1.0 + number} for number in range(len(trained))]


ALL = "model optimizer grad"
BATCH = Batch({"row": np.arange(2)})


def test_a_model_that_was_offloaded_is_back_before_the_next_call_that_needs_it_and_once(engine):
    worker = build_worker()
    worker.compute_values(BATCH)
    worker.to("host")
    assert worker.apply(len, BATCH) == 2  # has no part of the model in it
    assert engine.calls == ["infer", f"host {ALL}"]
    worker.compute_values(BATCH)
    worker.update(BATCH)
    assert engine.calls[2:] == [f"device {ALL}", "infer", "train"]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda worker: worker.compute_log_probs(BATCH, temperature=1.0), "infer"),
        (lambda worker: worker.compute_reference_log_probs(BATCH, temperature=1.0), "infer"),
        (lambda worker: worker.load_checkpoint("path"), "load"),
    ],
)
def test_a_part_that_was_offloaded_is_back_before_a_call(engine, call, name):
    worker = build_worker()
    worker.to("host", model=False)
    call(worker)
    assert engine.calls == ["host optimizer grad", f"device {ALL}", name]


def test_a_model_of_which_a_part_is_brought_back_is_offloaded_still(engine):
    worker = build_worker()
    worker.to("host")
    worker.to("device", optimizer=False, grad=False)
    worker.update(BATCH)
    assert engine.calls == [f"host {ALL}", "device model", f"device {ALL}", "train"]


def test_weights_alone_are_back_to_be_sent(engine):
    worker, sent = build_worker(), []
    worker._transport = SimpleNamespace(send=lambda *args: sent.append(list(engine.calls)))
    worker.to("host")
    worker.send_weights(1)
    assert sent == [[f"host {ALL}", "device model"]]


def test_a_model_that_cannot_come_back_fails_the_call_that_needs_it(engine):
    worker = build_worker()
    worker.to("host")
    engine.fails = True
    with pytest.raises(MemoryError, match="no device memory"):
        worker.compute_values(BATCH)
    assert engine.calls == [f"host {ALL}"]
