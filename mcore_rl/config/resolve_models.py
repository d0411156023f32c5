"""Rules of `models`: frozen models with servers of their own, beside the policy. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.agent_schema import CODECS
from mcore_rl.config.checks import at_least, between, check_cores, one_of, positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_servers import check_batch_of_lane, resolve_batches
from mcore_rl.config.schema import RLConfig, RolloutConfig

ROLE = "models."  # before its name, the role of a model
_NUMBER = int | float, "a number"
_WHOLE = int, "a whole number"
_TEXT = str, "text"
# What a model may have.
_PARTS: dict[str, tuple[Any, str]] = {
    "path": _TEXT,
    "num_servers": _WHOLE,
    "tp": _WHOLE,
    "ep": (bool, "true or false"),
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "max_tokens": _WHOLE,
    "max_context": _WHOLE,
    "max_num_seqs": _WHOLE,
    "max_num_batched_tokens": _WHOLE,
    "kv_cache_bytes": _WHOLE,
    "cores": _TEXT,
    "codec": _TEXT,
    "timeout_s": _NUMBER,
    "placement": _TEXT,
}
_OF_SERVERS = (
    "num_servers", "tp", "ep", "temperature", "top_p", "top_k", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_bytes", "cores",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of `models`."""

    path: str  # "": what the actor begins with
    servers: RolloutConfig  # with max_tokens of an answer as max_response_tokens
    max_context: int  # tokens of a conversation
    codec: str
    timeout_s: float  # of one answer


def served_models(config: RLConfig) -> dict[str, ServedModel]:
    """By name. Raises ConfigError for one that is not valid."""
    return {str(name): _model(f"models.{name}", config, str(name)) for name in config.models}


def resolve_models(config: RLConfig) -> None:
    models, reward = served_models(config), config.reward
    of_terms = (term.get("settings") or {} for term in reward.terms.values())
    judges = {settings.get("served_by") for settings in (reward.settings, *of_terms)}
    unused = models.keys() - judges if config.agent.loop == "single_turn" else ()
    if unused:
        raise ConfigError(
            f"models={', '.join(sorted(unused))}: agent.loop='single_turn' talks to the policy "
            "alone, and no reward has it as settings.served_by; allowed: another loop, or none"
        )


def check_batches_of_lane(config: RLConfig, device: str) -> None:
    """Check the batches of all servers, the policy's and those of models, on "cpu" or "cuda"."""
    check_batch_of_lane("rollout", config.rollout, config.max_sequence_tokens, device)
    for name, model in served_models(config).items():
        check_batch_of_lane(f"models.{name}", model.servers, model.max_context, device)


def _model(key: str, config: RLConfig, name: str) -> ServedModel:
    parts = config.models[name]
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise ConfigError(f"{key}; allowed: names of letters, digits, '_' and '-'")
    for part, value in parts.items():
        if part not in _PARTS:
            raise ConfigError(f"{key}.{part} is unknown; allowed: {', '.join(_PARTS)}")
        kind, words = _PARTS[part]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{key}.{part}={value!r}; allowed: {words}")
    if (placement := parts.get("placement", "own")) != "own":
        raise ConfigError(
            f"{key}.placement={placement!r}: servers that leave their devices to others lose their "
            "weights, and no trainer sends these again; allowed: 'own'"
        )
    given = {part: parts[part] for part in _OF_SERVERS if part in parts}
    servers = RolloutConfig(**given, max_response_tokens=parts.get("max_tokens", 1024))
    context = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    found = ServedModel(
        path=parts.get("path", ""),
        servers=servers,
        max_context=parts.get("max_context", context),
        codec=parts.get("codec", "auto"),
        timeout_s=float(parts.get("timeout_s", 300.0)),
    )
    _check(key, found)
    return found


def _check(key: str, model: ServedModel) -> None:
    servers = model.servers
    for name in ("num_servers", "tp", "kv_cache_bytes"):
        at_least(f"{key}.{name}", getattr(servers, name), 1)
    resolve_batches(key, servers)
    at_least(f"{key}.max_tokens", servers.max_response_tokens, 1)
    at_least(f"{key}.max_context", model.max_context, 2)
    at_least(f"{key}.temperature", servers.temperature, 0)
    positive(f"{key}.top_p", servers.top_p)
    between(f"{key}.top_p", servers.top_p, 0, 1)
    at_least(f"{key}.top_k", servers.top_k, 0)
    one_of(f"{key}.codec", model.codec, CODECS)
    positive(f"{key}.timeout_s", model.timeout_s)
    check_cores(f"{key}.cores", servers.cores, servers.tp)
