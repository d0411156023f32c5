"""Low-rank adapters on linear layers, as merged weights (LoRA: Hu et al. 2021, arXiv:2106.09685).

A linear with an adapter runs its own forward on W + alpha / rank * B @ A (eq. 3 of the paper),
merged in each call. So the same code works for every kind of linear and every layout, and the
trainer computes with the exported weights, bit for bit. The weights W are frozen: gradient buffers
and optimizer state exist for the factors A and B only.

Merged weights are not saved for the backward pass, which merges again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl.checkpoint.peft import (
    Factors,
    check_targets,
    get_adapted_linear,
    initialize_factor,
)
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.engine.megatron.heads import ValueHead
from mcore_rl.engine.megatron.weights import WeightPlacement
from mcore_rl.parallel.mesh import Coordinate
from mcore_rl.reshard.rules import Shard, Weight

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mcore_rl.engine.megatron.model import PolicyModel


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a local weight that are adjacent rows of one Hugging Face tensor."""

    tensor: str
    total: int  # rows of the full tensor
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class FactorShard:
    """A rank's part of the factors of a full weight [out, in]."""

    name: str  # of the weight, with global numbers of layer and expert
    rows: tuple[RowRange, ...]  # of the local weight, in order
    num_inputs: int  # columns of the full weight
    first_input: int  # first column on this rank
    is_split: tuple[bool, bool]  # whether rows, columns are split over the weight's axis
    axis_rank: int  # index of this rank on the weight's axis
    data_rank: int  # index of this rank among those with the same shard

    @classmethod
    def build(cls, weight: Weight, shard: Shard, coordinate: Coordinate, cp: int) -> FactorShard:
        blocks = sorted(weight.rule.get_blocks(shard), key=lambda block: block.local_offset)
        tensors = weight.rule.tensors
        num_outputs, num_inputs = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
        local = weight.rule.get_local_shape(shard)
        is_expert = weight.expert is not None
        return cls(
            name=weight.get_local_name(),
            rows=tuple(
                RowRange(b.tensor.name, b.tensor.shape[0], b.box.offsets[0], b.box.sizes[0])
                for b in blocks
            ),
            num_inputs=num_inputs,
            first_input=blocks[0].box.offsets[1],
            is_split=(local[0] < num_outputs, local[1] < num_inputs),
            axis_rank=coordinate.etp_rank if is_expert else coordinate.tp_rank,
            data_rank=(
                coordinate.edp_rank if is_expert else coordinate.dp_rank * cp + coordinate.cp_rank
            ),
        )


class Adapter(torch.nn.Module):
    """The factors of one weight of this rank: A [rank, in] and B [out, rank], in its dtype.

    A is uniform in +-1/sqrt(in), as in PEFT (kaiming_uniform_ with a = sqrt(5)); B is zero, so that
    training starts from the weight itself.
    """

    def __init__(
        self, weight: torch.Tensor, shard: FactorShard, config: LoRAConfig, seed: int
    ) -> None:
        super().__init__()
        self.is_enabled = True  # see disable_adapters
        self.shard, self.scale = shard, config.alpha / config.rank
        columns = slice(shard.first_input, shard.first_input + weight.shape[1])
        initial = initialize_factor(shard.name, seed, config.rank, shard.num_inputs)[:, columns]
        self.A = torch.nn.Parameter(initial.to(weight.device, weight.dtype).contiguous())
        self.B = torch.nn.Parameter(weight.new_zeros(weight.shape[0], config.rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W + scale * B @ A [out, in], computed in float32 (or float64) and rounded once."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        merged = torch.addmm(weight.to(wide), self.B.to(wide), self.A.to(wide), alpha=self.scale)
        return merged.to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return shards of full Hugging Face tensors, which any layout can read.

        Keys on disk have global numbers already, so the callers' offsets are not needed.
        """
        del sharded_offsets, metadata
        shard, columns = self.shard, self.A.shape[1]
        replicas = [(0 if split else shard.axis_rank, shard.data_rank) for split in shard.is_split]
        a = ShardedTensor.from_rank_offsets(
            f"lora.{shard.name}.A",
            self.A,
            (1, shard.first_input // columns, shard.num_inputs // columns),
            replica_id=replicas[1],
        )
        b = ShardedTensorFactory(
            f"lora.{shard.name}.B", self.B, partial(_split_rows, shard.rows), torch.cat, replicas[0]
        )
        return {f"{prefix}A": a, f"{prefix}B": b}


def _split_rows(
    rows: Sequence[RowRange], key: str, b: torch.Tensor, replica_id: Any, flattened_range: Any
) -> list[ShardedTensor]:
    """Return the shard of each Hugging Face tensor's B that local rows of B are."""
    if flattened_range is not None:
        raise ValueError(f"{key}: adapters are saved whole, not by ranges of elements")
    parts = b.split([run.count for run in rows])
    return [
        ShardedTensor.from_rank_offsets(
            f"{key}.{run.tensor}",
            part,
            (0, run.start // run.count, run.total // run.count),
            replica_id=replica_id,
        )
        for run, part in zip(rows, parts, strict=True)
    ]


def gather_factors(chunks: Sequence[PolicyModel]) -> list[Factors]:
    """Gather all adapters on the host of rank 0; return none on others. Collective over all ranks.

    Tensors of one parameter share their A.
    """
    parts = [
        (adapter.shard, adapter.A.detach().cpu(), adapter.B.detach().cpu())
        for chunk in chunks
        for adapter in chunk.lora.values()
        if adapter.shard.data_rank == 0
    ]
    received: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(parts, received)
    full_a: dict[str, torch.Tensor] = {}  # by weight
    factors: dict[str, Factors] = {}  # by tensor
    for shard, a, b in (part for rank_parts in received or () for part in rank_parts):
        shape = a.shape[0], shard.num_inputs
        full = full_a.setdefault(shard.name, a.new_empty(shape))
        full[:, shard.first_input : shard.first_input + a.shape[1]] = a
        for run, part in zip(shard.rows, b.split([r.count for r in shard.rows]), strict=True):
            empty = Factors(run.tensor, full, b.new_empty(run.total, b.shape[1]))
            factors.setdefault(run.tensor, empty).b[run.start : run.start + run.count] = part
    return list(factors.values())


class Adapters(torch.nn.ModuleDict):
    """The adapters of a chunk, by the names of the parameters that they adapt."""

    def add(self, parameter: str, adapter: Adapter) -> None:
        self[parameter.replace(".", "/")] = adapter  # a module's name may not contain a dot

    def find(self, parameter: str) -> Adapter | None:
        return self._modules.get(parameter.replace(".", "/"))  # type: ignore[return-value]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        state: ShardedStateDict = {}
        for name, adapter in self.items():
            state |= adapter.sharded_state_dict(f"{prefix}{name}.")  # type: ignore[operator]
        return state


def attach_adapters(
    chunks: Sequence[PolicyModel],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    coordinate: Coordinate,
    config: LoRAConfig,
    seed: int,
) -> None:
    """Freeze the chunks of this rank and add adapters to their target layers, as `chunk.lora`.

    Call it on a loaded model, before gradient buffers are created.

    Raises:
        ConfigError: A target is no linear layer of the model.
    """
    check_targets("lora", weights, config)
    for chunk in chunks:
        chunk.requires_grad_(False)
        if isinstance(getattr(chunk, "output_layer", None), ValueHead):
            chunk.output_layer.requires_grad_()  # new, and a single row: trained itself
        chunk.lora = Adapters()
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_require_output_gradient)
    linears: dict[Any, dict[str, Adapter]] = {}
    for weight in weights:
        if get_adapted_linear(weight) not in config.targets:
            continue
        stage = placement.find_chunk(weight)
        if stage is None or not placement.has_weight(weight, coordinate):
            continue
        chunk = chunks[stage.vpp_rank]
        name = placement.get_local_name(weight)
        path, _, parameter = name.rpartition(".")
        linear = chunk.get_submodule(path)
        frozen = getattr(linear, parameter)
        shard = FactorShard.build(
            weight,
            placement.get_shard(weight, coordinate),
            coordinate,
            placement.mesh.sizes["cp"],
        )
        adapter = Adapter(frozen, shard, config, seed)
        _mark_factors(adapter, weight, frozen)
        chunk.lora.add(name, adapter)
        linears.setdefault(linear, {})[parameter] = adapter
    for linear, adapters in linears.items():
        linear.forward = partial(_forward_merged, linear, linear.forward, adapters)
        if hasattr(linear, "fuse_wgrad_accumulation"):
            # Transformer Engine adds to the buffer of a parameter, which a merged weight lacks.
            linear.fuse_wgrad_accumulation = False


def _require_output_gradient(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Make the output of a frozen embedding require a gradient.

    Otherwise recomputed layers get none, because their input needs none
    (tensor_parallel/random.py:621), and their adapters would not be trained, without an error.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _mark_factors(adapter: Adapter, weight: Weight, frozen: torch.Tensor) -> None:
    """Set the attributes by which Megatron reduces a factor's gradient and counts its norm."""
    has_split_rows, has_split_columns = adapter.shard.is_split
    for factor, is_split in ((adapter.A, has_split_columns), (adapter.B, has_split_rows)):
        marks: dict[str, Any] = {"tensor_model_parallel": is_split}
        if weight.expert is not None:
            # The norm counts parameters that are marked as split, and on tp_rank 0 the others. TP
            # ranks have no copies of an expert, so all are marked; copies over etp are "shared".
            is_copy = not is_split and adapter.shard.axis_rank > 0
            marks = {"allreduce": False, "tensor_model_parallel": True, "shared": is_copy}
            marks["is_partial"] = not is_split
        elif weight.axis is None:
            marks["sequence_parallel"] = getattr(frozen, "sequence_parallel", False)
        else:
            # Each rank has the gradient of its part of the weight; finalize_model_grads sums marked
            # parameters over tp (distributed/finalize_model_grads.py:452).
            marks["sequence_parallel"] = not is_split
        for name, value in marks.items():
            setattr(factor, name, value)


@contextmanager
def disable_adapters(chunks: Sequence[PolicyModel]) -> Iterator[None]:
    """Run a model on its frozen base weights inside this context."""
    adapters = [adapter for chunk in chunks for adapter in chunk.lora.values()]
    for adapter in adapters:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_enabled = True


def _forward_merged(
    linear: torch.nn.Module,
    original_forward: Callable[..., Any],
    adapters: Mapping[str, Adapter],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the linear's original forward on the weights merged with their adapters."""

    def merge(parameter: str) -> torch.Tensor:
        frozen = cast(torch.nn.Parameter, linear._parameters[parameter])
        adapter = adapters[parameter]
        return adapter(frozen) if adapter.is_enabled else frozen.detach()

    # requires_grad is set without gradients, too, as in a trained weight: torch.matmul and Megatron
    # (tensor_parallel/layers.py:1095) choose by it between kernels that round differently.
    weights = {parameter: merge(parameter).requires_grad_() for parameter in adapters}
    # An attribute of the instance hides the parameter of the same name.
    linear.__dict__.update(weights)
    try:
        with _recompute_in_backward(weights, merge):
            return original_forward(*args, **kwargs)
    finally:
        for parameter in weights:
            del linear.__dict__[parameter]


def _recompute_in_backward(
    weights: Mapping[str, torch.Tensor], merge: Callable[[str], torch.Tensor]
) -> AbstractContextManager[Any]:
    """Make autograd recompute these weights and views of them instead of saving them."""
    if not torch.is_grad_enabled():
        return nullcontext()
    names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}

    def pack(tensor: torch.Tensor) -> Any:
        name = names.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return tensor
        return name, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(saved: Any) -> torch.Tensor:
        if torch.is_tensor(saved):
            return saved
        name, *view = saved
        with torch.no_grad():
            return merge(name).as_strided(*view)

    return saved_tensors_hooks(pack, unpack)


def sum_partial_gradients(chunks: Sequence[PolicyModel], config: TransformerConfig) -> None:
    """Sum the gradients of experts' factors that are replicated over expert tensor parallelism.

    Each etp rank has the gradient of its part of the weight. Megatron's finalize_model_grads sums
    over tp only, so this sum is added after it.
    """
    finalize = config.finalize_model_grads_func
    factors = [p for chunk in chunks for p in chunk.parameters() if getattr(p, "is_partial", False)]
    group = parallel_state.get_expert_tensor_parallel_group()
    if not factors or group.size() == 1:
        return

    def finalize_and_sum(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        gradients = [factor.main_grad for factor in factors]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(
            gradients, _unflatten_dense_tensors(flat, gradients), strict=True
        ):
            gradient.copy_(total)

    config.finalize_model_grads_func = finalize_and_sum
