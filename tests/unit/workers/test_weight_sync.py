"""A push waits for both sides together, for as long as the setting says; ranks wait longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config.schema import RLConfig, TimeoutsConfig, WeightSyncConfig
from mcore_rl.controller.pending import Limit
from mcore_rl.workers import weight_sync

MODEL = {"num_hidden_layers": 1}


class Side:
    """A group of workers that keeps what is asked of it; sent calls are (side, method)."""

    def __init__(self, name: str, **answers: Any) -> None:
        self._name, self._answers = name, answers
        self.asked: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, method: str) -> Any:
        def ask(*args: Any) -> Any:
            self.asked[method] = args
            return self._answers[method]

        def submit(*args: Any) -> Any:
            self.asked[method] = args
            return self._name, method

        ask.submit = submit
        return ask


@pytest.mark.parametrize(
    ("method", "opens", "calls"),
    [
        ("full_export", "open_weight_stream", ("send_weights", "update_weights")),
        ("colocated", "open_shard_route", ("send_shards", "receive_shards")),
        ("disaggregated", "open_checkpoint_engine", ("send_checkpoint", "receive_checkpoint")),
    ],
)
def test_both_sides_of_a_push_are_waited_for_as_long_as_the_setting_says(
    monkeypatch, tmp_path, method, opens, calls
):
    config = RLConfig(output_dir=str(tmp_path), timeouts=TimeoutsConfig(start_s=500, call_s=400))
    config.weight_sync.method, config.weight_sync.timeout_s = method, 300
    waits: list[tuple[Any, ...]] = []
    monkeypatch.setattr(weight_sync, "gathered", lambda *wait: waits.append(wait))
    worker = SimpleNamespace(site="memory")
    monkeypatch.setattr(weight_sync, "_announced", lambda *_: [worker])
    monkeypatch.setattr(weight_sync, "by_generation_rank", lambda endpoints: endpoints)
    answers = {
        "open_weight_stream": "endpoint",
        "open_shard_route": ["endpoint"],
        "open_checkpoint_engine": ("endpoint", "plan"),
        "site": [("memory", "host")],
    }
    actor, servers = Side("actor", **answers), Side("servers")
    sync = weight_sync.connect(config, MODEL, actor, servers)
    limit = Limit(300, "weight_sync.timeout_s")
    joins = [("actor", "join_checkpoint_engine"), ("servers", "join_checkpoint_engine")]
    assert waits == ([(joins, limit)] if method == "disaggregated" else [])
    waits.clear()
    sync.push(7)
    assert waits == [([("actor", calls[0]), ("servers", calls[1])], limit)]
    assert actor.asked[calls[0]][-1] == servers.asked[calls[1]][-1] == 7
    [inner] = [
        getattr(value, "timeout_s", value)
        for value in actor.asked[opens]
        if isinstance(value, (float, WeightSyncConfig))
    ]
    assert inner == config.inner_timeout_s == 560  # the driver, who sees all, is to tell
