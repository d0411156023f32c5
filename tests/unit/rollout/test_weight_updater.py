"""A push waits for both sides, up to the limit of the setting; ranks wait longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.schema import Layout, RLConfig, TimeoutsConfig, WeightSyncConfig
from mcore_rl.controller.dispatch import RemoteMethod
from mcore_rl.controller.pending_call import Timeout
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.rollout import weight_updater
from mcore_rl.weight_sync.spec import TransferSpec


class Group:
    """A worker group that records calls; a submitted call is its method's name."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.calls: dict[str, tuple[Any, ...]] = {}

    def call(self, method: RemoteMethod[..., Any], *args: Any) -> Any:
        self.calls[method.name] = args
        return self._answers[method.name]

    def submit(self, method: RemoteMethod[..., Any], *args: Any) -> Any:
        self.calls[method.name] = args
        return method.name


class Servers:
    """A pool that records attempts, with the arguments of its first two servers.

    One server dies in each of the attempts numbered `deaths`.
    """

    def __init__(self, deaths: Sequence[int] = ()) -> None:
        self.deaths, self.attempts = deaths, list[Any]()
        self.membership, self.num_up, self.version = 1, 2, 0

    def admit(self) -> None: ...

    def list_parameters(self) -> list[Any]:
        return []

    def attempt(
        self,
        submit: Callable[[Any, int], Any],
        beside: list[str],
        limit: Timeout,
        on_death: Callable[[], None] | None = None,
    ) -> bool:
        first, second = Group(), Group()
        method = submit(first, 0)
        assert submit(second, 1) == method
        self.attempts.append((method, first.calls[method], second.calls[method], beside, limit))
        if len(self.attempts) not in self.deaths:
            return True
        self.membership, self.num_up = self.membership + 1, 1
        return False

    def mark_updated(self, version: int) -> None:
        self.version = version


def make_config(tmp_path, method: str) -> RLConfig:
    config = RLConfig(output_dir=str(tmp_path), timeouts=TimeoutsConfig(start_s=500, call_s=400))
    config.weight_sync.method, config.weight_sync.timeout_s = method, 300
    return config


LIMIT = Timeout(300, "weight_sync.timeout_s")
SPEC = TransferSpec(Layout(), 0, GenerationLayout(), "bfloat16", WeightSyncConfig())
OPENED = {"open_weights": ("endpoint", SPEC)}
CONNECTED = (
    "connect_weights", ("endpoint", SPEC, 0), ("endpoint", SPEC, 2), ["connect_weights"], LIMIT,
)  # fmt: skip
SENT = "receive_weights", (7, False, False), (7, False, False), ["send_weights"], LIMIT


@pytest.mark.parametrize("method", ["colocated", "disaggregated"])
def test_a_push_waits_for_both_sides_up_to_the_limit(tmp_path, method):
    config, actor, servers = make_config(tmp_path, method), Group(**OPENED), Servers()
    config.rollout.tp = 2
    sync = weight_updater.connect(config, actor, servers, num_bytes=9)
    assert servers.attempts == [CONNECTED]
    sync.push(7)
    assert servers.attempts == [CONNECTED, SENT] and servers.version == 7
    assert actor.calls["connect_weights"] == ("endpoint", SPEC)
    assert actor.calls["send_weights"] == (7,)
    layout, settings, weight_format, _ = actor.calls["open_weights"]
    assert weight_format == "vllm"
    assert layout == GenerationLayout(tp=2, dp=2)
    # Longer: the driver, which knows of both sides, raises first.
    assert settings.timeout_s == config.inner_timeout_s == 560


def test_a_push_in_which_servers_die_is_repeated_with_the_others(tmp_path):
    config, actor, servers = (
        make_config(tmp_path, "disaggregated"),
        Group(**OPENED),
        Servers([2, 3]),
    )
    config.rollout.tp = 2
    weight_updater.connect(config, actor, servers, num_bytes=9).push(7)
    assert servers.attempts == [CONNECTED, SENT, CONNECTED, CONNECTED, SENT]
    assert actor.calls["open_weights"][0] == GenerationLayout(tp=2, dp=1)
    assert servers.version == 7


@pytest.mark.parametrize("deaths", [1, 2])
def test_ranks_connect_with_the_servers_that_are_left_when_one_dies_before(tmp_path, deaths):
    """It is found dead by the call that lists its parameters."""

    class Dying(Servers):
        def list_parameters(self) -> list[Any]:
            nonlocal deaths
            if deaths and self.version == 0:
                deaths -= 1
                self.membership, self.num_up = self.membership + 1, max(self.num_up - 1, 1)
            return []

    servers, layouts = Dying(), list[int]()

    class Recording(Group):
        def call(self, method: RemoteMethod[..., Any], *args: Any) -> Any:
            assert method is ModelWorker.open_weights
            layouts.append(args[0].dp)
            return OPENED["open_weights"]

    sync = weight_updater.connect(
        make_config(tmp_path, "disaggregated"), Recording(), servers, num_bytes=9
    )
    sync.push(7)
    assert servers.num_up == 1 and layouts == [1]
    assert [method for method, *_ in servers.attempts] == ["connect_weights", "receive_weights"]


def test_servers_that_join_are_connected_once_by_the_next_push(tmp_path):
    config, servers = make_config(tmp_path, "disaggregated"), Servers()
    config.rollout.tp = 2
    sync = weight_updater.connect(config, Group(**OPENED), servers, num_bytes=9)
    servers.membership = 9
    sync.push(7)
    sync.push(7)
    assert servers.attempts == [CONNECTED, CONNECTED, SENT, SENT]


def test_a_checkpoint_is_written_loaded_and_removed(monkeypatch, tmp_path):
    waits = list[Any]()
    monkeypatch.setattr(
        weight_updater, "gather_results", lambda *wait: waits.append(wait) or [["", ""]]
    )
    actor, servers = Group(), Servers([1])
    sync = weight_updater.connect(make_config(tmp_path, "full_export"), actor, servers, num_bytes=9)
    folder = tmp_path / ".weights.partial"
    folder.mkdir()
    sync.push(7)
    assert waits == [(["export"], LIMIT)]
    assert actor.calls["export"] == (str(folder), 9)
    args = str(folder), 7, False, False
    loaded = "load_checkpoint", args, args, [], LIMIT
    assert servers.attempts == [loaded, loaded] and servers.version == 7
    assert not folder.exists()


@pytest.mark.parametrize("recompute_cache", [False, True])
def test_fully_async_updates_are_in_flight(monkeypatch, tmp_path, recompute_cache):
    monkeypatch.setattr(weight_updater, "gather_results", lambda *_: [["", ""]])
    for mode, options in (
        ("fully_async", (True, recompute_cache)),
        ("one_step_off", (False, False)),
    ):
        for method in ("disaggregated", "full_export"):
            config, servers = make_config(tmp_path, method), Servers()
            config.trainer.mode = mode
            config.trainer.asynchronous.recompute_cache = recompute_cache
            weight_updater.connect(config, Group(**OPENED), servers, num_bytes=9).push(7)
            expected = (str(tmp_path / ".weights.partial"), 7) if method == "full_export" else (7,)
            assert servers.attempts[-1][1] == servers.attempts[-1][2] == (*expected, *options)


def test_a_checkpoint_that_could_not_be_written_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(weight_updater, "gather_results", lambda *_: [["No space left", ""]])
    servers = Servers()
    sync = weight_updater.connect(
        make_config(tmp_path, "full_export"), Group(), servers, num_bytes=9
    )
    with pytest.raises(weight_updater.ExportError, match="method='full_export': No space left"):
        sync.push(7)
    assert servers.attempts == []


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("quantization", [None, "fp8_block"])
def test_both_sides_plan_for_the_drafts_and_the_float8_of_the_servers(
    tmp_path, num_tokens, quantization
):
    config, actor, servers = make_config(tmp_path, "disaggregated"), Group(**OPENED), Servers()
    config.rollout.speculative.num_tokens = num_tokens
    config.rollout.quantization = quantization
    weight_updater.connect(config, actor, servers, num_bytes=9)
    _, spec = actor.calls["connect_weights"]
    assert spec == replace(SPEC, drafts=num_tokens > 0, quantization=quantization)
    [(_, (_, spec_of_first, _), (_, spec_of_second, _), *_)] = servers.attempts
    assert spec_of_first == spec_of_second == spec


@pytest.mark.parametrize(
    ("tp", "dp", "ep"), [(1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4)]
)
def test_ranks_of_all_servers_are_numbered_in_a_row(tmp_path, tp, dp, ep):
    config, actor, servers = make_config(tmp_path, "disaggregated"), Group(**OPENED), Servers()
    config.rollout.tp, config.rollout.dp, config.rollout.ep = tp, dp, ep > 1
    weight_updater.connect(config, actor, servers, num_bytes=9)
    assert actor.calls["open_weights"][0] == GenerationLayout(tp=tp, dp=2 * dp, ep=ep)
    [(_, (_, _, first), (_, _, second), *_)] = servers.attempts
    assert (first, second) == (0, tp * dp)


def test_adapters_come_from_the_rank_that_has_them_with_the_alpha_of_the_actor(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(
        weight_updater, "gather_results", lambda *_: [[None, b"", b"adapters", None]]
    )
    config, servers = make_config(tmp_path, "disaggregated"), Servers([1])
    config.rollout.lora, config.actor.lora.alpha = "adapter", 24.0
    weight_updater.connect(config, Group(), servers, num_bytes=9).push(7)
    loaded = "load_adapters", (b"adapters", 24.0, 7), (b"adapters", 24.0, 7), [], LIMIT
    assert servers.attempts == [loaded, loaded] and servers.version == 7
