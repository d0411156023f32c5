"""A push waits for both sides together, for as long as the setting says; ranks wait longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mcore_rl.config.schema import RLConfig, TimeoutsConfig
from mcore_rl.controller.pending import Limit
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rollout import weight_updater as weight_sync


class Actor:
    """A group that keeps what is asked of it; sent calls are their methods' names."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.asked: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, method: str) -> Any:
        def ask(*args: Any) -> Any:
            self.asked[method] = args
            return self._answers[method]

        def submit(*args: Any) -> Any:
            self.asked[method] = args
            return method

        ask.submit = submit  # type: ignore[attr-defined]
        return ask


class Servers:
    """A pool that keeps what is tried, with the arguments of its first and its second server.

    One server dies in each of the tries numbered `deaths`.
    """

    def __init__(self, deaths: Sequence[int] = ()) -> None:
        self.deaths, self.tries = deaths, list[Any]()
        self.membership, self.num_up, self.version = 1, 2, 0

    def admit(self) -> None: ...

    def attempt(
        self,
        method: str,
        arguments: Callable[[int], Any],
        beside: list[str],
        limit: Limit,
        on_death: Callable[[], None] | None = None,
    ) -> bool:
        self.tries.append((method, arguments(0), arguments(1), beside, limit))
        if len(self.tries) not in self.deaths:
            return True
        self.membership, self.num_up = self.membership + 1, 1
        return False

    def updated(self, version: int) -> None:
        self.version = version


def config(tmp_path, method: str) -> RLConfig:
    made = RLConfig(output_dir=str(tmp_path), timeouts=TimeoutsConfig(start_s=500, call_s=400))
    made.weight_sync.method, made.weight_sync.timeout_s = method, 300
    return made


LIMIT = Limit(300, "weight_sync.timeout_s")
OPENED = {"open_weights": ("endpoint", "spec")}
CONNECTED = (
    "connect_weights", ("endpoint", "spec", 0), ("endpoint", "spec", 2), ["connect_weights"], LIMIT,
)  # fmt: skip
SENT = "receive_weights", (7,), (7,), ["send_weights"], LIMIT


@pytest.mark.parametrize("method", ["colocated", "disaggregated"])
def test_both_sides_are_waited_for_as_long_as_the_setting_says(tmp_path, method):
    given, actor, servers = config(tmp_path, method), Actor(**OPENED), Servers()
    given.rollout.tp = 2
    sync = weight_sync.connect(given, actor, servers, num_bytes=9)
    assert servers.tries == [CONNECTED]
    sync.push(7)
    assert servers.tries == [CONNECTED, SENT] and servers.version == 7
    assert actor.asked["connect_weights"] == ("endpoint", "spec")
    assert actor.asked["send_weights"] == (7,)
    layout, settings = actor.asked["open_weights"]
    assert layout == GenerationLayout(tp=2, dp=2)
    # The driver, who sees all, is to tell.
    assert settings.timeout_s == given.inner_timeout_s == 560


def test_a_push_in_which_servers_die_begins_anew_with_a_connection_of_those_left(tmp_path):
    given, actor, servers = config(tmp_path, "disaggregated"), Actor(**OPENED), Servers([2, 3])
    given.rollout.tp = 2
    weight_sync.connect(given, actor, servers, num_bytes=9).push(7)
    assert servers.tries == [CONNECTED, SENT, CONNECTED, CONNECTED, SENT]
    assert actor.asked["open_weights"][0] == GenerationLayout(tp=2, dp=1)
    assert servers.version == 7


def test_servers_that_join_are_connected_by_the_next_push_and_not_again(tmp_path):
    given, servers = config(tmp_path, "disaggregated"), Servers()
    given.rollout.tp = 2
    sync = weight_sync.connect(given, Actor(**OPENED), servers, num_bytes=9)
    servers.membership = 9
    sync.push(7)
    sync.push(7)
    assert servers.tries == [CONNECTED, CONNECTED, SENT, SENT]


def test_a_checkpoint_is_written_then_loaded_and_gone(monkeypatch, tmp_path):
    waits = list[Any]()
    monkeypatch.setattr(weight_sync, "gathered", lambda *wait: waits.append(wait) or [["", ""]])
    actor, servers = Actor(), Servers([1])
    sync = weight_sync.connect(config(tmp_path, "full_export"), actor, servers, num_bytes=9)
    folder = tmp_path / ".weights.partial"
    folder.mkdir()
    sync.push(7)
    assert waits == [(["export"], LIMIT)]
    assert actor.asked["export"] == (str(folder), 9)
    loaded = "load_checkpoint", (str(folder), 7), (str(folder), 7), [], LIMIT
    assert servers.tries == [loaded, loaded] and servers.version == 7
    assert not folder.exists()


@pytest.mark.parametrize("recompute_cache", [False, True])
def test_servers_that_generate_all_the_time_keep_requests_and_their_cache_unless_told(
    monkeypatch, tmp_path, recompute_cache
):
    """A checkpoint that they load comes with the same arguments; a version comes by itself else."""
    monkeypatch.setattr(weight_sync, "gathered", lambda *_: [["", ""]])
    for mode, own in (("fully_async", (True, recompute_cache)), ("one_step_off", ())):
        for method in ("disaggregated", "full_export"):
            given, servers = config(tmp_path, method), Servers()
            given.trainer.mode = mode
            given.trainer.asynchronous.recompute_cache = recompute_cache
            weight_sync.connect(given, Actor(**OPENED), servers, num_bytes=9).push(7)
            came = (str(tmp_path / ".weights.partial"), 7) if method == "full_export" else (7,)
            assert servers.tries[-1][1] == servers.tries[-1][2] == (*came, *own)


def test_a_checkpoint_that_could_not_be_written_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(weight_sync, "gathered", lambda *_: [["No space left", ""]])
    servers = Servers()
    sync = weight_sync.connect(config(tmp_path, "full_export"), Actor(), servers, num_bytes=9)
    with pytest.raises(weight_sync.ExportError, match="method='full_export': No space left"):
        sync.push(7)
    assert servers.tries == []
