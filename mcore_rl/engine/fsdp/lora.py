"""Low-rank adapters on the linear layers of a model of transformers (LoRA, arXiv:2106.09685).

The base weights are frozen and keep their names; a layer adds alpha / rank * B A x (eq. 3 of the
paper), as PEFT computes it. Servers and exports get merged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from mcore_rl.checkpoint.peft import Factors, initialize_factor
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.reshard.rules import LogicalTensor, StackedRows, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FACTORS = ("lora_A", "lora_B")
# Largest share of a gradient by which rounding in float32 may change it.
_GRADIENT_BOUND = 0.05


class LoRALinear(torch.nn.Linear):
    """A frozen linear layer with an adapter: A [rank, in], B [out, rank]."""

    def __init__(self, linear: torch.nn.Linear, config: LoRAConfig) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.weight = linear.weight
        if linear.bias is not None:
            self.bias = linear.bias
        self.scale, self.is_enabled = config.alpha / config.rank, True
        a, b = (config.rank, linear.in_features), (linear.out_features, config.rank)
        self.lora_A = torch.nn.Parameter(torch.empty(a, dtype=linear.weight.dtype, device="meta"))
        self.lora_B = torch.nn.Parameter(torch.empty(b, dtype=linear.weight.dtype, device="meta"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = F.linear(input, self.weight, self.bias)
        if not self.is_enabled:
            return output
        return output + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


def attach_adapters(model: PreTrainedModel, config: LoRAConfig, key: str = "lora") -> None:
    """Freeze a model on the meta device and replace the linear layers of the targets.

    The default targets, which are names of Megatron, mean all linear layers but the head. A vision
    tower has no targets, and neither has a subclass of Linear with a forward pass of its own, such
    as PhiMoE's routers, which return more than a product.

    Raises:
        ConfigError: A target is the name of no linear layer, or there are none.
    """
    head, linears = model.get_output_embeddings(), _list_linears(model)
    allowed = {_get_target(name) for name in linears}
    if not allowed:
        raise ConfigError(
            f"{key}.rank={config.rank}: this model has no linear layers of torch; allowed: 0"
        )
    targets = allowed if config.targets == LoRAConfig().targets else set(config.targets)
    if unknown := sorted(targets - allowed):
        raise ConfigError(
            f"{key}.targets names {', '.join(unknown)}, which this model does not have as linear "
            f"layers; allowed: {', '.join(sorted(allowed))}"
        )
    model.base_model.requires_grad_(False)
    if head is not None:
        head.requires_grad_(False)
    decoder = _get_decoder(model)
    for name, linear in linears.items():
        parent, _, child = name.rpartition(".")
        if child in targets:
            setattr(decoder.get_submodule(parent), child, LoRALinear(linear, config))


def _get_decoder(model: PreTrainedModel) -> torch.nn.Module:
    decoder: torch.nn.Module = getattr(model.base_model, "language_model", model.base_model)
    return decoder


def _list_linears(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Return the layers that may have an adapter, by their name in the decoder."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in _get_decoder(model).named_modules()
        if type(module).forward is torch.nn.Linear.forward and module is not head
    }


def check_adapters(
    model: PreTrainedModel,
    config: LoRAConfig,
    compute_loss: Callable[[], torch.Tensor],
    key: str = "lora",
) -> None:
    """Attach adapters to a model with memory; check that each has part in all uses of its weight.

    A parent may multiply by the weight W of a layer without calling it, as those of Mamba and Jamba
    do with `dt_proj`. Where W + s B A takes the place of W, the chain rule says
    dL/dB = s dL/dW A^T.

    Raises:
        ConfigError: Adapters of a target would not train.
    """
    allowed = {_get_target(name) for name in _list_linears(model)}
    attach_adapters(model, config, key)
    layers = {n: module for n, module in model.named_modules() if isinstance(module, LoRALinear)}
    for name, layer in layers.items():
        a = initialize_factor(name, 0, *layer.lora_A.shape).to(layer.weight)
        layer.lora_A = torch.nn.Parameter(a)
        layer.lora_B = torch.nn.Parameter(a.new_zeros(layer.lora_B.shape))
        layer.weight.requires_grad_(True)
    with torch.enable_grad():
        compute_loss().backward()
    trained = {_get_target(name) for name, layer in layers.items() if layer.weight.grad is not None}
    if idle := [
        name
        for name, layer in layers.items()
        if _get_target(name) not in trained or _is_bypassed(layer)
    ]:
        names = {_get_target(name) for name in idle}
        raise ConfigError(
            f"{key}.targets has {', '.join(sorted(names))}, but an adapter of {idle[0]} would not "
            "train: the layer around it reads its weight without a call, or no gradient reaches "
            f"it; allowed: {key}.targets of {', '.join(sorted(allowed - names))}"
        )


def _get_target(name: str) -> str:
    return name.rpartition(".")[2]


def _is_bypassed(layer: LoRALinear) -> bool:
    """Return whether the gradient of B is not the one that follows from that of the weight."""
    if (gradient := layer.weight.grad) is None:
        return False  # an expert without tokens
    expected = layer.scale * gradient @ layer.lora_A.detach().T
    gap = expected if layer.lora_B.grad is None else layer.lora_B.grad - expected
    return not gap.norm() <= _GRADIENT_BOUND * expected.norm()


def map_factors(model: PreTrainedModel) -> tuple[Weight, ...]:
    """Return the rules of the factors, sharded by rows as all parameters."""
    return tuple(
        Weight(name, StackedRows((LogicalTensor(name, tuple(value.shape)),), len(value)), axis="tp")
        for name, value in model.named_parameters()
        if name.rpartition(".")[2] in FACTORS
    )


def initialize_factors(
    local_weights: Iterable[tuple[Weight, Any, torch.Tensor]], seed: int
) -> None:
    """Set A to random numbers and B to zero, the same in any layout."""
    for weight, shard, local in local_weights:
        assert isinstance(weight.rule, StackedRows)
        if weight.name.endswith("lora_B"):
            local.zero_()
            continue
        factor = initialize_factor(weight.name, seed, *weight.rule.parts[0].shape)
        rows = weight.rule.get_rows(shard)
        local.copy_(factor[rows.start : rows.stop])


@contextmanager
def disable_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Run a model on its frozen base weights inside this context."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for layer in layers:
        layer.is_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_enabled = True


def gather_factors(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B, all rows of them, by name of the weight. Collective over all ranks."""
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            a, b = (_gather(getattr(module, factor)) for factor in FACTORS)
            factors[f"{name}.weight"] = a, b
    return factors


def _gather(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def list_factors(model: PreTrainedModel, weights: Mapping[str, Weight]) -> list[Factors]:
    """Return all adapters on the host, by tensor of the checkpoint. Collective over all ranks."""
    factors = []
    for name, (a, b) in gather_factors(model).items():
        first = 0
        for tensor in weights[name].rule.tensors:
            factors.append(Factors(tensor.name, a.cpu(), b[first : first + tensor.shape[0]].cpu()))
            first += tensor.shape[0]
    return factors
