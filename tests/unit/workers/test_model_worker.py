"""The methods of a training rank, as its group calls them."""

from mcore_rl.controller.dispatch import Dispatch, registered_methods
from mcore_rl.workers.model_worker import ModelWorker


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
        assert name not in takes_batches or registration.dispatch_mode is Dispatch.MEGATRON_COMPUTE
