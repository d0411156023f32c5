"""Patches of vLLM on a CPU: compiled operators, recorded experts, expert parallelism, drafts.

Each names the upstream lines that it corrects, which are those of vLLM 0.32.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

_PROVIDER = "mcore_rl"
# vLLM's `kernel_config` that chooses our operators.
PRIORITY = {"ir_op_priority": {name: [_PROVIDER] for name in ("rms_norm", "fused_add_rms_norm")}}
_VECTOR = 16  # the size of a normed row must be a multiple of it
_CONNECTOR = "mcore_rl_experts"  # attribute of a model runner: its connector for experts


@functools.cache
def use_compiled_ops() -> None:
    """Make vLLM use its compiled norms (with PRIORITY) and rotary embeddings in this process.

    In plain torch, the norms and rotary embeddings of a small model take longer than its matrix
    products. vLLM registers the norms for GPUs only (kernels/vllm_c.py:24).
    """
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_can_norm)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        _PROVIDER, supports_args=_can_add_and_norm, inplace=True
    )(fused_add_rms_norm)
    RotaryEmbedding.forward_cpu = rotate


def _can_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _can_norm_rows(x, weight, variance_size)


def _can_add_and_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    is_contiguous = x.is_contiguous() and x_residual.is_contiguous()
    return (
        is_contiguous and x.dtype == x_residual.dtype and _can_norm_rows(x, weight, variance_size)
    )


def _can_norm_rows(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return (
        weight is not None
        and weight.dtype == x.dtype
        and variance_size is None
        and x.shape[-1] % _VECTOR == 0
    )


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Normalise rows by vLLM's compiled operator, which ignores strides."""
    output = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)
    return output


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual and normalise rows by vLLM's compiled operator, in place."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


_rotate_2d = RotaryEmbedding.forward_cpu


def rotate(
    self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate 2-D queries by the compiled operator, others by torch.

    The compiled rotation is silently wrong for 3-D queries, which MLA has: by 1 to 4 nats
    (model_executor/layers/mla.py:228, rotary_embedding/base.py:298).
    """
    is_2d = query.dim() == 2 and (key is None or key.dim() == 2)
    method = _rotate_2d if is_2d else RotaryEmbedding.forward_native
    rotated: tuple[Tensor, Tensor | None] = method(self, positions, query, key)
    return rotated


@functools.cache
def map_expert_ids() -> None:
    """Make the CPU experts use `expert_map`: ignored, expert parallelism ends in a native crash.

    (model_executor/layers/fused_moe/experts/cpu_moe.py:249.) Ids become local ones, and experts of
    other ranks get weight 0.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    upstream = CPUUnquantizedExperts.apply

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        names = ["output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"]
        names += ["global_num_experts", "expert_map"]
        kwargs |= dict(zip(names, args, strict=False))
        expert_map = kwargs.pop("expert_map")
        if expert_map is not None:
            ids = kwargs["topk_ids"]
            local = expert_map[ids.long()]
            kwargs["topk_ids"] = local.clamp(min=0).to(ids.dtype)
            kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(local < 0, 0.0)
        upstream(self, *args[len(names) :], expert_map=None, **kwargs)

    CPUUnquantizedExperts.apply = apply


@functools.cache
def route_without_groups() -> None:
    """Make the CPU's router choose by sigmoid scores without groups, which MiniMax-M2 has.

    Without groups it takes the softmax only (fused_moe/router/cpu_router.py:238). One group of all
    experts is the same choice.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    upstream = CPURouter.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        has_groups = self.use_grouped_topk or self.custom_routing_function is not None
        if self.scoring_func == "sigmoid" and not has_groups:
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    CPURouter.__init__ = initialize


@functools.cache
def repeat_sampling_parameters() -> None:
    """Make the sampler of drafts use the temperature, top-k and top-p of requests.

    vLLM's CPU operator truncates them to integers and writes into a copy of its output, so logits
    are divided by uninitialised memory (utils/cpu_triton_utils.py:398). Its top-k ends the engine
    in a step without drafted tokens (v1/sample/ops/topk_topp_sampler.py:529).
    """
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints

    def apply_sampling_constraints(logits: Tensor, *args: Any) -> Tensor:
        return constrain(logits, *args) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = repeat_by_counts
    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


def repeat_by_counts(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat the value of each request for its tokens.

    Args:
        x: [requests].
        cu_num_tokens: [requests] numbers of tokens of this and earlier requests.
        num_tokens: Tokens of all requests.
        replace_from: Value to replace by `replace_to`.

    Returns:
        [num_tokens].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


@functools.cache
def exchange_tokens() -> None:
    """Give the CPU the collectives by which data-parallel ranks exchange tokens of their experts.

    vLLM's all2all manager for CPUs calls both (distributed/device_communicators/all2all.py:115 and
    175), but only communicators of GPUs have them (base_device_communicator.py:290 and 331).
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(
    communicator: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """Concatenate the rows of all ranks, `sizes` of each; None: as many as this rank has."""
    assert dim == 0
    if isinstance(input_, list):
        return [_gather_rows(communicator, tensor, sizes) for tensor in input_]
    return _gather_rows(communicator, input_, sizes)


def _gather_rows(communicator: Any, rows: Tensor, sizes: list[int] | None) -> Tensor:
    sizes = sizes or [len(rows)] * communicator.world_size
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])  # gloo takes equal shapes alone
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    communicator: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """Sum the rows of all ranks, and return this rank's: `sizes` of each, None: equal parts."""
    assert dim == 0
    sizes = sizes or [len(input_) // communicator.world_size] * communicator.world_size
    output = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(output, group=communicator.device_group)
    part: Tensor = output.split(sizes)[communicator.rank_in_group]
    return part


@functools.cache
def gather_single_tokens() -> None:
    """Return whole states from DeepSeek-V3's layers for a batch of one token.

    Where tokens are split over tp, its layers take states for a part of the tokens if they have
    other rows than there are positions (model_executor/models/deepseek_v2.py:1360 and 1574). One
    token, padded, makes one row on each rank: without a graph, the token would be lost on all ranks
    but the first, silently. In a compiled graph the shapes differ.
    """
    from vllm.distributed import tensor_model_parallel_all_gather
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer

    upstream = DeepseekV2DecoderLayer.forward

    def forward(layer: Any, positions: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        states, residual = upstream(layer, positions, *args, **kwargs)
        if layer.use_sequence_parallel_moe and len(positions) == 1:
            both = tensor_model_parallel_all_gather(torch.cat([states, residual], dim=-1), 0)[:1]
            states, residual = both.chunk(2, dim=-1)
        return states, residual

    DeepseekV2DecoderLayer.forward = forward


@functools.cache
def hide_llvmlite() -> None:
    """Make a worker's start leave llvmlite out when it replaces Triton's kernels.

    It reads the attributes of everything in all modules (triton_utils/dispatcher.py:139), and fails
    at llvmlite's library, which has any attribute. The class of Kimi K2.5 imports it through numba.
    """
    from vllm.triton_utils import dispatcher

    upstream = dispatcher._rebind_kernels

    def rebind(overrides: Any) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]
        hidden = {name: sys.modules.pop(name) for name in names}
        try:
            upstream(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = rebind


@functools.cache
def record_experts() -> None:
    """Make the CPU's model runner report the experts of tokens, as the GPU's does.

    vLLM's scheduler asks its workers for them if `aux_output_config` says so, keeps those of cached
    prefixes by block hash, and drops them with the prefix cache
    (distributed/aux_output_connector). Only the model runner of GPUs calls the workers' side
    (v1/worker/gpu/model_runner.py:802, 1740 and 2181).
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    # worker.check_recorded_experts runs later
    VllmConfig._verify_aux_output_compatibility = lambda config: None
    initialize_kv_cache = CPUModelRunner.initialize_kv_cache
    execute_model, sample_tokens = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens

    def initialize(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize_kv_cache(runner, kv_cache_config, *args, **kwargs)
        if runner.vllm_config.aux_output_config.enabled:
            connector = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)
            setattr(runner, _CONNECTOR, connector)

    def execute(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if connector := getattr(runner, _CONNECTOR, None):
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(runner, scheduler_output, *args, **kwargs)

    def sample(runner: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(runner, *args, **kwargs)
        if (connector := getattr(runner, _CONNECTOR, None)) and output.req_ids:
            output.aux_output_connector_output = _collect_experts(runner, connector, output)
        return output

    CPUModelRunner.initialize_kv_cache = initialize
    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = execute, sample


def _collect_experts(runner: Any, connector: Any, output: Any) -> Any:
    """Return the experts of a step by request; None on a worker that reports none.

    The CPU runs one step at a time, so nothing has to be synchronised.
    """
    batch, num = runner.input_batch, len(output.req_ids)
    step = SimpleNamespace(
        req_ids=output.req_ids,
        query_start_loc_np=runner.query_start_loc.np[: num + 1],
        num_computed_tokens_np=batch.num_computed_tokens_cpu[:num],
    )
    pending = connector.prepare_output(step)
    if pending is None:
        return None
    num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
    pending.enqueue_cpu_copy(num_sampled, np.zeros(num, np.int64))
    return pending.process_output()
