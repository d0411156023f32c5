"""Rules of generation: servers, sampling, agents, frozen models, rewards, evaluation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rl.config.checks import check_cores
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import build_settings
from mcore_rl.config.schema import (
    AgentConfig,
    RewardConfig,
    RewardTerm,
    RLConfig,
    RolloutConfig,
    ServedModelConfig,
    SGLangConfig,
)

ROLE = "models."  # before its name, the role of a model
# Agent loops whose trajectories are scored by config.reward; other loops may score by themselves.
REWARDED_LOOPS = ("single_turn", "tools", "program", "user")
# Settings of a frozen model that are those of its servers, under the same names.
_SERVER_PARTS = (
    "backend", "num_servers", "tp", "dp", "ep", "temperature", "top_p", "top_k", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_bytes", "cores", "engine",
)  # fmt: skip
# Settings of an adapter, which the policy's servers serve.
_ADAPTER_PARTS = (
    "adapter", "temperature", "top_p", "top_k", "max_tokens", "max_context", "codec", "placement",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of `models`."""

    path: str  # "": what the actor begins with
    adapter: str  # folder; the policy's servers serve it. "": the model has servers of its own
    servers: RolloutConfig  # with max_tokens of an answer as max_response_tokens
    max_context: int  # tokens of a conversation
    codec: str
    timeout_s: float  # of one answer


def validate_servers(config: RolloutConfig) -> None:
    """Check the rules between settings of the policy's servers."""
    _validate_batch_limits("rollout", config)
    _validate_data_parallel("rollout", config)
    axis, reason = "tp", "since each node has as many workers"
    if config.dp > 1:
        axis, reason = "dp", "since each node has as many data-parallel ranks"
    if (size := getattr(config, axis)) % config.nodes_per_server:
        raise ConfigError(
            f"rollout.nodes_per_server={config.nodes_per_server}; allowed: divisors of "
            f"rollout.{axis}={size}, {reason}"
        )
    check_cores("rollout.cores", config.cores, config.workers_per_node)
    if (num_tokens := config.speculative.num_tokens) and config.dp > 1:
        raise ConfigError(
            f"rollout.speculative.num_tokens={num_tokens} with rollout.dp={config.dp}: drafts of "
            "data-parallel ranks have not been checked; allowed: 0, or rollout.dp=1"
        )
    if config.quantization is not None:
        _validate_quantization(config, config.quantization)


def _validate_quantization(config: RolloutConfig, quantization: str) -> None:
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


def validate_quantized_dtype(config: RolloutConfig, dtype: str) -> None:
    """Check that servers in float8 have activations in a dtype that vLLM multiplies them by."""
    if config.quantization is not None and dtype != "bfloat16":
        raise ConfigError(
            f"rollout.quantization={config.quantization!r} with model.dtype={dtype!r}: vLLM "
            "multiplies float8 blocks by activations in bfloat16; allowed: null, or "
            "model.dtype='bfloat16'"
        )


def _validate_batch_limits(key: str, config: RolloutConfig) -> None:
    """Check the limits of a server's batches; `key` names its settings."""
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    if tokens is not None and sequences is not None and tokens < sequences:
        raise ConfigError(
            f"{key}.max_num_batched_tokens={tokens}; allowed: at least "
            f"{key}.max_num_seqs={sequences}, a token of each sequence"
        )


def _validate_data_parallel(key: str, config: RolloutConfig) -> None:
    if config.dp > 1 and not config.ep:
        raise ConfigError(
            f"{key}.dp={config.dp} with {key}.ep=false: data-parallel ranks exchange tokens with "
            f"whole experts; allowed: {key}.ep=true, or {key}.num_servers instead of {key}.dp"
        )


def validate_batches_on_device(config: RLConfig, device: str) -> None:
    """Check the batches of all servers, the policy's and those of models, on "cpu" or "cuda"."""
    validate_batch_on_device("rollout", config.rollout, config.max_sequence_tokens, device)
    for name, model in build_served_models(config).items():
        key, servers = f"models.{name}", model.servers
        if model.adapter:
            key, servers = "rollout", config.rollout
        validate_batch_on_device(key, servers, model.max_context, device)


def validate_batch_on_device(key: str, config: RolloutConfig, max_tokens: int, device: str) -> None:
    """Refuse batches too small for the longest sequence, where prompts are not chunked.

    Args:
        key: Name of the server's settings.
        max_tokens: Tokens of the longest sequence.
        device: "cpu" or "cuda".
    """
    tokens = config.max_num_batched_tokens
    if device == "cpu" and tokens is not None and tokens < max_tokens:
        raise ConfigError(
            f"{key}.max_num_batched_tokens={tokens}: vLLM on a CPU runs each prompt in one batch; "
            f"allowed: at least {max_tokens}, its longest sequence"
        )


def validate_agent(config: AgentConfig, stops: Mapping[str, Sequence[str]]) -> None:
    """Check the settings of agents; `stops` are texts that end a response, by setting."""
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


def validate_evaluation(config: RLConfig) -> None:
    evaluation = config.evaluation
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        raise ConfigError(
            f"evaluation.num_samples={evaluation.num_samples}: with evaluation.temperature=0 all "
            "are the same; allowed: 1"
        )
    length, train_length = evaluation.max_response_tokens, config.rollout.response_limit
    if config.agent.loop != "single_turn" and (length or 0) > train_length:
        raise ConfigError(
            f"evaluation.max_response_tokens={length}: conversations of "
            f"agent.loop={config.agent.loop!r} have one context, in training and evaluation; "
            f"allowed: up to rollout.max_response_tokens={train_length}"
        )


def validate_drafts(config: RLConfig) -> None:
    """Check that an update sends the prediction layers that servers draft with."""
    num_tokens, coefficient = config.rollout.speculative.num_tokens, config.actor.mtp_loss_coef
    if num_tokens and not coefficient:
        raise ConfigError(
            f"rollout.speculative.num_tokens={num_tokens} with actor.mtp_loss_coef={coefficient}: "
            "the actor has no prediction layers to send with an update; allowed: 0, or "
            "actor.mtp_loss_coef above 0"
        )


def validate_truncation(config: RLConfig) -> None:
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


def validate_reward(config: RewardConfig) -> None:
    for key, given, default in (
        ("name", config.name, RewardConfig.name),
        ("settings", config.settings, {}),
    ):
        if config.terms and given != default:
            raise ConfigError(
                f"reward.{key}={given!r} has no part in reward.terms={', '.join(config.terms)}; "
                "allowed: one of the two"
            )


def list_reward_terms(config: RewardConfig) -> dict[str, RewardTerm]:
    """Return the rewards of a run by their names in metrics; that of a single one is empty."""
    if not config.terms:
        return {"": RewardTerm(config.name, settings=config.settings)}
    terms = {}
    for name, settings in config.terms.items():
        term = build_settings(f"reward.terms.{name}", RewardTerm, settings)
        terms[name] = replace(term, name=term.name or name)
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


def validate_served_models(config: RLConfig) -> None:
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
    given = config.models[name]
    settings = build_settings(key, ServedModelConfig, given)
    if settings.placement != "own":
        raise ConfigError(
            f"{key}.placement={settings.placement!r}: servers that leave their devices to others "
            "lose their weights, and no trainer sends these again; allowed: 'own'"
        )
    servers = RolloutConfig(
        **{part: getattr(settings, part) for part in _SERVER_PARTS},
        max_response_tokens=settings.max_tokens,
        sglang=SGLangConfig(**settings.sglang),
    )
    context = config.data.prompt_limit + config.rollout.response_limit
    model = ServedModel(
        path=settings.path,
        adapter=settings.adapter,
        servers=servers,
        max_context=settings.max_context or context,
        codec=settings.codec,
        timeout_s=settings.timeout_s,
    )
    _validate_batch_limits(key, servers)
    _validate_data_parallel(key, servers)
    check_cores(f"{key}.cores", servers.cores, servers.num_workers)
    if model.adapter:
        _validate_adapter(key, model, config, given)
    return model


def _validate_adapter(
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
