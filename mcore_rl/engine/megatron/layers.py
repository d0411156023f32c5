"""Plain torch modules under Transformer Engine's parameter names, for a machine without it.

Megatron's Transformer Engine layer spec fuses norms into the next linear layers and has one weight
per expert. These modules have the same parameters under the same names, so that weight rules and
checkpoints are the same on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from mcore_rl.engine.megatron.attention import PackedAttention


def _create_norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    data = torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    weight = torch.nn.Parameter(data)
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def _normalize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
) -> torch.Tensor:
    """Divide by the root mean square and scale by the weight, or by 1 + weight in float32."""
    if not zero_centered:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), eps).to(x.dtype)


class RMSNorm(torch.nn.Module):
    """An RMS norm with sequence parallelism, which WrappedTorchNorm refuses (torch_norm.py:50)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = _create_norm_weight(hidden_size, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalize(x, self.weight, self.eps, self.zero_centered)


class LayerNorm(torch.nn.Module):
    """A layer norm, of the keys of an indexer."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _create_norm_weight(hidden_size, config)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class Norm:
    """Builds the norm that a config names: TENorm (extensions/transformer_engine.py)."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> Any:
        kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
        return kind(config, hidden_size, eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm fused into the next column-parallel linear: TELayerNormColumnParallelLinear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _create_norm_weight(input_size, config)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        normalized = _normalize(
            x,
            self.layer_norm_weight,
            config.layernorm_epsilon,
            config.layernorm_zero_centered_gamma,
        )
        return super().forward(normalized, *args, **kwargs)


class ReplicatedLinear(torch.nn.Module):
    """The full weight on every tensor-parallel rank: TELinear with parallel_mode="duplicated".

    Multi-head latent attention projects to its latents with it. A rank computes its own part of the
    sequence, so the attribute for sequence parallelism makes Megatron sum the gradients of the
    ranks. With column-parallel projections the gradient norm is off by 1e-3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], object],
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias or parallel_mode != "duplicated":
            raise ValueError("linears without a split have no bias without Transformer Engine")
        shape = (output_size, input_size)
        data = torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(data)
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [tokens / tp, 1, input] to [tokens / tp, 1, output]."""
        return F.linear(x, self.weight), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return shards with the keys of TELinear (extensions/transformer_engine.py:1098)."""
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            None,
            sharded_offsets,
            tp_group=get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


def _can_use_grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether torch.grouped_mm supports the tensors: rows of 16 bytes, on CUDA bfloat16."""
    if not len(x) or any(size * weight.itemsize % 16 for size in weight.shape):
        return False
    return x.dtype is torch.bfloat16 or (x.dtype is torch.float32 and not x.is_cuda)


class _GroupedMatmul(torch.autograd.Function):
    """x @ weight.T for the rows of each expert, in one call for all experts.

    The weights are stacked for the call, and again in the backward pass: saved between the two, the
    stacks of all layers would be a second copy of the model.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        if not any(ctx.needs_input_grad[2:]):  # frozen
            return grad_x, None, *[None] * len(weights)
        return grad_x, None, *F.grouped_mm(grad.t(), x, offs=ends).unbind()


_grouped_matmul: Callable[..., torch.Tensor] = _GroupedMatmul.apply


class GroupedLinear(torch.nn.Module):
    """One weight per expert, for that expert's rows: TEColumnParallel/RowParallelGroupedLinear.

    With `skip_bias_add` the biases are returned, else they are added.
    """

    split_dim: int  # weight dim that expert tensor parallelism shards: 0 for columns, 1 for rows

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], object],
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self._has_bias, self._skips_bias = num_gemms, bias, skip_bias_add
        self._groups = pg_collection
        shape = [output_size, input_size]
        shape[self.split_dim] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            data = torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            weight = torch.nn.Parameter(data)
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            # Also at expert TP 1, or the gradient norm leaves these weights out.
            set_tensor_model_parallel_attributes(weight, True, self.split_dim, 1)
            weight.allreduce = False  # type: ignore[attr-defined]
            setattr(self, f"weight{i}", weight)
        for i in range(num_gemms if bias else 0):  # unsplit: biases need expert TP 1
            setattr(self, f"bias{i}", torch.nn.Parameter(data.new_zeros(output_size)))

    def forward(
        self, x: torch.Tensor, rows_per_expert: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Map [rows, input] to [rows, output]; rows are sorted by expert."""
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        if _can_use_grouped_mm(x, weights[0]):
            ends = torch.tensor(rows_per_expert, device=x.device).cumsum(0, dtype=torch.int32)
            output = _grouped_matmul(x, ends, *weights)
        else:
            parts = x.split(rows_per_expert)
            output = torch.cat([F.linear(p, w) for p, w in zip(parts, weights, strict=True)])
        if not self._has_bias:
            return output, None
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        if self._skips_bias:
            return output, biases
        counts = torch.tensor(rows_per_expert, device=x.device)
        rows = torch.stack(biases).repeat_interleave(counts, 0, output_size=len(output))
        return output + rows, None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return shards, keys as in TEGroupedLinear (extensions/transformer_engine.py:2508)."""
        num_experts = self._groups.ep.size() * self.num_gemms
        first = self._groups.ep.rank() * self.num_gemms
        state: ShardedStateDict = {}
        kinds = ("weight", "bias") if self._has_bias else ("weight",)
        for i in range(self.num_gemms):
            part = make_sharded_tensors_for_checkpoint(
                {f"{i}.{kind}": getattr(self, f"{kind}{i}") for kind in kinds},
                "",
                {f"{i}.weight": self.split_dim},
                (*sharded_offsets, (len(sharded_offsets), first + i, num_experts)),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(part, f"{i}.", prefix)
            for kind in kinds:
                tensor = part[f"{i}.{kind}"]
                tensor.replica_id = (*tensor.replica_id[:2], self._groups.expt_dp.rank())
                state[f"{prefix}{kind}{i}"] = tensor
        return state


class ColumnGroupedLinear(GroupedLinear):
    split_dim = 0


class RowGroupedLinear(GroupedLinear):
    split_dim = 1


class TorchSpecProvider(BackendSpecProvider):
    """Provides the modules above for Megatron's Transformer Engine layer spec."""

    def linear(self) -> type[torch.nn.Module]:
        return ReplicatedLinear

    def column_parallel_linear(self) -> type[torch.nn.Module]:
        return cast(type[torch.nn.Module], ColumnParallelLinear)

    def row_parallel_linear(self) -> type[torch.nn.Module]:
        return cast(type[torch.nn.Module], RowParallelLinear)

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type[torch.nn.Module]:
        return NormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type[Norm]:
        return Norm

    def core_attention(self) -> type[torch.nn.Module]:
        return PackedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        submodules = GroupedMLPSubmodules(
            linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear
        )
        return partial(TEGroupedMLP, submodules=submodules)

    def activation_func(self) -> None:
        return None
