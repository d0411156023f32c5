"""Low-rank adapters on linear layers, as merged weights (LoRA: Hu et al. 2021, arXiv:2106.09685).

A linear with an adapter runs its own forward on W + alpha / rank * B @ A (their eq. 3), formed in
each call. So the same code works for every kind of linear and every layout, and the trainer
computes with the exported weights, bit for bit. The weights W are frozen:
gradient buffers and optimizer state exist for the factors A and B only.

Merged weights are not kept for the backward pass, which merges again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

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

from mcore_rl.checkpoint.peft import Factors
from mcore_rl.config.schema import LoRAConfig
from mcore_rl.engine.lora_targets import adapted_linear, check_targets
from mcore_rl.engine.megatron.heads import ValueHead
from mcore_rl.engine.megatron.weights import WeightPlacement
from mcore_rl.parallel.mesh import Chunk, Coordinate
from mcore_rl.reshard.rules import Shard, Weight


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a local weight that are adjacent rows of one Hugging Face tensor."""

    tensor: str
    total: int  # rows of the whole tensor
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class FactorPlace:
    """Where the factors of a rank are in those of the full weight [out, in]."""

    name: str  # of the weight, with global numbers of layer and expert
    rows: tuple[Rows, ...]  # what the local rows are, in their order
    num_inputs: int  # columns of the whole weight
    first_input: int  # the first of them that this rank has
    is_split: tuple[bool, bool]  # whether other ranks of the weight's axis have other rows, columns
    axis_rank: int  # index of this rank on the weight's axis
    data_rank: int  # and among the ranks that have the same shard

    @classmethod
    def of(cls, weight: Weight, shard: Shard, at: Coordinate, cp: int) -> FactorPlace:
        blocks = sorted(weight.rule.get_blocks(shard), key=lambda block: block.local_offset)
        tensors = weight.rule.tensors
        num_outputs, num_inputs = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
        local = weight.rule.get_local_shape(shard)
        is_expert = weight.expert is not None
        return cls(
            name=weight.get_local_name(),
            rows=tuple(
                Rows(b.tensor.name, b.tensor.shape[0], b.box.offsets[0], b.box.sizes[0])
                for b in blocks
            ),
            num_inputs=num_inputs,
            first_input=blocks[0].box.offsets[1],
            is_split=(local[0] < num_outputs, local[1] < num_inputs),
            axis_rank=at.etp_rank if is_expert else at.tp_rank,
            data_rank=at.edp_rank if is_expert else at.dp_rank * cp + at.cp_rank,
        )


class Adapter(torch.nn.Module):
    """The factors of one weight of this rank: A [rank, in] and B [out, rank], in its dtype.

    A is uniform in +-1/sqrt(in), which is PEFT's choice (kaiming_uniform_ with a = sqrt(5)); B is
    zero, so that training starts from the weight itself.
    """

    def __init__(
        self, weight: torch.Tensor, place: FactorPlace, config: LoRAConfig, seed: int
    ) -> None:
        super().__init__()
        self.is_on = True  # see without_adapters
        self.place, self.scale = place, config.alpha / config.rank
        columns = slice(place.first_input, place.first_input + weight.shape[1])
        initial = initial_factor(place.name, seed, config.rank, place.num_inputs)[:, columns]
        self.A = torch.nn.Parameter(initial.to(weight.device, weight.dtype).contiguous())
        self.B = torch.nn.Parameter(weight.new_zeros(weight.shape[0], config.rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """W + scale * B @ A, [out, in]: computed in float32 (float64 stays), rounded once."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        merged = torch.addmm(weight.to(wide), self.B.to(wide), self.A.to(wide), alpha=self.scale)
        return merged.to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Shards in terms of whole Hugging Face tensors, which any layout can read.

        Keys on disk already have global numbers, so the offsets of the callers are not needed.
        """
        del sharded_offsets, metadata
        place, columns = self.place, self.A.shape[1]
        replicas = [(0 if split else place.axis_rank, place.data_rank) for split in place.is_split]
        a = ShardedTensor.from_rank_offsets(
            f"lora.{place.name}.A",
            self.A,
            (1, place.first_input // columns, place.num_inputs // columns),
            replica_id=replicas[1],
        )
        b = ShardedTensorFactory(
            f"lora.{place.name}.B", self.B, partial(_split_rows, place.rows), torch.cat, replicas[0]
        )
        return {f"{prefix}A": a, f"{prefix}B": b}


def _split_rows(
    rows: Sequence[Rows], key: str, b: torch.Tensor, replica_id: Any, flattened_range: Any
) -> list[ShardedTensor]:
    """Local rows of B, each run of them as part of the B of its Hugging Face tensor."""
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


def initial_factor(name: str, seed: int, rank: int, num_inputs: int) -> torch.Tensor:
    """[rank, num_inputs] float32: the whole A of a weight, a function of the arguments alone."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    bound = num_inputs**-0.5
    return torch.empty(rank, num_inputs).uniform_(-bound, bound, generator=generator)


def gathered_factors(chunks: Sequence[Any]) -> list[Factors]:
    """All adapters of the model on the host of rank 0, none on others. Collective over all ranks.

    Tensors of one parameter share their A.
    """
    parts = [
        (adapter.place, adapter.A.detach().cpu(), adapter.B.detach().cpu())
        for chunk in chunks
        for adapter in chunk.lora.values()
        if adapter.place.data_rank == 0
    ]
    received: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(parts, received)
    whole_a: dict[str, torch.Tensor] = {}  # by weight
    found: dict[str, Factors] = {}  # by tensor
    for place, a, b in (part for of_rank in received or () for part in of_rank):
        shape = a.shape[0], place.num_inputs
        whole = whole_a.setdefault(place.name, a.new_empty(shape))
        whole[:, place.first_input : place.first_input + a.shape[1]] = a
        for run, part in zip(place.rows, b.split([r.count for r in place.rows]), strict=True):
            empty = Factors(run.tensor, whole, b.new_empty(run.total, b.shape[1]))
            found.setdefault(run.tensor, empty).b[run.start : run.start + run.count] = part
    return list(found.values())


class Adapters(torch.nn.ModuleDict):
    """The adapters of a chunk, by the names of the parameters that they adapt."""

    def add(self, parameter: str, adapter: Adapter) -> None:
        self[_key(parameter)] = adapter

    def of(self, parameter: str) -> Adapter | None:
        return self._modules.get(_key(parameter))  # type: ignore[return-value]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        found: ShardedStateDict = {}
        for name, adapter in self.items():
            found |= adapter.sharded_state_dict(f"{prefix}{name}.")  # type: ignore[operator]
        return found


def _key(parameter: str) -> str:
    return parameter.replace(".", "/")  # a module's name may not contain a dot


def attach(
    chunks: Sequence[Any],
    weights: Sequence[Weight],
    placement: WeightPlacement,
    at: Coordinate,
    config: LoRAConfig,
    seed: int,
) -> None:
    """Freeze the chunks of this rank and give their target layers adapters: `chunk.lora`.

    To be called on a loaded model, before gradient buffers are made.

    Raises:
        ConfigError: a target is no linear layer of the model.
    """
    check_targets("lora", weights, config)
    for chunk in chunks:
        chunk.requires_grad_(False)
        if isinstance(getattr(chunk, "output_layer", None), ValueHead):
            chunk.output_layer.requires_grad_()  # new, and one row: trained itself
        chunk.lora = Adapters()
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_pass_gradients)
    linears: dict[Any, dict[str, Adapter]] = {}
    for weight in weights:
        if adapted_linear(weight) not in config.targets or not placement.holds(weight, at):
            continue
        chunk = chunks[_chunk_of(weight, placement).vpp_rank]
        name = placement.get_local_name(weight)
        path, _, parameter = name.rpartition(".")
        linear = chunk.get_submodule(path)
        frozen = getattr(linear, parameter)
        place = FactorPlace.of(weight, placement.shard(weight, at), at, placement.mesh.sizes["cp"])
        adapter = Adapter(frozen, place, config, seed)
        _mark(adapter, weight, frozen)
        chunk.lora.add(name, adapter)
        linears.setdefault(linear, {})[parameter] = adapter
    for linear, adapters in linears.items():
        linear.forward = partial(_forward, linear, linear.forward, adapters)


def _chunk_of(weight: Weight, placement: WeightPlacement) -> Chunk:
    chunk = placement.chunk(weight)
    assert chunk is not None  # a decoder layer is on a chunk
    return chunk


def _pass_gradients(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Let the output of a frozen embedding require a gradient.

    Layers that are recomputed get none otherwise, since their input needs none
    (tensor_parallel/random.py:531): their adapters would not be trained, without an error.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _mark(adapter: Adapter, weight: Weight, frozen: torch.Tensor) -> None:
    """Tell Megatron over which ranks a factor's gradient is reduced, and where its norm counts."""
    is_rows, is_columns = adapter.place.is_split
    for factor, is_split in ((adapter.A, is_columns), (adapter.B, is_rows)):
        marks: dict[str, Any] = {"tensor_model_parallel": is_split}
        if weight.expert is not None:
            # The norm counts what is marked as split, and on tp_rank 0 the rest. But ranks of tp
            # have no copies of an expert: all are marked, and copies over etp are "shared".
            is_copy = not is_split and adapter.place.axis_rank > 0
            marks = {"allreduce": False, "tensor_model_parallel": True, "shared": is_copy}
            marks["is_partial"] = not is_split
        elif weight.axis is None:
            marks["sequence_parallel"] = getattr(frozen, "sequence_parallel", False)
        else:
            # Each rank has the gradient of its part of the weight; finalize_model_grads sums what
            # is marked thus over tp (distributed/finalize_model_grads.py:354).
            marks["sequence_parallel"] = not is_split
        for name, value in marks.items():
            setattr(factor, name, value)


@contextmanager
def without_adapters(chunks: Sequence[Any]) -> Iterator[None]:
    """Inside, a model runs on its frozen weights alone: those it began with."""
    adapters = [adapter for chunk in chunks for adapter in chunk.lora.values()]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _forward(
    linear: torch.nn.Module,
    own_forward: Callable[..., Any],
    adapters: Mapping[str, Adapter],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The linear's own forward, on the weights with their adapters."""

    def formed(parameter: str) -> torch.Tensor:
        frozen = linear._parameters[parameter]
        adapter = adapters[parameter]
        return adapter(frozen) if adapter.is_on else frozen.detach()  # type: ignore

    # Without gradients too they say that they need one, as a trained weight does: torch.matmul and
    # Megatron (tensor_parallel/layers.py:949) choose by it between kernels that round differently.
    weights = {parameter: formed(parameter).requires_grad_() for parameter in adapters}
    # An attribute of the instance hides the parameter of its name, which stays where it is.
    linear.__dict__.update(weights)
    try:
        with _forgotten(weights, formed):
            return own_forward(*args, **kwargs)
    finally:
        for parameter in weights:
            del linear.__dict__[parameter]


def _forgotten(
    weights: Mapping[str, torch.Tensor], formed: Callable[[str], torch.Tensor]
) -> AbstractContextManager[Any]:
    """Inside, autograd keeps neither these weights nor views of them, but recomputes them."""
    if not torch.is_grad_enabled():
        return nullcontext()
    names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}

    def pack(tensor: torch.Tensor) -> Any:
        name = names.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return tensor
        return name, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Any) -> torch.Tensor:
        if torch.is_tensor(kept):
            return kept
        name, *view = kept
        with torch.no_grad():
            return formed(name).as_strided(*view)

    return saved_tensors_hooks(pack, unpack)


def sum_partial_gradients(chunks: Sequence[Any], config: Any) -> None:
    """Sum the gradients of experts' factors that expert tensor parallelism replicates.

    Each etp rank has the gradient of its part of the weight. Megatron's finalize_model_grads knows
    such sums over tp only, so they follow it.
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
