"""What a job hands to its ranks and servers."""

from __future__ import annotations

import pytest

from mcore_rl.config.resolve import placement_of
from mcore_rl.config.schema import RLConfig, TimeoutsConfig
from mcore_rl.jobs import rl


@pytest.mark.parametrize(
    ("load_format", "method", "resumes", "expected"),
    [
        ("auto", "colocated", False, "auto"),
        ("auto", "colocated", True, "dummy"),
        ("auto", "disaggregated", True, "dummy"),
        ("auto", "full_export", True, "checkpoint"),
        ("checkpoint", "disaggregated", True, "checkpoint"),
        ("dummy", "disaggregated", False, "dummy"),
    ],
)
def test_servers_of_a_resumed_run_read_no_weights_if_a_push_brings_them(
    load_format, method, resumes, expected
):
    config = RLConfig()
    config.rollout.load_format, config.weight_sync.method = load_format, method
    assert rl.choose_load_format(config, resumes=resumes) == expected


class Group:
    def close(self):
        """Nothing was started."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Pools:
    """Keeps the specs that groups are made from."""

    def __init__(self):
        self.specs = []

    def gpu_ids(self, role):
        return ()

    def group(self, role, worker, args, layout, **options):
        self.specs.append(args[0])
        return Group()


def test_ranks_and_servers_wait_longer_inside_than_the_driver_does():
    """So the driver, which sees all of them, is the one that tells who is stuck."""
    config = RLConfig(timeouts=TimeoutsConfig(start_s=500, call_s=400))
    config.weight_sync.timeout_s, config.placement = 300, placement_of(config)
    pools, spec = Pools(), rl._engine_spec(config, config.actor, 0)
    with rl._model(pools, "actor", spec, None), rl.server_pool(config, pools):
        pass
    assert [spec.timeout_s for spec in pools.specs] == [560, 560]
