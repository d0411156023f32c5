"""Rules of the settings of a training engine, alone and with the model. Pure.

A rule that fails raises ConfigError naming the setting, its value and what is allowed. What
Megatron would do wrongly without an error is refused here, or corrected in the engine.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from mcore_rl.config.allowed import (
    DISPATCHERS,
    EXPERT_MODULES,
    LAYER_MODULES,
    RECOMPUTE_MODULES,
)
from mcore_rl.config.checks import check_choice, check_divides
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import check_limits
from mcore_rl.config.schema import EngineConfig, Float8Config, Layout, LoRAConfig, OptimizerConfig


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model that the settings of an engine have to fit."""

    num_attention_heads: int
    num_query_groups: int
    ffn_sizes: tuple[int, ...]  # columns of dense and shared MLPs, which tp splits
    num_experts: int  # 0 for a dense model
    expert_ffn_size: int
    num_layers: int
    num_mtp_layers: int = 0
    has_router_bias: bool = False  # a selection bias that balances without a loss
    is_mla: bool = False  # multi-head latent attention
    is_tied: bool = False  # one weight for embedding and output head
    has_expert_biases: bool = False
    has_indexer: bool = False  # sparse attention
    num_linear_heads: int = 0  # key heads of gated delta nets, which tp and cp split


def validate_engine(key: str, config: EngineConfig) -> None:
    """Check the rules between settings of every engine; `key` names the group, such as actor.

    A backend checks what only some engines have (engine/base.py).
    """
    validate_layout(f"{key}.layout", config.layout)
    validate_optimizer(f"{key}.optimizer", config.optimizer)


def validate_plain_engine(key: str, config: EngineConfig) -> None:
    """Check the settings of an engine other than the actor's, without adapters or replay."""
    validate_engine(key, config)
    if config.lora.rank or config.moe.router_replay != "off":
        raise ConfigError(f"{key}.lora and {key}.moe.router_replay: allowed: none, and 'off'")
    if config.indexer_replay != "off":
        raise ConfigError(f"{key}.indexer_replay={config.indexer_replay!r}; allowed: 'off'")


def validate_megatron(key: str, config: EngineConfig) -> None:
    """Check the settings that Megatron reads, for its backend."""
    validate_lora(f"{key}.lora", config.lora)
    check_choice(f"{key}.modules", config.modules, LAYER_MODULES)
    check_choice(f"{key}.moe.dispatcher", config.moe.dispatcher, DISPATCHERS)
    for name in config.recompute.modules:
        check_choice(f"{key}.recompute.modules", name, RECOMPUTE_MODULES)
    _validate_float8(key, config)
    if config.moe.dispatcher == "allgather" and config.layout.pp > 1:
        raise ConfigError(
            f"{key}.moe.dispatcher='allgather' with {key}.layout.pp={config.layout.pp}: packs of a "
            "pipeline differ in length, which that dispatcher does not take; allowed: 'alltoall'"
        )
    if config.moe.overlap:
        _validate_overlap(key, config)
    if config.optimizer.cpu_offload and not config.optimizer.distributed:
        raise ConfigError(
            f"{key}.optimizer.cpu_offload=true needs {key}.optimizer.distributed=true; "
            f"{key}.optimizer.distributed=false"
        )
    if config.mtp_loss_coef:
        _validate_mtp(key, config)


def _validate_overlap(key: str, config: EngineConfig) -> None:
    """Check what Megatron's schedule of overlapped exchanges (combined_1f1b.py) needs."""
    moe, layout, recompute = config.moe, config.layout, config.recompute
    modules = recompute.modules if recompute.granularity == "selective" else []
    for name, value, is_allowed, allowed in (
        ("moe.dispatcher", moe.dispatcher, moe.dispatcher != "allgather", "'alltoall', 'flex'"),
        ("moe.router_replay", moe.router_replay, moe.router_replay == "off", "'off'"),
        ("layout.ep", layout.ep, layout.ep > 1, "above 1"),
        ("layout.vpp", layout.vpp, layout.pp == 1 or layout.vpp > 1, "above 1 with pp above 1"),
        ("recompute.granularity", recompute.granularity, recompute.granularity != "full",
         "'none', 'selective'"),
        ("recompute.modules", modules, "moe" not in modules, "modules other than 'moe'"),
        ("mtp_loss_coef", config.mtp_loss_coef, not config.mtp_loss_coef, "0"),
        ("lora.rank", config.lora.rank, not config.lora.rank, "0"),
    ):  # fmt: skip
        if not is_allowed:
            raise ConfigError(
                f"{key}.moe.overlap=true with {key}.{name}={value!r}; allowed: {allowed}"
            )


def validate_overlap_dtype(key: str, config: EngineConfig, dtype: str) -> None:
    """Check that a model whose exchanges are overlapped is not in float32."""
    if config.moe.overlap and dtype != "bfloat16":
        raise ConfigError(
            f"{key}.moe.overlap=true with model.dtype={dtype!r}: Megatron overlaps exchanges of "
            "bfloat16 alone; allowed: model.dtype='bfloat16'"
        )


def _validate_float8(key: str, config: EngineConfig) -> None:
    """Check the settings of float8 products, except for what they need of GPUs."""
    fp8 = config.fp8
    defaults = asdict(Float8Config())
    for name, value in asdict(fp8).items():
        if fp8.recipe == "off" and value != defaults[name]:
            raise ConfigError(
                f"{key}.fp8.{name}={value!r} with {key}.fp8.recipe='off'; allowed: "
                f"{defaults[name]!r}, or another recipe"
            )
    if fp8.recipe != "off" and config.lora.rank:
        raise ConfigError(
            f"{key}.fp8.recipe={fp8.recipe!r} with {key}.lora.rank={config.lora.rank}: products "
            "with adapters have not been checked in float8; allowed: 'off', or a rank of 0"
        )


def _validate_float8_layers(key: str, config: EngineConfig, sizes: ModelSizes) -> None:
    """Check that the layers that stay in bfloat16 fit the model and the layout."""
    fp8, layout = config.fp8, config.layout
    most = sizes.num_layers // layout.pp
    for name in ("bf16_layers_at_start", "bf16_layers_at_end"):
        if (count := getattr(fp8, name)) > most:
            raise ConfigError(
                f"{key}.fp8.{name}={count}; allowed: 0 to {most}, the layers of a pipeline rank"
            )
    if fp8.bf16_layers_at_start + fp8.bf16_layers_at_end >= max(sizes.num_layers, 1):
        raise ConfigError(
            f"{key}.fp8.bf16_layers_at_start={fp8.bf16_layers_at_start} and bf16_layers_at_end="
            f"{fp8.bf16_layers_at_end}: none of the {sizes.num_layers} layers is left in float8"
        )


def validate_float8_dtype(key: str, config: EngineConfig, dtype: str) -> None:
    """Check that a model with float8 products is not in float32."""
    if config.fp8.recipe != "off" and dtype != "bfloat16":
        raise ConfigError(
            f"{key}.fp8.recipe={config.fp8.recipe!r} with model.dtype={dtype!r}: float8 products "
            "have results in bfloat16; allowed: model.dtype='bfloat16'"
        )


def validate_fsdp(key: str, config: EngineConfig) -> None:
    """Check the settings that FSDP reads, for its backend."""
    validate_lora(f"{key}.lora", config.lora)
    if (granularity := config.recompute.granularity) not in ("none", "full"):
        raise ConfigError(
            f"{key}.recompute.granularity={granularity!r}: fsdp recomputes whole layers; allowed: "
            "'full', 'none'"
        )
    layout, replicas = config.layout, config.fsdp.num_replicas
    if layout.world_size % (replicas * layout.ep):
        raise ConfigError(
            f"{key}.fsdp.num_replicas={replicas} with {key}.layout.ep={layout.ep}; allowed: a "
            f"product that divides the {layout.world_size} ranks (dp * cp)"
        )


def validate_lora(key: str, config: LoRAConfig) -> None:
    """Check the settings of adapters, for a backend that has them."""
    if config.rank and not config.targets:
        raise ConfigError(
            f"{key}.targets=[] with {key}.rank={config.rank} adapts nothing; allowed: at least one"
        )


def _validate_mtp(key: str, config: EngineConfig) -> None:
    """Check the settings of the training of multi-token prediction layers."""
    if config.lora.rank:
        raise ConfigError(
            f"{key}.mtp_loss_coef={config.mtp_loss_coef} with {key}.lora.rank={config.lora.rank}: "
            "adapters leave the prediction layers frozen; allowed: one of the two at 0"
        )
    if config.moe.router_replay != "off":
        raise ConfigError(
            f"{key}.moe.router_replay={config.moe.router_replay!r} with {key}.mtp_loss_coef="
            f"{config.mtp_loss_coef}: no experts are recorded for prediction layers; allowed: 'off'"
        )
    if config.layout.last_stage_layers == 0:
        raise ConfigError(
            f"{key}.layout.last_stage_layers=0 with {key}.mtp_loss_coef={config.mtp_loss_coef}: "
            "prediction layers need a decoder layer before them in their chunk; allowed: at least 1"
        )
    if config.recompute.granularity == "full":
        raise ConfigError(
            f"{key}.recompute.granularity='full' with {key}.mtp_loss_coef={config.mtp_loss_coef}: "
            "Megatron cannot recompute prediction layers of packed sequences; allowed: 'none', "
            "'selective'"
        )


def validate_layout(key: str, layout: Layout) -> None:
    """Check the axes of a layout, alone and against each other; `key` names it: actor.layout."""
    check_limits(key, layout)
    if layout.vpp > 1 and layout.pp == 1:
        raise ConfigError(f"{key}.vpp={layout.vpp} needs {key}.pp above 1; {key}.pp=1")
    for name in ("first_stage_layers", "last_stage_layers"):
        given = getattr(layout, name)
        if given is not None and layout.pp == 1:
            raise ConfigError(f"{key}.{name}={given} needs {key}.pp above 1; {key}.pp=1")
    experts = layout.etp * layout.ep * layout.pp
    if layout.world_size % experts:
        raise ConfigError(
            f"{key}: etp * ep * pp = {layout.etp} * {layout.ep} * {layout.pp} = {experts} must "
            f"divide the world size tp * pp * cp * dp = {layout.world_size}; the smallest {key}.dp "
            f"that fits: {find_smallest_dp(layout)}"
        )


def find_smallest_dp(layout: Layout) -> int:
    """Return the smallest dp with which the experts' axes divide the world size.

    >>> find_smallest_dp(Layout(tp=2, ep=4))
    2
    """
    expert_ranks, dense_ranks = layout.etp * layout.ep, layout.tp * layout.cp
    return expert_ranks // math.gcd(expert_ranks, dense_ranks)


def validate_optimizer(key: str, config: OptimizerConfig) -> None:
    """Check the rules between settings of an optimizer that are the same for every engine."""
    if config.min_lr > config.lr:
        raise ConfigError(f"{key}.min_lr={config.min_lr}; allowed: 0 to {key}.lr={config.lr}")
    if (config.schedule == "wsd") != (config.wsd_decay_steps > 0):
        raise ConfigError(
            f"{key}.wsd_decay_steps={config.wsd_decay_steps} with {key}.schedule="
            f"{config.schedule!r}; allowed: above 0 with 'wsd', else 0"
        )


def validate_schedule(key: str, config: OptimizerConfig, total_steps: int) -> None:
    """Check that warm-up and decay fit into `total_steps` optimizer steps."""
    if config.schedule == "wsd" and total_steps:
        free = total_steps - config.warmup_steps
        if not 1 <= config.wsd_decay_steps <= free:
            raise ConfigError(
                f"{key}.wsd_decay_steps={config.wsd_decay_steps}: {total_steps} steps, of which "
                f"{key}.warmup_steps={config.warmup_steps} warm up; allowed: 1 to {free}"
            )


def validate_model_layout(key: str, layout: Layout, sizes: ModelSizes) -> None:
    """Check that a layout divides the model."""
    check_divides(f"{key}.tp", layout.tp, "attention heads", sizes.num_attention_heads)
    check_divides(f"{key}.tp", layout.tp, "key/value heads", sizes.num_query_groups)
    for size in sizes.ffn_sizes:
        check_divides(f"{key}.tp", layout.tp, "MLP columns", size)
    if sizes.num_linear_heads % (layout.tp * layout.cp):
        raise ConfigError(
            f"{key}.tp={layout.tp} with {key}.cp={layout.cp}: gated delta nets are split by their "
            f"key heads over both; allowed: a product that divides {sizes.num_linear_heads}"
        )
    count_chunk_layers(key, layout, sizes.num_layers)
    if sizes.num_experts:
        check_divides(f"{key}.ep", layout.ep, "experts", sizes.num_experts)
        check_divides(f"{key}.etp", layout.etp, "columns of an expert", sizes.expert_ffn_size)
        if sizes.has_expert_biases and layout.etp > 1:
            raise ConfigError(
                f"{key}.etp={layout.etp}: the experts of the model have biases, which Megatron has "
                "on unsplit experts only; allowed: 1"
            )
    elif layout.ep > 1 or layout.etp > 1:
        axis = "ep" if layout.ep > 1 else "etp"
        raise ConfigError(
            f"{key}.{axis}={getattr(layout, axis)}: the model has no experts; allowed: 1"
        )


def validate_model_engine(key: str, config: EngineConfig, sizes: ModelSizes) -> None:
    """Check that the model has the parts that the settings of an engine name."""
    if not sizes.num_experts:
        for name, off in (("aux_loss_coef", 0), ("router_replay", "off"), ("overlap", False)):
            if getattr(config.moe, name) != off:
                raise ConfigError(
                    f"{key}.moe.{name}={getattr(config.moe, name)!r}: the model has no experts; "
                    f"allowed: {off!r}"
                )
    _validate_float8_layers(key, config, sizes)
    if not sizes.has_router_bias and config.moe.bias_update_rate:
        raise ConfigError(
            f"{key}.moe.bias_update_rate={config.moe.bias_update_rate}: the routers of the model "
            "have no selection bias; allowed: 0"
        )
    if config.mtp_loss_coef and not sizes.num_mtp_layers:
        raise ConfigError(
            f"{key}.mtp_loss_coef={config.mtp_loss_coef}: the model has no layers for multi-token "
            "prediction; allowed: 0"
        )
    if config.mtp_loss_coef and sizes.is_tied and config.layout.pp > 1:
        raise ConfigError(
            f"{key}.mtp_loss_coef={config.mtp_loss_coef} with {key}.layout.pp={config.layout.pp}: "
            "not supported for a model with tied embeddings; allowed: 0"
        )
    if sizes.has_indexer:
        _validate_sparse_attention(key, config)
    else:
        for name, off in (("indexer_loss_coef", 0), ("indexer_replay", "off")):
            if (value := getattr(config, name)) != off:
                raise ConfigError(
                    f"{key}.{name}={value!r}: the model has no indexer of sparse attention; "
                    f"allowed: {off!r}"
                )
    if config.recompute.granularity == "selective":
        for module in config.recompute.modules:
            _validate_recompute_module(f"{key}.recompute.modules", module, sizes)


def _validate_sparse_attention(key: str, config: EngineConfig) -> None:
    """Check settings that Megatron's sparse attention does not take."""
    if config.lora.rank:
        # AbsorbedMLASelfAttention._get_kv_up_weights
        raise ConfigError(
            f"{key}.lora.rank={config.lora.rank}: sparse attention reads the weights of its "
            "projections past an adapter; allowed: 0"
        )
    if config.indexer_replay == "off":
        return
    kernel = config.megatron.get("dsa_kernel_backend", "none")
    for name, value, is_allowed, allowed, reason in (
        ("layout.cp", config.layout.cp, config.layout.cp == 1, "1",
         "ranks of cp count keys in another order"),
        ("moe.overlap", config.moe.overlap, not config.moe.overlap, "false",
         "layers run beside those of another micro-batch"),
        ("mtp_loss_coef", config.mtp_loss_coef, not config.mtp_loss_coef, "0",
         "no keys are recorded for prediction layers"),
        ("megatron.dsa_kernel_backend", kernel, kernel == "none", "'none'",
         "a fused kernel picks keys itself"),
    ):  # fmt: skip
        if not is_allowed:
            raise ConfigError(
                f"{key}.indexer_replay={config.indexer_replay!r} with {key}.{name}={value!r}: "
                f"{reason}; allowed: {allowed}"
            )


def _validate_recompute_module(key: str, module: str, sizes: ModelSizes) -> None:
    if module == "mla_up_proj" and not sizes.is_mla:
        raise ConfigError(f"{key} names {module!r}: the model has no latent attention")
    if module in EXPERT_MODULES and not sizes.num_experts:
        raise ConfigError(f"{key} names {module!r}: the model has no experts")


def count_chunk_layers(key: str, layout: Layout, num_layers: int) -> list[int]:
    """Return the number of decoder layers of each of the pp * vpp chunks, in order.

    Raises:
        ConfigError: The layers cannot be divided so.
    """
    num_chunks = layout.pp * layout.vpp
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    free = num_chunks - sum(given is not None for given in ends)
    rest = num_layers - sum(given or 0 for given in ends)
    if rest < 0 or (rest == 0) != (free == 0) or (free and rest % free):
        raise ConfigError(
            f"{key}: pp * vpp = {layout.pp} * {layout.vpp} chunks with "
            f"first_stage_layers={ends[0]}, last_stage_layers={ends[1]} leave {rest} of the "
            f"model's {num_layers} layers for {free} equal chunks; allowed: a multiple above 0"
        )
    counts = [rest // free if free else 0] * num_chunks
    for index, given in ((0, ends[0]), (num_chunks - 1, ends[1])):
        if given is not None:
            counts[index] = given
    return counts
