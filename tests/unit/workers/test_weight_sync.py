"""A push waits for both sides together, for as long as the setting says; ranks wait longer."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.config.schema import RLConfig, TimeoutsConfig
from mcore_rl.controller.pending import Limit
from mcore_rl.workers import weight_sync


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


@pytest.fixture
def waits(monkeypatch) -> list[tuple[Any, ...]]:
    """What is waited for, and for how long; exports have written all."""
    found: list[tuple[Any, ...]] = []

    def gathered(*wait: Any) -> list[Any]:
        found.append(wait)
        return [["", ""]]

    monkeypatch.setattr(weight_sync, "gathered", gathered)
    return found


def config(tmp_path, method: str) -> RLConfig:
    made = RLConfig(output_dir=str(tmp_path), timeouts=TimeoutsConfig(start_s=500, call_s=400))
    made.weight_sync.method, made.weight_sync.timeout_s = method, 300
    return made


LIMIT = Limit(300, "weight_sync.timeout_s")


@pytest.mark.parametrize("method", ["colocated", "disaggregated"])
def test_both_sides_are_waited_for_as_long_as_the_setting_says(waits, tmp_path, method):
    given = config(tmp_path, method)
    actor, servers = Side("actor", open_weights=("endpoint", "spec")), Side("servers")
    sync = weight_sync.connect(given, actor, servers, num_bytes=9)
    joins = [("actor", "connect_weights"), ("servers", "connect_weights")]
    assert waits == [(joins, LIMIT)]
    assert (
        actor.asked["connect_weights"] == servers.asked["connect_weights"] == ("endpoint", "spec")
    )
    waits.clear()
    sync.push(7)
    assert waits == [([("actor", "send_weights"), ("servers", "receive_weights")], LIMIT)]
    assert actor.asked["send_weights"] == (7,)
    assert servers.asked["receive_weights"] == (7, False, False)
    _, settings = actor.asked["open_weights"]
    assert (
        settings.timeout_s == given.inner_timeout_s == 560
    )  # the driver, who sees all, is to tell


def test_a_checkpoint_is_written_then_loaded_and_gone(waits, tmp_path):
    given = config(tmp_path, "full_export")
    actor, servers = Side("actor"), Side("servers")
    sync = weight_sync.connect(given, actor, servers, num_bytes=9)
    folder = tmp_path / ".weights.partial"
    folder.mkdir()
    sync.push(7)
    assert waits == [([("actor", "export")], LIMIT), ([("servers", "load_checkpoint")], LIMIT)]
    assert actor.asked["export"] == (str(folder), 9)
    assert servers.asked["load_checkpoint"] == (str(folder), 7)
    assert not folder.exists()


def test_a_checkpoint_that_could_not_be_written_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(weight_sync, "gathered", lambda *_: [["No space left", ""]])
    servers = Side("servers")
    sync = weight_sync.connect(config(tmp_path, "full_export"), Side("actor"), servers, num_bytes=9)
    with pytest.raises(weight_sync.ExportError, match="method='full_export': No space left"):
        sync.push(7)
    assert servers.asked == {}
