"""A model of transformers over ranks: built empty, sharded by FSDP2, read shard by shard."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.sharded_rows import exchange_reason
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.engine.fsdp.attention import EXPERTS, Pack
from mcore_rl.engine.fsdp.vision import run_unused_tower
from mcore_rl.engine.logprob import VocabShard
from mcore_rl.engine.packing import MicroBatch
from mcore_rl.engine.steps import Scores, ScoreSettings, score_tokens
from mcore_rl.models.transformers_model import is_expert_stack
from mcore_rl.parallel.devices import detect_device
from mcore_rl.reshard.layout import ShardedRanks
from mcore_rl.reshard.rules import Shard, Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedPolicy(torch.nn.Module):
    """The root of a sharded model: its forward pass returns scores of response tokens.

    The output projection is part of it: of most families it is one matrix, whose product with the
    states never exists as a whole (engine/logprob.py). Others scale or cap their logits;
    `has_plain_head` says which; FSDPEngine compares both at start.
    """

    has_plain_head = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.runs_tower = False  # in every pass, of a run with images

    def forward(self, micro: MicroBatch, pack: Pack, settings: ScoreSettings | None) -> Any:
        """Return scores; without settings whether logits are the product of states and head."""
        if settings is None:
            return self._compare_logits(micro, pack)
        if self.has_plain_head:
            head = self.model.get_output_embeddings().weight
            shard = VocabShard(0, len(head), None)
            return score_tokens(self._get_states(micro, pack), head, micro, shard, settings)
        logits = self._get_logits(micro, pack).float()
        return _score_logits(logits / settings.temperature, micro, settings)

    def _get_states(self, micro: MicroBatch, pack: Pack) -> torch.Tensor:
        zero = self._run_unused_tower(micro)
        output = self.model.base_model(**_build_inputs(micro, pack))
        states = _select_rows(output.last_hidden_state[0], micro)
        return states if zero is None else states + zero

    def _get_logits(self, micro: MicroBatch, pack: Pack) -> torch.Tensor:
        zero = self._run_unused_tower(micro)
        inputs = _build_inputs(micro, pack)
        logits: torch.Tensor = self.model(**inputs, logits_to_keep=micro.hidden_rows).logits[0]
        if len(logits) != len(micro.hidden_rows):  # a family that does not read logits_to_keep
            logits = _select_rows(logits, micro)
        return logits if zero is None else logits + zero

    def _run_unused_tower(self, micro: MicroBatch) -> torch.Tensor | None:
        """Let the layers for images take part in a pass without any, in a run with images.

        They run first, as in a pass with images: ranks gather and reduce layers in one order. Every
        step has their gradients, so that Adam counts as many steps of all parameters.
        """
        if not self.runs_tower or "pixel_values" in micro.model_inputs:
            return None
        return run_unused_tower(self.model).to(self.model.dtype)

    def _compare_logits(self, micro: MicroBatch, pack: Pack) -> bool:
        """Return whether the head gets the decoder's states and gives the logits, bit for bit."""
        head, calls = self.model.get_output_embeddings(), dict[str, Any]()

        def keep_states(module: Any, args: Any, output: Any) -> None:
            calls["states"] = _select_rows(output.last_hidden_state[0], micro)

        def keep_head(module: Any, args: Any, output: Any) -> None:
            calls["input"], calls["output"] = args[0][0], output[0]

        hooks = [
            self.model.base_model.register_forward_hook(keep_states),
            head.register_forward_hook(keep_head),
        ]
        try:
            logits = self._get_logits(micro, pack)
        finally:
            for hook in hooks:
                hook.remove()
        return (
            isinstance(head, torch.nn.Linear)
            and head.bias is None
            and calls.keys() == {"states", "input", "output"}
            and torch.equal(calls["input"], calls["states"])
            and torch.equal(calls["output"].float(), logits.float())
        )


class ShardedValueModel(ShardedPolicy):
    """A model with one value per token, from the states, in float32 for any dtype.

    Without settings the values are those of a random head.
    """

    def forward(self, micro: MicroBatch, pack: Pack, settings: ScoreSettings | None) -> Scores:
        states = self._get_states(micro, pack)
        if settings is None:
            return {"values": project_states(states)}
        return {"values": self.model.score(states.float()).squeeze(-1)}


def project_states(states: torch.Tensor) -> torch.Tensor:
    """Return the values [tokens] of states [tokens, hidden] by a random head."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(states.shape[1], generator=generator) / states.shape[1] ** 0.5
    values: torch.Tensor = states.float() @ random.to(states.device)
    return values


def _select_rows(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Return the rows of a pack's output that predict response tokens.

    Raises:
        ValueError: The output has not one row per token.
    """
    if len(output) != micro.input_ids.shape[1]:
        raise ValueError(f"{len(output)} rows for {micro.input_ids.shape[1]} tokens")
    return output.index_select(0, micro.hidden_rows)


def _build_inputs(micro: MicroBatch, pack: Pack) -> dict[str, Any]:
    return {
        "input_ids": micro.input_ids,
        "position_ids": micro.position_ids,
        "use_cache": False,
        "pack": pack,
        **micro.model_inputs,
    }


def _score_logits(logits: torch.Tensor, micro: MicroBatch, settings: ScoreSettings) -> Scores:
    """Return the scores of engine/steps.score_tokens, from logits [tokens, ids]."""
    log_probs = logits.log_softmax(-1)
    scores = {"log_probs": log_probs.gather(1, micro.targets[:, None])[:, 0]}
    if "teacher_ids" in micro.columns:
        ids = micro.columns["teacher_ids"].flatten(1)
        scores["chosen_log_probs"] = log_probs.gather(1, ids)
    if settings.with_entropy:
        scores["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    if settings.with_squares:
        scores["sum_pi_squared"] = log_probs.detach().exp().square().sum(-1)
    if settings.num_top:
        top = log_probs.detach().topk(settings.num_top)
        scores |= {"top_log_probs": top.values, "top_ids": top.indices}
    return scores


@dataclass(frozen=True, slots=True)
class RankMeshes:
    """Device meshes of the ranks, and the groups of a layout.

    Rank dp_rank * cp + cp_rank, as in parallel/mesh.py. FSDP shards over all ranks of a replica,
    those with parts of the same sequences included.
    """

    dense: DeviceMesh  # [replicas,] shards
    experts: DeviceMesh | None  # [replicas,] ranks with the same experts
    data: DeviceMesh  # dp, cp
    ep_group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, device: str, layout: Layout, num_replicas: int) -> RankMeshes:
        """Create the meshes. Collective over all ranks."""
        num_shards = layout.world_size // num_replicas
        shape = (num_replicas, num_shards)
        data = init_device_mesh(device, (layout.dp, layout.cp), mesh_dim_names=("dp", "cp"))
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))
        dense = mesh if num_replicas > 1 else mesh["shard"]
        if layout.ep == 1:
            return cls(dense, None, data)
        expert_shape = (num_replicas, num_shards // layout.ep, layout.ep)
        names = ("replica", "shard", "ep")
        mesh = init_device_mesh(device, expert_shape, mesh_dim_names=names)
        experts = mesh["replica", "shard"] if num_replicas > 1 else mesh["shard"]
        return cls(dense, experts, data, mesh["ep"].get_group())

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks with parts of the same packs; None without sequence parallelism."""
        return self.data["cp"].get_group() if self.data.size(1) > 1 else None


def list_experts(model: PreTrainedModel) -> dict[str, Any]:
    """Return the modules with stacked experts that transformers' registry dispatches, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel")
    }


def can_group(module: Any, dtype: torch.dtype) -> bool:
    """Return whether torch.grouped_mm takes the sizes of experts: rows of a multiple of 16 bytes.

    transformers does not check.
    """
    shapes = [p.shape[1:] for p in module.parameters(recurse=False) if p.dim() > 2]
    return not any(size * dtype.itemsize % 16 for shape in shapes for size in shape)


def choose_experts_function(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Use transformers' plain experts where torch.grouped_mm cannot multiply."""
    if not all(can_group(module, dtype) for module in list_experts(model).values()):
        model.set_experts_implementation("eager")


def keep_local_experts(
    model: PreTrainedModel,
    weights: Mapping[str, Weight],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> list[Any]:
    """Replace the experts of a model by this rank's share; return their modules.

    Raises:
        ConfigError: The experts of this family cannot be divided.
    """
    experts = list_experts(model)
    for name, module in experts.items():
        module.can_group, module.ep_group = can_group(module, dtype), group
        stacks = dict(module.named_parameters(recurse=False))
        is_divided = all(is_expert_stack(weights[f"{name}.{part}"].rule) for part in stacks)
        if not is_divided or module.num_experts % group.size():
            raise ConfigError(
                f"layout.ep={group.size()}: {name} ({type(module).__name__}) cannot be divided; "
                "allowed: a divisor of its experts, in a family whose checkpoints have a tensor "
                "for each expert; or layout.ep=1"
            )
        module.num_experts //= group.size()
        for parameter, stack in stacks.items():
            # Memory comes after sharding (`allocate`), so no rank ever holds all experts.
            share = torch.empty(module.num_experts, *stack.shape[1:], device="meta")
            setattr(module, parameter, torch.nn.Parameter(share))
    if not experts:
        raise ConfigError(
            f"layout.ep={group.size()}: transformers does not dispatch the experts of "
            f"{type(model).__name__} by its registry; allowed: 1"
        )
    model.config._experts_implementation = EXPERTS
    return list(experts.values())


def shard_model(
    root: ShardedPolicy,
    expert_modules: list[Any],
    meshes: RankMeshes,
    dtype: torch.dtype,
    *,
    is_training: bool,
    cpu_offload: bool,
) -> None:
    """Shard a model in place: experts, layers, and the root for the rest.

    Parameters of a model that trains are float32; products are in `dtype`.
    """
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32 and is_training:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    is_pinned = detect_device().type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=is_pinned) if cpu_offload else OffloadPolicy()
    layers = list_layers(root.model)
    heads = [root.model.score] if isinstance(root, ShardedValueModel) else []
    # Inner modules first: FSDP gives a module the parameters that those inside it have not taken.
    for module in (*expert_modules, *heads, *layers, root):
        is_expert = any(module is expert for expert in expert_modules)
        mesh = meshes.experts if is_expert else meshes.dense
        # Values are float32 for any dtype.
        module_policy = MixedPrecisionPolicy() if module in heads else policy
        fully_shard(module, mesh=mesh, mp_policy=module_policy, offload_policy=offload)
        assert isinstance(module, FSDPModule)
        # Loss weights contain every mean, so gradients are summed; gloo cannot scale.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def iter_local(
    root: ShardedPolicy, weights: tuple[Weight, ...], ranks: ShardedRanks, rank: int
) -> Iterator[tuple[Weight, Shard, torch.Tensor]]:
    """Yield rule, shard and tensor, viewed as rows, of each parameter and buffer of a rank."""
    state = {**dict(root.model.named_parameters()), **dict(root.model.named_buffers())}
    for weight in weights:
        holders = ranks.get_holders(weight)
        index = next((n for n, members in enumerate(holders) if rank in members), None)
        if index is None:
            continue
        value = state[weight.name]
        local = (value.to_local() if isinstance(value, DTensor) else value).detach()
        shard = Shard(index, len(holders))
        if weight.axis is not None:
            local = local.reshape(weight.rule.get_local_shape(shard))
        yield weight, shard, local


def load_weights(
    root: ShardedPolicy,
    local_weights: Iterable[tuple[Weight, Shard, torch.Tensor]],
    weights: Sequence[Weight],
    reader: CheckpointReader,
) -> None:
    """Read this rank's shards of a checkpoint. A value head that it lacks is zero.

    Args:
        local_weights: Result of iter_local; its tensors are filled.
        weights: The rules of all ranks.

    Raises:
        ConfigError: The checkpoint lacks a tensor, or has one that the model does not; the same on
            all ranks.
    """
    shapes = reader.get_shapes()
    expected = {tensor.name: tensor for w in weights for tensor in w.rule.tensors}
    optional = {name for name in expected if name.startswith("score.")}
    for name, tensor in expected.items():
        if name not in shapes and name not in optional:
            raise ConfigError(f"checkpoint {reader.path} lacks tensor {name}")
        if shapes.get(name, tensor.shape) != tensor.shape:
            raise ConfigError(
                f"checkpoint {reader.path}: tensor {name} has shape {shapes[name]}, but "
                f"config.json asks for {tensor.shape}"
            )
    unread = list_unread(reader, expected)
    if unexpected := [name for name in unread if not _is_ignored(root, name)]:
        raise ConfigError(f"checkpoint {reader.path} has unexpected tensor {unexpected[0]}")

    def read() -> None:
        for weight, shard, local in local_weights:
            for block in weight.rule.get_blocks(shard):
                target = local[block.local_slices]
                if block.tensor.name in shapes:
                    # The reader fills host memory; a target may be on a device.
                    host = torch.empty(block.box.sizes, dtype=target.dtype)
                    reader.read_into(block, host)
                    target.copy_(host)
                else:
                    target.zero_()

    if reason := exchange_reason(read):
        raise ConfigError(reason)


def list_unread(reader: CheckpointReader, expected: Collection[str]) -> list[str]:
    """Return the tensors of a checkpoint that the model does not have."""
    return [name for name in reader.get_shapes() if name not in expected]


def _is_ignored(root: ShardedPolicy, name: str) -> bool:
    """Return whether a tensor may stay unread: transformers ignores it, or it is another head."""
    patterns = root.model._keys_to_ignore_on_load_unexpected or ()
    is_other_head = isinstance(root, ShardedValueModel) and name.startswith("lm_head.")
    return is_other_head or any(re.search(pattern, name) for pattern in patterns)


def allocate(root: ShardedPolicy, device: torch.device, buffer_device: torch.device) -> None:
    """Give a model memory, with the buffers that no checkpoint has (rotary frequencies).

    What neither they nor a checkpoint fills is not a number: `check_filled` finds it.

    Args:
        buffer_device: Device of buffers, which FSDP does not move with the parameters of a layer.
    """
    root.to_empty(device=device)
    root.model.tie_weights()
    for module in root.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=buffer_device)
    with torch.no_grad():
        for tensor in (*root.parameters(), *root.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(_get_poison(local.dtype))
    fill_buffers(root.model)


def fill_buffers(model: PreTrainedModel) -> None:
    """Let transformers initialise the buffers of a model, as it does after reading a checkpoint.

    A module may fill those of its children. The initialisation sees parameters without memory,
    marked as read: drawing sharded ones would take collectives.
    """
    parameters = {module: module._parameters for module in model.modules()}
    for module in parameters:
        module._is_hf_initialized = False
        module._parameters = {
            name: None if weight is None else _build_read_parameter(weight.shape)
            for name, weight in module._parameters.items()
        }
    try:
        model.initialize_weights()
    finally:
        for module, of_module in parameters.items():
            module._parameters = of_module


def _build_read_parameter(shape: torch.Size) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _get_poison(dtype: torch.dtype) -> float:
    """Return a value that nothing initialises a tensor to."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


@torch.no_grad()
def check_filled(root: ShardedPolicy, path: str) -> None:
    """Refuse a model with values that neither a checkpoint nor its initialisation has filled.

    Raises:
        ConfigError: A parameter or buffer has one; the same on all ranks.
    """

    def check() -> None:
        for name, tensor in (*root.model.named_parameters(), *root.model.named_buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            poison = _get_poison(local.dtype)
            is_empty = local.isnan() if math.isnan(poison) else local == poison
            if local.dtype != torch.bool and bool(is_empty.any()):
                raise ConfigError(
                    f"checkpoint {path}: {name} of {type(root.model).__name__} has values that are "
                    "no numbers, or that neither the checkpoint nor transformers' initialisation "
                    "fills; allowed: a model whose every parameter and buffer one of them fills"
                )

    if reason := exchange_reason(check):
        raise ConfigError(reason)


def recompute_layers(model: PreTrainedModel) -> None:
    """Run the layers of a model again in its backward pass.

    transformers' own switch needs layers in training mode, where some draw random numbers.
    """
    for layer in list_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def list_layers(model: PreTrainedModel) -> list[Any]:
    """Return the modules that FSDP shards one by one: the layers that transformers never splits."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]
