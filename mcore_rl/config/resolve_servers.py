"""The rules of vLLM servers, of the policy and of frozen models. Pure."""

from __future__ import annotations

from mcore_rl.config.checks import at_least, check_cores, one_of
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig

LOAD_FORMATS = ("auto", "checkpoint", "dummy")


def resolve_servers(config: RolloutConfig) -> None:
    """Check all but how they sample."""
    positive_counts = "num_servers", "tp", "nodes_per_server", "max_response_tokens"
    for name in (*positive_counts, "kv_cache_bytes"):
        at_least(f"rollout.{name}", getattr(config, name), 1)
    resolve_batches("rollout", config)
    num_workers, rest = divmod(config.tp, config.nodes_per_server)
    if rest:
        raise ConfigError(
            f"rollout.nodes_per_server={config.nodes_per_server}; allowed: divisors of "
            f"rollout.tp={config.tp}, since each node has as many workers"
        )
    check_cores("rollout.cores", config.cores, num_workers)
    at_least("rollout.max_restarts", config.max_restarts, 0)
    one_of("rollout.load_format", config.load_format, LOAD_FORMATS)


def resolve_batches(key: str, config: RolloutConfig) -> None:
    """Check the limits of a server's batches; `key` names its settings."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if (value := getattr(config, name)) is not None:
            at_least(f"{key}.{name}", value, 1)
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs
    if tokens is not None and sequences is not None and tokens < sequences:
        raise ConfigError(
            f"{key}.max_num_batched_tokens={tokens}; allowed: at least "
            f"{key}.max_num_seqs={sequences}, a token of each sequence"
        )


def check_batch_of_lane(key: str, config: RolloutConfig, max_tokens: int, device: str) -> None:
    """Refuse batches that the longest sequence does not fit in, where prompts are not split.

    Args:
        key: The name of the server's settings.
        max_tokens: Tokens of the longest sequence.
        device: "cpu" or "cuda".
    """
    tokens = config.max_num_batched_tokens
    if device == "cpu" and tokens is not None and tokens < max_tokens:
        raise ConfigError(
            f"{key}.max_num_batched_tokens={tokens}: the CPU lane runs each prompt in one batch; "
            f"allowed: at least {max_tokens}, its longest sequence"
        )
