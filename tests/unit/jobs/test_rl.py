"""What a job hands to its ranks and servers."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from mcore_rl.config.schema import RLConfig, TimeoutsConfig
from mcore_rl.jobs import rl


def test_ranks_and_servers_wait_longer_inside_than_the_driver_does(monkeypatch):
    """So the driver, which sees all of them, is the one that tells who is stuck."""
    specs = []

    @contextmanager
    def group(config, worker, args, *others):
        specs.append(args[0])
        yield SimpleNamespace(shut_down=lambda: None)

    monkeypatch.setattr(rl, "_group", group)
    config = RLConfig(timeouts=TimeoutsConfig(start_s=500, call_s=400))
    config.weight_sync.timeout_s = 300
    with rl._model(config, config.actor, "actor", None, 0), rl._servers(config):
        pass
    assert [spec.timeout_s for spec in specs] == [560, 560]
