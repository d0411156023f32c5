"""The outputs of a model's modules in one forward pass, under Hugging Face's names.

All engines use these names, so that a difference between two engines can be traced to a module:
embed_tokens; of each layer input_layernorm, self_attn, post_attention_layernorm, mlp.gate (the
router) and mlp; norm and lm_head. A value is float32 [tokens of the batch, dim], complete after all
reductions: of a router the weight of each expert, 0 if not chosen; of the head the logits.

Megatron fuses a norm into the next linear. Its output is computed here, from the input of that
linear, with the linear's own weight and epsilon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp

from mcore_rl.engine.packing import MicroBatch

if TYPE_CHECKING:
    from mcore_rl.engine.megatron.model import PolicyModel

HEAD = "lm_head"


class OutputTracer:
    """A context that records the outputs of these chunks' modules for each micro-batch."""

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        self._chunks = chunks
        # By name, in the order of the micro-batches: [tokens of this rank, dim].
        self._outputs: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._hooks: list[Any] = []

    def __enter__(self) -> OutputTracer:
        for chunk in self._chunks:
            for name, module, linear in _iter_modules(chunk):
                hook = partial(self._record_output, name, linear)
                self._hooks.append(module.register_forward_hook(hook))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _record_output(self, name: str, linear: Any, module: Any, inputs: Any, output: Any) -> None:
        if linear is not None:
            # Transformer Engine's linear has its own epsilon, the one of layers.py the model's.
            eps = getattr(linear, "eps", linear.config.layernorm_epsilon)
            output = F.rms_norm(output, output.shape[-1:], linear.layer_norm_weight, eps)
        if isinstance(output, tuple):  # (value, bias to add), or of a router (weights, choices)
            value, bias = output
            is_bias = torch.is_tensor(bias) and bias.shape == value.shape[-1:]
            output = value + bias if is_bias else value
        # Copy: Megatron adds the residual in place (fusions/fused_bias_dropout.py:56).
        self._outputs[name].append(output.detach().clone().reshape(-1, output.shape[-1]))

    def gather_outputs(
        self, micros: Sequence[MicroBatch], num_tokens: int, vocab_size: int
    ) -> dict[str, torch.Tensor]:
        """Return this pipeline stage's outputs: float32 [tokens of the batch, dim], on the CPU.

        Collective over the ranks of the stage, which get the same result.
        """
        config = self._chunks[0].config
        outputs = {}
        for name in list(self._outputs):
            parts = self._outputs.pop(name)
            if config.sequence_parallel:
                parts = [gather_from_sequence_parallel_region(part) for part in parts]
            if name == HEAD:
                parts = [self._compute_logits(part)[:, :vocab_size] for part in parts]
            outputs[name] = _restore_batch_order(parts, micros, num_tokens).cpu()
        return outputs

    def _compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return [tokens, padded vocabulary] from the states after the last norm."""
        shard = states @ self._chunks[-1].head_weight.t()
        group = parallel_state.get_tensor_model_parallel_group()
        logits: torch.Tensor = gather_from_tensor_model_parallel_region(shard, group=group)
        return logits


def _iter_modules(chunk: PolicyModel) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Yield (name, module, linear that a norm is fused into or None) in the model's order."""
    if chunk.pre_process:
        yield "model.embed_tokens", chunk.embedding, None
    for layer in chunk.decoder.layers:
        name, mlp = f"model.layers.{layer.layer_number - 1}", layer.mlp
        yield f"{name}.input_layernorm", *_find_norm(layer.input_layernorm, layer.self_attention)
        yield f"{name}.self_attn", layer.self_attention, None
        yield f"{name}.post_attention_layernorm", *_find_norm(layer.pre_mlp_layernorm, mlp)
        if hasattr(mlp, "router"):
            yield f"{name}.mlp.gate", mlp.router, None
        yield f"{name}.mlp", mlp, None
    if chunk.decoder.final_layernorm is not None:
        yield "model.norm", chunk.decoder.final_layernorm, None
    if chunk.post_process:
        yield HEAD, chunk, None  # a chunk returns its hidden states


def _find_norm(module: torch.nn.Module, block: Any) -> tuple[torch.nn.Module, Any]:
    """Return a norm module, and the first linear of the block after it if the norm is fused."""
    if not isinstance(module, IdentityOp):
        return module, None
    return module, block.linear_qkv if hasattr(block, "linear_qkv") else block.linear_fc1


def _restore_batch_order(
    parts: Sequence[torch.Tensor], micros: Sequence[MicroBatch], num_tokens: int
) -> torch.Tensor:
    """Return [tokens of the batch, dim] from this context-parallel rank's part of each pack."""
    values = torch.zeros(num_tokens, parts[0].shape[-1], device=parts[0].device)
    for part, micro in zip(parts, micros, strict=True):
        is_token = micro.token_indices >= 0
        values[micro.token_indices[is_token]] = part[is_token].float()
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
    return values
