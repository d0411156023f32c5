"""Settings that make a job fit its devices: which are tried, and which suffice.

docs/planning.md lists what is tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_train import get_data_config
from mcore_rl.config.schema import EngineConfig, RLConfig, TrainConfig
from mcore_rl.jobs.run_plan import CRITIC, plan_run
from mcore_rl.models.base import HFConfig, get_model_sizes, read_config

Change = tuple[tuple[str, Any], ...]  # dotted settings and their values
Changes = dict[str, tuple[Change, str]]  # by name, the cheapest first; each with its cost
Config = TypeVar("Config", bound=RLConfig | TrainConfig)
# Kinds of changes, the cheapest first.
_KINDS = (
    "distributed optimizer",
    "selective recompute",
    "micro-batches",
    "full recompute",
    "KV cache",
    "ep",
    "tp",
    "pp",
    "cp",
    "servers' tp",
    "Adam on the host",
    "GPUs",
)


@dataclass(frozen=True, slots=True)
class Fix:
    """Settings that make a job fit, or that come closest."""

    overrides: tuple[str, ...]
    cost: str
    total: int  # bytes of the fullest rank
    fits: bool


@dataclass(frozen=True, slots=True)
class _Engine:
    """A training engine of a job, by the key of its settings."""

    key: str
    settings: EngineConfig
    has_experts: bool
    longest: int  # tokens of a sequence
    is_trained: bool = True


def list_changes(config: RLConfig, model: HFConfig) -> Changes:
    """Return the changes of an RL run that find_fixes tries.

    Those of the reference are the actor's; teachers share their settings.
    """
    actor, rollout = config.actor, config.rollout
    engines = [_build_engine("actor", actor, model, config.max_sequence_tokens)]
    run = plan_run(config)
    if CRITIC in run:
        engines.append(_build_engine("critic", config.critic, model, config.max_sequence_tokens))
    frozen = {role.name.partition(".")[0]: role for role in run if role.is_scoring()}
    for key, role in frozen.items():
        scored, settings = read_config(role.path), getattr(config, key)
        engines.append(
            _build_engine(key, settings, scored, config.max_sequence_tokens, is_trained=False)
        )
    servers: list[tuple[str, Change, str]] = []
    if rollout.kv_cache_bytes is not None:  # else it is as large as there is room for
        halved: Change = (("rollout.kv_cache_bytes", rollout.kv_cache_bytes // 2),)
        servers.append(("KV cache", halved, "fewer sequences at once"))
    doubled: Change = (("rollout.num_servers", 2 * rollout.num_servers),)
    if rollout.num_servers % 2 == 0:
        change: Change = (
            ("rollout.tp", 2 * rollout.tp),
            ("rollout.num_servers", rollout.num_servers // 2),
        )
        servers.append(("servers' tp", change, "more communication while generating"))
    return _sort_changes(engines, servers, doubled)


def list_supervised_changes(config: TrainConfig, model: HFConfig) -> Changes:
    """Return the changes of a supervised job that find_fixes tries."""
    longest = get_data_config(config).token_limit
    return _sort_changes([_build_engine("engine", config.engine, model, longest)], [], ())


def _build_engine(
    key: str, settings: EngineConfig, model: HFConfig, longest: int, *, is_trained: bool = True
) -> _Engine:
    has_experts = bool(get_model_sizes(model).num_experts)
    return _Engine(key, settings, has_experts, longest, is_trained)


def _sort_changes(
    engines: Sequence[_Engine], other: Sequence[tuple[str, Change, str]], more_servers: Change
) -> Changes:
    """Return the changes of engines and servers by name, the cheapest first."""
    changes = [(kind, kind, change, cost) for kind, change, cost in other]
    for engine in engines:
        changes += [
            (kind, f"{engine.key}: {kind}", change, cost)
            for kind, change, cost in _list_engine_changes(engine)
        ]
    more: Change = tuple(
        (f"{engine.key}.layout.dp", 2 * engine.settings.layout.dp)
        for engine in engines
        if engine.is_trained
    )
    changes.append(("GPUs", "GPUs", more + more_servers, "twice the GPUs"))
    changes.sort(key=lambda change: _KINDS.index(change[0]))
    return {name: (change, cost) for _, name, change, cost in changes}


def _list_engine_changes(engine: _Engine) -> Iterator[tuple[str, Change, str]]:
    """Yield kind, change and cost of the changes of an engine."""
    key, settings, layout = engine.key, engine.settings, engine.settings.layout
    recompute, optimizer = settings.recompute, settings.optimizer
    least = -(-engine.longest // layout.cp)
    if settings.max_tokens_per_micro_batch > least:
        change: Change = ((f"{key}.max_tokens_per_micro_batch", least),)
        yield "micro-batches", change, "smaller micro-batches"
    if engine.has_experts:
        yield "ep", ((f"{key}.layout.ep", 2 * layout.ep),), "more communication"
    if layout.dp % 2 == 0:
        for axis in ("tp", "pp", "cp"):
            doubled = (f"{key}.layout.{axis}", 2 * getattr(layout, axis))
            yield axis, (doubled, (f"{key}.layout.dp", layout.dp // 2)), "more communication"
    if not engine.is_trained:
        return
    granularity = f"{key}.recompute.granularity"
    if recompute.granularity == "none":
        modules = ["moe_act"] if engine.has_experts else ["layernorm", "mlp"]
        change = (granularity, "selective"), (f"{key}.recompute.modules", modules)
        yield "selective recompute", change, "recomputes cheap parts of layers"
    if recompute.granularity != "full":
        cost = "a third more flops in the update"
        yield "full recompute", ((granularity, "full"),), cost
    distributed: Change = ()
    if not optimizer.distributed:
        distributed = ((f"{key}.optimizer.distributed", True),)
        if layout.dp * layout.cp > 1:
            yield "distributed optimizer", distributed, "no time"
    if not optimizer.cpu_offload:  # it needs a distributed optimizer
        change = (*distributed, (f"{key}.optimizer.cpu_offload", True))
        yield "Adam on the host", change, "Adam runs on the host"


def find_fixes(
    config: Config,
    list_changes: Callable[[Config], Changes],
    count_bytes: Callable[[Config], int],
    memory_bytes: int,
) -> list[Fix]:
    """Find the changes that make a job fit: each alone, and the cheapest ones together.

    Args:
        count_bytes: Returns the bytes of the fullest rank; raises ConfigError for settings that
            cannot be.
        memory_bytes: Of a device.

    Returns:
        Single changes that suffice, the cheapest first. If none does, the cheapest changes that do
        together, on as many GPUs if possible; if none do, all that help.
    """
    singles = []
    for change, cost in list_changes(config).values():
        total = _try_change(config, change, count_bytes)
        if total is not None and total <= memory_bytes:
            singles.append(Fix(_format_change(change), cost, total, True))
    return singles or _combine_changes(config, list_changes, count_bytes, memory_bytes)


def _combine_changes(
    config: Config,
    list_changes: Callable[[Config], Changes],
    count_bytes: Callable[[Config], int],
    memory_bytes: int,
) -> list[Fix]:
    """Apply the cheapest change that helps, again and again, each once, until the job fits.

    What is the fullest moment differs after each: one that did not help before may help now.
    """
    total = count_bytes(config)
    costs: dict[str, str] = {}
    settings: dict[str, Any] = {}
    while total > memory_bytes:
        for name, (change, cost) in list_changes(config).items():
            if name in costs:
                continue
            changed_total = _try_change(config, change, count_bytes)
            if changed_total is not None and changed_total < total:
                config, total = apply_change(config, change), changed_total
                costs[name], settings = cost, settings | dict(change)
                break
        else:
            break
    if not settings:
        return []
    cost = "; ".join(dict.fromkeys(costs.values()))
    overrides = _format_change(tuple(settings.items()))
    return [Fix(overrides, cost, total, total <= memory_bytes)]


def _format_change(change: Change) -> tuple[str, ...]:
    return tuple(f"{key}={format_value(value)}" for key, value in change)


def _try_change(config: Config, change: Change, count_bytes: Callable[[Config], int]) -> int | None:
    """Return the bytes of the fullest rank with a change; None if it cannot be."""
    try:
        return count_bytes(apply_change(config, change))
    except ConfigError:
        return None


def apply_change(config: Config, change: Change) -> Config:
    """Return a copy of the settings with other values."""
    changed = copy.deepcopy(config)
    for key, value in change:
        *path, name = key.split(".")
        owner: Any = changed
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return changed


def format_value(value: object) -> str:
    """Return the value of a setting as it is pasted after `KEY=`.

    >>> format_value(["mlp", "layernorm"]), format_value(True), format_value(None)
    ('[mlp,layernorm]', 'true', 'null')
    """
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
