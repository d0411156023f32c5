"""Checks of rollout.quantization against a model and the layouts of both sides."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mcore_rl.checkpoint.fp8 import build_quantization_config, is_block_quantized
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.engine.base import load_backend
from mcore_rl.inference.registry import load_server_class
from mcore_rl.models.base import HFConfig, get_family
from mcore_rl.reshard.float8 import BlockScales
from mcore_rl.reshard.layout import Ranks
from mcore_rl.reshard.rules import Shard, Weight
from mcore_rl.rollout.weight_updater import build_generation_layout
from mcore_rl.weight_sync.spec import (
    add_training_scales,
    build_generation_side,
    build_training_side,
)

_PROJECTION = re.compile(r"_proj\w*\.weight$")


def check_quantization(config: RLConfig, hf_config: HFConfig, *, is_trained: bool = True) -> None:
    """Check that servers take the model in float8, and that no rank's shard cuts a block.

    Args:
        is_trained: Whether the servers get weights from the actor.

    Raises:
        ConfigError: The servers or the family have no float8, or a shard of a layout cuts a block.
    """
    key = f"rollout.quantization={config.rollout.quantization!r}"
    if not load_server_class(config.rollout).features.quantization:
        raise ConfigError(
            f"{key}: servers of rollout.backend={config.rollout.backend!r} take weights in "
            "model.dtype; allowed: null, or rollout.backend='vllm'"
        )
    family = get_family(hf_config)
    if family.vllm_weights is None:
        raise ConfigError(
            f"{key}: the family {family.name!r} has no rules of vLLM's parameters, of which some "
            "are in float8; allowed: null"
        )
    _check_projections(key, family.name, family.vllm_weights(hf_config))
    layout = build_generation_layout(config.rollout, config.rollout.num_servers)
    ranks, (_, served) = build_generation_side(
        hf_config, layout, quantization=config.rollout.quantization
    )
    for weight in served:
        if weight.expert is not None and weight.itemsize is None:
            raise ConfigError(
                f"{key}: the family {family.name!r} has experts ({weight.name}) that no checkpoint "
                "has in float8 blocks, and vLLM takes none of them; allowed: null"
            )
    _check_blocks(f"{key} with rollout.tp={config.rollout.tp}", ranks, served)
    if not is_trained or config.weight_sync.method == "full_export":  # servers quantise tensors
        return
    engine = config.actor
    training = build_training_side(
        hf_config,
        engine.layout,
        family.num_mtp_layers(hf_config) if engine.mtp_loss_coef else 0,
        load_backend(engine, "actor").shard_format,
        engine.fsdp.num_replicas,
    )
    trained = [weight for weight in training[1] if weight.stage != "mtp"]  # is not served
    key = f"{key} with actor.layout ({engine.backend})"
    _check_blocks(key, *add_training_scales((training[0], trained)))


def _check_projections(key: str, family: str, weights: Sequence[Weight]) -> None:
    """Check that vLLM has in float8 what a checkpoint has in float8 blocks."""
    tensors = [tensor for weight in weights for tensor in weight.rule.tensors]
    plain_modules = build_quantization_config(t.name for t in tensors).get("modules_to_not_convert")
    plain = {f"{module}.weight" for module in plain_modules or ()}
    quantized = {tensor.name for tensor in tensors if is_block_quantized(*tensor[:2])}
    if not quantized:
        raise ConfigError(
            f"{key}: no tensor of the family {family!r} has the name of a projection that float8 "
            "checkpoints have; allowed: null"
        )
    for weight in weights:
        if weight.expert is not None:
            continue
        names = [tensor.name for tensor in weight.rule.tensors]
        missing = [name for name in names if name not in quantized | plain]
        if missing and any(map(_PROJECTION.search, names)):
            raise ConfigError(
                f"{key}: the family {family!r} has {missing[0]}, which no checkpoint has in float8 "
                "blocks here; allowed: null"
            )


def _check_blocks(key: str, ranks: Ranks, weights: Sequence[Weight]) -> None:
    """Check the shards of all weights; experts are equal, and the first stands for them."""
    for weight in weights:
        if not isinstance(weight.rule, BlockScales) or weight.expert:
            continue
        count = len(ranks.get_holders(weight))
        try:
            for index in range(count):
                weight.rule.get_blocks(Shard(index, count))
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}, or rollout.quantization=null") from None
