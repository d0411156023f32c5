"""Which weights of a model can have low-rank adapters, by its rules alone. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.reshard.rules import Weight


def adapted_linear(weight: Weight) -> str | None:
    """The name of the linear layer whose weight this is; None where no adapter can go.

    Prediction layers (MTP), embeddings and heads have none.
    """
    path, _, parameter = weight.name.rpartition(".")
    linear = path.rpartition(".")[2]
    if weight.layer is None or not linear.startswith("linear_"):
        return None
    return linear if parameter in ("weight", "weight{expert}") else None


def check_targets(key: str, weights: Sequence[Weight], config: LoRAConfig) -> None:
    """Raises ConfigError when a target is no linear layer of the model; `key` names the config."""
    allowed = {name for weight in weights if (name := adapted_linear(weight))}
    if unknown := sorted(set(config.targets) - allowed):
        raise ConfigError(
            f"{key}.targets names {', '.join(unknown)}, which this model does not have; allowed: "
            f"{', '.join(sorted(allowed))}"
        )
