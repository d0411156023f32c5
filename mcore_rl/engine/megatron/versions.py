"""What differs between the versions of megatron-core that the engine runs on, and nothing else.

Whether a difference is there is read from signatures and fields of the installed package. Version
numbers only refuse. Code outside of this file asks here and is the same for all versions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from mcore_rl.config.errors import ConfigError

SUPPORTED_MEGATRON = ("0.16.1", "0.19.2")

# How the rules of models/ name the decoder layer inside a layer of token prediction.
_RULE_MTP_LAYER = "transformer_layer"
# What tells the optimizer's groups of parameters apart, whatever a run's settings.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_RESOLVE_NORMS = "_resolve_qk_norm_config"  # a method of latent attention in 0.19.2


def check_megatron_version() -> None:
    """Raises ConfigError for a version that the engine was not run on."""
    from megatron.core import package_info

    found = package_info.__version__
    if found not in SUPPORTED_MEGATRON:
        raise ConfigError(
            f"megatron-core {found} is installed; supported: {', '.join(SUPPORTED_MEGATRON)}"
        )


def experts_spec(module: type, linear_fc1: type, linear_fc2: type) -> Any:
    """What a spec provider answers for grouped experts.

    0.16.1 wants the class and its submodules (models/backends.py:73), 0.19.2 a callable that builds
    them, and submodules of a class of their own (models/backends.py:89).
    """
    from megatron.core.models.backends import BackendSpecProvider
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts

    submodules_class = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules)
    submodules = submodules_class(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    asked = inspect.signature(BackendSpecProvider.grouped_mlp_modules).parameters
    if "moe_use_legacy_grouped_gemm" in asked:
        return module, submodules
    return functools.partial(module, submodules=submodules)


def mlp_submodules(layer_spec: Any) -> Any:
    """The submodules of a layer's MLP: of its ModuleSpec in 0.16.1, its partial in 0.19.2."""
    mlp = layer_spec.submodules.mlp
    if isinstance(mlp, functools.partial):
        return mlp.keywords.get("submodules")
    return getattr(mlp, "submodules", None)


@functools.cache
def mtp_layer_name() -> str:
    """What a layer of token prediction calls its decoder layer, in names of parameters."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

    renamed = "mtp_model_layer"
    known = inspect.signature(MultiTokenPredictionLayerSubmodules).parameters
    return renamed if renamed in known else _RULE_MTP_LAYER


def parameter_name(rule_name: str) -> str:
    """The parameter's name in this version, from the one that rules use (of 0.16.1)."""
    if not rule_name.startswith("mtp."):
        return rule_name
    return rule_name.replace(f".{_RULE_MTP_LAYER}.", f".{mtp_layer_name()}.", 1)


def use_plain_query(config: Any, layer_spec: Any) -> Any:
    """The layer spec of a chunk, with no norm before a query that is projected in one step.

    Where latent attention has no query latent (q_lora_rank is None), 0.19.2 puts a norm with a
    weight in front of the query's projection (transformer/mla_qk_norm_config.py:147), which
    neither 0.16.1 nor DeepSeek's models have.
    """
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    if not config.multi_latent_attention or config.q_lora_rank is not None:
        return layer_spec
    if hasattr(MLASelfAttention, _RESOLVE_NORMS):
        for layer in layer_spec.layer_specs:
            layer.submodules.self_attention.module = _plain_query_attention()
    return layer_spec


@functools.cache
def _plain_query_attention() -> type:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    def resolve(self: Any, submodules: Any) -> dict[str, Any]:
        found = getattr(MLASelfAttention, _RESOLVE_NORMS)(self, submodules)
        return {**found, "linear_q_proj": submodules.linear_q_proj}

    return type("PlainQueryAttention", (MLASelfAttention,), {_RESOLVE_NORMS: resolve})


@contextlib.contextmanager
def groups_told_by_what_they_hold() -> Iterator[None]:
    """Inside, saved groups of parameters are paired with those of this run as in 0.16.1.

    0.19.2 goes by their learning rates, too (optimizer/optimizer.py:139), so that a run could not
    resume with another one.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    with contextlib.ExitStack() as undo:
        for module in (optimizer, distrib_optimizer):
            keys = module.param_group_identifier_keys
            undo.callback(setattr, module, "param_group_identifier_keys", keys)
            module.param_group_identifier_keys = _GROUP_KEYS
        yield


def with_empty_states(state: dict[str, Any]) -> dict[str, Any]:
    """A loaded optimizer state in which every part has its "state", as the optimizers expect.

    0.19.2 leaves out that of a rank without a parameter of an optimizer: a stage without experts.
    """
    for part in state.values():
        if isinstance(part, dict):
            with_empty_states(part)
    if "param_groups" in state:
        state.setdefault("state", {})
    return state
