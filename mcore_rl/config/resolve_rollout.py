"""Rules of generation: servers, sampling, agents, frozen models, rewards, evaluation. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mcore_rl.config.checks import (
    check_at_least,
    check_between,
    check_choice,
    check_cores,
    check_positive,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.resolve_algorithm import MAX_WEIGHT
from mcore_rl.config.schema import AgentConfig, RewardConfig, RLConfig, RolloutConfig, SGLangConfig

SERVER_BACKENDS = ("vllm", "sglang")  # or an import path
CODECS = ("auto", "renderers", "template")
LOAD_FORMATS = ("auto", "checkpoint", "dummy")
MAX_DRAFT = 128  # vLLM's limit (v1/sample/rejection_sampler.py, MAX_SPEC_LEN)
QUANTIZATIONS = ("fp8_block",)
ON_ERROR = ("stop", "drop", "zero")
REWARD_TEXTS = ("answer", "response")
# Fields of a term of reward.terms: type, and its name in errors.
_TERM_PARTS: dict[str, tuple[Any, str]] = {
    "name": (str, "text"),
    "weight": (int | float, "a number"),
    "settings": (dict, "settings of that reward, as in {name: value}"),
}
ROLE = "models."  # before its name, the role of a model
_NUMBER = int | float, "a number"
_INTEGER = int, "a whole number"
_TEXT = str, "text"
# Settings of a frozen model.
_MODEL_PARTS: dict[str, tuple[Any, str]] = {
    "path": _TEXT,
    "adapter": _TEXT,
    "backend": _TEXT,
    "num_servers": _INTEGER,
    "tp": _INTEGER,
    "dp": _INTEGER,
    "ep": (bool, "true or false"),
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INTEGER,
    "max_tokens": _INTEGER,
    "max_context": _INTEGER,
    "max_num_seqs": _INTEGER,
    "max_num_batched_tokens": _INTEGER,
    "kv_cache_bytes": _INTEGER,
    "cores": _TEXT,
    "engine": (dict, "arguments of vLLM's engine, {name: value}"),
    "sglang": (dict, "settings as those of rollout.sglang, {name: value}"),
    "codec": _TEXT,
    "timeout_s": _NUMBER,
    "placement": _TEXT,
}
_SGLANG_PARTS: dict[str, tuple[type, str]] = {
    "url": _TEXT,
    "api_key_env": _TEXT,
    "python": _TEXT,
    "arguments": (dict, "arguments of `sglang.launch_server`, {name: value}"),
}
# Settings of an adapter, which the policy's servers serve.
_ADAPTER_PARTS = (
    "adapter", "temperature", "top_p", "top_k", "max_tokens", "max_context", "codec", "placement",
)  # fmt: skip
_SERVER_PARTS = (
    "backend", "num_servers", "tp", "dp", "ep", "temperature", "top_p", "top_k", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_bytes", "cores", "engine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """A reward in a weighted sum."""

    name: str  # in the registry, or an import path
    weight: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of `models`."""

    path: str  # "": what the actor begins with
    adapter: str  # folder; the policy's servers serve it. "": the model has servers of its own
    servers: RolloutConfig  # with max_tokens of an answer as max_response_tokens
    max_context: int  # tokens of a conversation
    codec: str
    timeout_s: float  # of one answer


def resolve_servers(config: RolloutConfig) -> None:
    """Check the settings of servers, but for sampling."""
    check_backend("rollout.backend", config.backend)
    positive_counts = "num_servers", "tp", "dp", "nodes_per_server", "kv_cache_bytes"
    for name in (*positive_counts, "max_response_tokens", "max_images"):
        check_at_least(f"rollout.{name}", getattr(config, name), 1)
    _check_batch_limits("rollout", config)
    _check_data_parallel("rollout", config)
    axis, reason = "tp", "since each node has as many workers"
    if config.dp > 1:
        axis, reason = "dp", "since each node has as many data-parallel ranks"
    if (size := getattr(config, axis)) % config.nodes_per_server:
        raise ConfigError(
            f"rollout.nodes_per_server={config.nodes_per_server}; allowed: divisors of "
            f"rollout.{axis}={size}, {reason}"
        )
    check_cores("rollout.cores", config.cores, config.workers_per_node)
    check_at_least("rollout.max_restarts", config.max_restarts, 0)
    check_between("rollout.speculative.num_tokens", config.speculative.num_tokens, 0, MAX_DRAFT)
    if (num_tokens := config.speculative.num_tokens) and config.dp > 1:
        raise ConfigError(
            f"rollout.speculative.num_tokens={num_tokens} with rollout.dp={config.dp}: drafts of "
            "data-parallel ranks have not been checked; allowed: 0, or rollout.dp=1"
        )
    check_choice("rollout.load_format", config.load_format, LOAD_FORMATS)
    if config.quantization is not None:
        _check_quantization(config, config.quantization)


def _check_quantization(config: RolloutConfig, quantization: str) -> None:
    check_choice("rollout.quantization", quantization, QUANTIZATIONS)
    key = f"rollout.quantization={quantization!r}"
    if config.lora == "adapter":
        raise ConfigError(
            f"{key}: rollout.lora='adapter' would add the trainer's adapters to a base model with "
            "other weights than the trainer's; allowed: null, or rollout.lora='merged'"
        )
    if num_tokens := config.speculative.num_tokens:
        raise ConfigError(
            f"{key} with rollout.speculative.num_tokens={num_tokens}: vLLM's draft model would be "
            "quantized, too, and an update sends its weights in model.dtype; allowed: 0, or "
            "rollout.quantization=null"
        )


def check_quantized_dtype(config: RolloutConfig, dtype: str) -> None:
    """Check that servers in float8 have activations in a dtype that vLLM multiplies them by."""
    if config.quantization is not None and dtype != "bfloat16":
        raise ConfigError(
            f"rollout.quantization={config.quantization!r} with model.dtype={dtype!r}: vLLM "
            "multiplies float8 blocks by activations in bfloat16; allowed: null, or "
            "model.dtype='bfloat16'"
        )


def _check_batch_limits(key: str, config: RolloutConfig) -> None:
    """Check the limits of a server's batches; `key` names its settings."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if (value := getattr(config, name)) is not None:
            check_at_least(f"{key}.{name}", value, 1)
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    if tokens is not None and sequences is not None and tokens < sequences:
        raise ConfigError(
            f"{key}.max_num_batched_tokens={tokens}; allowed: at least "
            f"{key}.max_num_seqs={sequences}, a token of each sequence"
        )


def _check_data_parallel(key: str, config: RolloutConfig) -> None:
    if config.dp > 1 and not config.ep:
        raise ConfigError(
            f"{key}.dp={config.dp} with {key}.ep=false: data-parallel ranks exchange tokens with "
            f"whole experts; allowed: {key}.ep=true, or {key}.num_servers instead of {key}.dp"
        )


def check_lane_batches(config: RLConfig, device: str) -> None:
    """Check the batches of all servers, the policy's and those of models, on "cpu" or "cuda"."""
    check_lane_batch("rollout", config.rollout, config.max_sequence_tokens, device)
    for name, model in build_served_models(config).items():
        key, servers = f"models.{name}", model.servers
        if model.adapter:
            key, servers = "rollout", config.rollout
        check_lane_batch(key, servers, model.max_context, device)


def check_lane_batch(key: str, config: RolloutConfig, max_tokens: int, device: str) -> None:
    """Refuse batches too small for the longest sequence, where prompts are not chunked.

    Args:
        key: Name of the server's settings.
        max_tokens: Tokens of the longest sequence.
        device: "cpu" or "cuda".
    """
    tokens = config.max_num_batched_tokens
    if device == "cpu" and tokens is not None and tokens < max_tokens:
        raise ConfigError(
            f"{key}.max_num_batched_tokens={tokens}: the CPU lane runs each prompt in one batch; "
            f"allowed: at least {max_tokens}, its longest sequence"
        )


def check_backend(key: str, backend: str) -> None:
    if not is_import_path(backend) and backend not in SERVER_BACKENDS:
        names = ", ".join(map(repr, SERVER_BACKENDS))
        raise ConfigError(
            f"{key}={backend!r}; allowed: {names}, or the import path of a GenerationServer, "
            "path/to/file.py:Name"
        )


def resolve_rollout(config: RolloutConfig) -> None:
    resolve_servers(config)
    # Log-probs at temperature 0 do not exist: the policy that is trained must be one that samples.
    check_positive("rollout.temperature", config.temperature)
    check_choice("rollout.lora", config.lora, ("merged", "adapter"))


def resolve_agent(config: AgentConfig, stops: Mapping[str, Sequence[str]]) -> None:
    """Check the settings of agents; `stops` are texts that end a response, by setting."""
    check_choice("agent.codec", config.codec, CODECS)
    check_at_least("agent.max_turns", config.max_turns, 1)
    check_at_least("agent.max_turn_tokens", config.max_turn_tokens, 0)
    check_positive("agent.timeout_s", config.timeout_s)
    check_positive("agent.tool_timeout_s", config.tool_timeout_s)
    for setting, stop in stops.items():
        if config.loop != "single_turn" and stop:
            raise ConfigError(
                f"{setting}={stop}: turns of agent.loop={config.loop!r} end with a token; "
                "allowed: []"
            )
    if config.loop == "tools" and not (config.tools or config.mcp_servers):
        raise ConfigError("agent.loop='tools' needs agent.tools or agent.mcp_servers")
    if config.loop == "environment" and not config.environment:
        raise ConfigError("agent.loop='environment' needs agent.environment")
    for name in ("tools", "mcp_servers", "environment"):
        if getattr(config, name) and config.loop == "single_turn":
            raise ConfigError(
                f"agent.{name} has no part in agent.loop='single_turn'; allowed: another loop"
            )


def resolve_evaluation(config: RLConfig) -> None:
    evaluation, samples = config.evaluation, config.sample_log
    check_at_least("evaluation.every", evaluation.every, 0)
    check_at_least("evaluation.num_samples", evaluation.num_samples, 1)
    if evaluation.temperature is not None:
        check_at_least("evaluation.temperature", evaluation.temperature, 0)
    for part, name in ((config.rollout, "rollout"), (evaluation, "evaluation")):
        if part.top_p is not None and not 0 < part.top_p <= 1:
            raise ConfigError(f"{name}.top_p={part.top_p}; allowed: above 0, up to 1")
        if part.top_k is not None:
            check_at_least(f"{name}.top_k", part.top_k, 0)
        check_stop(f"{name}.stop", part.stop or [])
    for setting, value in asdict(samples).items():
        check_at_least(f"samples.{setting}", value, 0)
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        raise ConfigError(
            f"evaluation.num_samples={evaluation.num_samples}: with evaluation.temperature=0 all "
            "are the same; allowed: 1"
        )
    _resolve_evaluation_length(config)


def check_stop(setting: str, stop: Sequence[str]) -> None:
    if "" in stop:
        raise ConfigError(f"{setting}={list(stop)}; allowed: texts that are not empty")


def _resolve_evaluation_length(config: RLConfig) -> None:
    length = config.evaluation.max_response_tokens
    train_length = config.rollout.max_response_tokens
    if length is None:
        return
    check_at_least("evaluation.max_response_tokens", length, 1)
    if config.agent.loop != "single_turn" and length > train_length:
        raise ConfigError(
            f"evaluation.max_response_tokens={length}: conversations of "
            f"agent.loop={config.agent.loop!r} have one context, in training and evaluation; "
            f"allowed: up to rollout.max_response_tokens={train_length}"
        )


def resolve_drafts(config: RLConfig) -> None:
    """Check that an update sends the prediction layers that servers draft with."""
    num_tokens, coefficient = config.rollout.speculative.num_tokens, config.actor.mtp_loss_coef
    if num_tokens and not coefficient:
        raise ConfigError(
            f"rollout.speculative.num_tokens={num_tokens} with actor.mtp_loss_coef={coefficient}: "
            "the actor has no prediction layers to send with an update; allowed: 0, or "
            "actor.mtp_loss_coef above 0"
        )


def resolve_truncation(config: RLConfig) -> None:
    """Check that training on samples of a truncated distribution (top_p, top_k) is corrected.

    The server's probability of a token is larger there than the trainer's, by the mass of what was
    cut off. An importance weight corrects that for the tokens that can be sampled; the bounds on
    the gaps, which are for rounding, have to leave room for it.
    """
    rollout, trainer = config.rollout, config.trainer
    cut = [f"rollout.top_p={rollout.top_p}"] if rollout.top_p < 1 else []
    cut += [f"rollout.top_k={rollout.top_k}"] if rollout.top_k else []
    is_bounded = None not in (trainer.max_logprob_gap, trainer.mean_logprob_gap)
    if cut and (not config.algorithm.correction.has_weights or not is_bounded):
        raise ConfigError(
            f"{' and '.join(cut)}: servers sample from a part of the distribution that is trained. "
            "Allowed: rollout.top_p=1 and rollout.top_k=0, or to say how training allows for it: "
            "algorithm.correction.level, trainer.max_logprob_gap and trainer.mean_logprob_gap; "
            "evaluation.top_p and evaluation.top_k need nothing"
        )


def resolve_reward(config: RewardConfig) -> None:
    check_choice("reward.on_error", config.on_error, ON_ERROR)
    check_choice("reward.text", config.text, REWARD_TEXTS)
    check_positive("reward.timeout_s", config.timeout_s)
    check_at_least("reward.num_processes", config.num_processes, 1)
    for key, given, default in (
        ("name", config.name, RewardConfig.name),
        ("settings", config.settings, {}),
    ):
        if config.terms and given != default:
            raise ConfigError(
                f"reward.{key}={given!r} has no part in reward.terms={', '.join(config.terms)}; "
                "allowed: one of the two"
            )
    list_reward_terms(config)


def list_reward_terms(config: RewardConfig) -> dict[str, RewardTerm]:
    """Return the rewards of a run by their names in metrics; that of a single one is empty."""
    if not config.terms:
        return {"": RewardTerm(config.name, settings=config.settings)}
    terms = {}
    for name, parts in config.terms.items():
        key = f"reward.terms.{name}"
        if not re.fullmatch("[A-Za-z0-9_-]+", str(name)):
            raise ConfigError(f"{key}; allowed: names of letters, digits, '_' and '-'")
        for part, value in parts.items():
            if part not in _TERM_PARTS:
                raise ConfigError(f"{key}.{part} is unknown; allowed: {', '.join(_TERM_PARTS)}")
            kind, words = _TERM_PARTS[part]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{key}.{part}={value!r}; allowed: {words}")
        terms[name] = RewardTerm(**{"name": name, **parts})
        check_between(f"{key}.weight", terms[name].weight, -MAX_WEIGHT, MAX_WEIGHT)
    return terms


def build_served_models(config: RLConfig) -> dict[str, ServedModel]:
    """Return the frozen models by name.

    Raises:
        ConfigError: A model is not valid.
    """
    return {
        str(name): _build_served_model(f"models.{name}", config, str(name))
        for name in config.models
    }


def build_models_with_servers(config: RLConfig) -> dict[str, ServedModel]:
    """Return the frozen models that are no adapters on the policy's servers, by name."""
    models = build_served_models(config).items()
    return {name: model for name, model in models if not model.adapter}


def resolve_models(config: RLConfig) -> None:
    models, reward = build_served_models(config), config.reward
    term_settings = (term.get("settings") or {} for term in reward.terms.values())
    judges = {settings.get("served_by") for settings in (reward.settings, *term_settings)}
    unused = models.keys() - judges if config.agent.loop == "single_turn" else ()
    if unused:
        raise ConfigError(
            f"models={', '.join(sorted(unused))}: agent.loop='single_turn' talks to the policy "
            "alone, and no reward has it as settings.served_by; allowed: another loop, or none"
        )


def _build_served_model(key: str, config: RLConfig, name: str) -> ServedModel:
    parts = config.models[name]
    if not re.fullmatch("[A-Za-z0-9_-]+", name):
        raise ConfigError(f"{key}; allowed: names of letters, digits, '_' and '-'")
    for part, value in parts.items():
        if part not in _MODEL_PARTS:
            raise ConfigError(f"{key}.{part} is unknown; allowed: {', '.join(_MODEL_PARTS)}")
        kind, words = _MODEL_PARTS[part]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{key}.{part}={value!r}; allowed: {words}")
    if (placement := parts.get("placement", "own")) != "own":
        raise ConfigError(
            f"{key}.placement={placement!r}: servers that leave their devices to others lose their "
            "weights, and no trainer sends these again; allowed: 'own'"
        )
    given = {part: parts[part] for part in _SERVER_PARTS if part in parts}
    sglang = parts.get("sglang", {})
    for part, value in sglang.items():
        kind, words = _SGLANG_PARTS.get(part, (None, ", ".join(_SGLANG_PARTS)))
        if kind is None or not isinstance(value, kind):
            raise ConfigError(f"{key}.sglang.{part}={value!r}; allowed: {words}")
    servers = RolloutConfig(
        **given,
        max_response_tokens=parts.get("max_tokens", 1024),
        sglang=SGLangConfig(**sglang),
    )
    context = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    model = ServedModel(
        path=parts.get("path", ""),
        adapter=parts.get("adapter", ""),
        servers=servers,
        max_context=parts.get("max_context", context),
        codec=parts.get("codec", "auto"),
        timeout_s=float(parts.get("timeout_s", 300.0)),
    )
    _check_served_model(key, model)
    if model.adapter:
        _check_adapter(key, model, config, parts)
    return model


def _check_adapter(
    key: str, model: ServedModel, config: RLConfig, parts: Mapping[str, object]
) -> None:
    """Check what an adapter on the policy's servers needs; `parts` are the settings of `key`."""
    for part in parts:
        if part not in _ADAPTER_PARTS:
            raise ConfigError(
                f"{key}.{part}={parts[part]!r}: the policy's servers serve {key}.adapter; allowed: "
                f"{', '.join(_ADAPTER_PARTS)}"
            )
    where = f"{key}.adapter={model.adapter!r}"
    if config.rollout.lora != "adapter":
        raise ConfigError(
            f"{where} with rollout.lora={config.rollout.lora!r}: updates change the weights on the "
            "servers, and it is of model.path; allowed: rollout.lora='adapter'"
        )
    if config.warm_start.num_steps:
        raise ConfigError(
            f"{where} with warm_start.num_steps={config.warm_start.num_steps}: a warm start "
            "changes the weights, and it is of model.path; allowed: 0"
        )


def _check_served_model(key: str, model: ServedModel) -> None:
    servers = model.servers
    check_backend(f"{key}.backend", servers.backend)
    for name in ("num_servers", "tp", "dp", "kv_cache_bytes"):
        check_at_least(f"{key}.{name}", getattr(servers, name), 1)
    _check_batch_limits(key, servers)
    _check_data_parallel(key, servers)
    check_at_least(f"{key}.max_tokens", servers.max_response_tokens, 1)
    check_at_least(f"{key}.max_context", model.max_context, 2)
    check_at_least(f"{key}.temperature", servers.temperature, 0)
    check_positive(f"{key}.top_p", servers.top_p)
    check_between(f"{key}.top_p", servers.top_p, 0, 1)
    check_at_least(f"{key}.top_k", servers.top_k, 0)
    check_choice(f"{key}.codec", model.codec, CODECS)
    check_positive(f"{key}.timeout_s", model.timeout_s)
    check_cores(f"{key}.cores", servers.cores, servers.num_workers)
