"""The methods of a training rank, as its group calls them."""

from types import SimpleNamespace

import numpy as np
import pytest

from mcore_rl.controller.dispatch import Dispatch, registered_methods
from mcore_rl.data.batch import Batch
from mcore_rl.engine.worker import ModelWorker


def test_ranks_that_share_a_model_get_the_same_samples():
    """Their collectives would wait for ever, or mix samples, if each got others."""
    methods = registered_methods(ModelWorker)
    takes_batches = {"compute_log_probs", "compute_reference_log_probs", "compute_values", "update"}
    for name, registration in methods.items():
        assert registration.dispatch_mode not in (
            Dispatch.DP_COMPUTE,
            Dispatch.DP_COMPUTE_WITH_FUNC,
            Dispatch.MEGATRON_PP_AS_DP,
        ), name
        wanted = Dispatch.MINI_BATCHES if name == "update" else Dispatch.MEGATRON_COMPUTE
        assert name not in takes_batches or registration.dispatch_mode is wanted


@pytest.mark.parametrize(
    ("sizes", "trained"),
    [
        (None, [[0, 1, 2, 3, 4]]),
        ([5], [[0, 1, 2, 3, 4]]),
        ([2, 3], [[0, 1], [2, 3, 4]]),
        ([0, 4, 1], [[], [0, 1, 2, 3], [4]]),  # a rank may have no row of one
    ],
)
def test_an_update_is_a_step_on_the_rows_of_each_mini_batch_in_their_order(sizes, trained):
    found = []

    def train_batch(batch, loss, *, temperature):
        found.append((batch.array("row").tolist(), loss, temperature))
        return {"loss": float(len(found))}

    worker = ModelWorker.__new__(ModelWorker)
    worker._loss_function, worker._engine = len, SimpleNamespace(train_batch=train_batch)
    worker._spec = SimpleNamespace(engine=SimpleNamespace(moe=SimpleNamespace(router_replay="off")))
    metrics = worker.update(Batch({"row": np.arange(5)}), sizes=sizes, temperature=0.5)
    assert found == [(rows, len, 0.5) for rows in trained]
    assert metrics == [{"loss": 1.0 + number} for number in range(len(trained))]
