"""The outputs of a model's modules in one forward pass, under Hugging Face's names.

All engines use these names, so that a difference between two engines can be traced
to a module: embed_tokens; of each layer input_layernorm, self_attn, post_attention_layernorm,
mlp.gate (the router) and mlp; norm and lm_head. A value is float32 [tokens of the batch, dim],
complete after all reductions: of a router the weight of each expert, 0 if not chosen; of the
head the logits.

Megatron fuses a norm into the next linear. Its output is computed here, from the input of that
linear, with the linear's own weight and epsilon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp

from mcore_rl.engine.megatron.packing import MicroBatch

HEAD = "lm_head"


class Tracing:
    """Keeps, while it is entered, what the modules of these chunks put out for each micro-batch."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        # By name, in the order of the micro-batches: [tokens of this rank, dim].
        self._seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._hooks: list[Any] = []

    def __enter__(self) -> Tracing:
        for chunk in self._chunks:
            for name, module, linear in _modules(chunk):
                keep = partial(self._keep, name, linear)
                self._hooks.append(module.register_forward_hook(keep))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _keep(self, name: str, linear: Any, module: Any, inputs: Any, output: Any) -> None:
        if linear is not None:
            output = _norm_inside(linear, output)
        if isinstance(output, tuple):  # (value, bias to add), or of a router (weights, choices)
            output = output[0]
        # A copy, for Megatron adds the residual in place (fusions/fused_bias_dropout.py:54).
        self._seen[name].append(output.detach().clone().reshape(-1, output.shape[-1]))

    def whole(
        self, micros: Sequence[MicroBatch], num_tokens: int, vocab_size: int
    ) -> dict[str, torch.Tensor]:
        """Float32 [tokens of the batch, dim], on the CPU, of each module of this pipeline stage.

        All ranks of the stage take part, and all get the same.
        """
        config = self._chunks[0].config
        found = {}
        for name in list(self._seen):
            parts = self._seen.pop(name)
            if config.sequence_parallel:
                parts = [gather_from_sequence_parallel_region(part) for part in parts]
            if name == HEAD:
                parts = [self._logits(part)[:, :vocab_size] for part in parts]
            found[name] = _in_batch_order(parts, micros, num_tokens).cpu()
        return found

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, padded vocabulary] from the states behind the last norm."""
        logits = states @ self._chunks[-1].head_weight.t()
        group = parallel_state.get_tensor_model_parallel_group()
        return gather_from_tensor_model_parallel_region(logits, group=group)


def _modules(chunk: Any) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """(name, module, linear that has a norm inside or None) of a chunk, in the model's order.

    A norm that is inside a linear has an IdentityOp in its own place.
    """
    if chunk.pre_process:
        yield "model.embed_tokens", chunk.embedding, None
    for layer in chunk.decoder.layers:
        name, mlp = f"model.layers.{layer.layer_number - 1}", layer.mlp
        yield f"{name}.input_layernorm", *_norm(layer.input_layernorm, layer.self_attention)
        yield f"{name}.self_attn", layer.self_attention, None
        yield f"{name}.post_attention_layernorm", *_norm(layer.pre_mlp_layernorm, mlp)
        if hasattr(mlp, "router"):
            yield f"{name}.mlp.gate", mlp.router, None
        yield f"{name}.mlp", mlp, None
    if chunk.decoder.final_layernorm is not None:
        yield "model.norm", chunk.decoder.final_layernorm, None
    if chunk.post_process:
        yield HEAD, chunk, None  # a chunk ends at its hidden states


def _norm(module: torch.nn.Module, block: Any) -> tuple[torch.nn.Module, Any]:
    """A norm, and the first linear of the block behind it when the norm is inside that."""
    if not isinstance(module, IdentityOp):
        return module, None
    return module, block.linear_qkv if hasattr(block, "linear_qkv") else block.linear_fc1


def _norm_inside(linear: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Transformer Engine's linear has its own epsilon, that of layers.py takes the model's."""
    eps = getattr(linear, "eps", linear.config.layernorm_epsilon)
    return F.rms_norm(inputs, inputs.shape[-1:], linear.layer_norm_weight, eps)


def _in_batch_order(
    parts: Sequence[torch.Tensor], micros: Sequence[MicroBatch], num_tokens: int
) -> torch.Tensor:
    """[tokens of the batch, dim] from what this context-parallel rank has of each micro-batch."""
    whole = torch.zeros(num_tokens, parts[0].shape[-1], device=parts[0].device)
    for part, micro in zip(parts, micros, strict=True):
        real = micro.tokens >= 0
        whole[micro.tokens[real]] = part[real].float()
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole
