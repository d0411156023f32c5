"""Outputs of a vLLM worker's modules in one request, under Hugging Face's names.

Modules are hooked during a trace. Hooks do not work inside a compiled graph, so the
engine must run eagerly. Upstream lines are those of vLLM 0.32. The server imports this module
before it imports vLLM.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_NORM = "model.norm"
# Mixtral's expert layer has an older name, gpt-oss has its own names of embedding and attention
# (model_executor/models/mixtral.py:243, gpt_oss.py:434 and 487).
_RENAMED = {"block_sparse_moe": "mlp", "embedding": "embed_tokens", "attn": "self_attn"}
_LAYER = "input_layernorm|self_attn|attn|post_attention_layernorm|mlp|block_sparse_moe"
_TRACED = re.compile(rf"(model\.(?:layers\.\d+\.)?)(embed_tokens|embedding|norm|{_LAYER})")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.)(mlp|block_sparse_moe)\.experts")
_LOGIT_ROWS = 512  # positions computed at once; their logits must fit beside the model


class TraceTaker:
    """Mixin of vLLM's worker class; `collective_rpc` calls its methods on every worker.

    Between `start_trace` and `end_trace` the engine may run one request only. The worker of rank 0
    keeps the modules' outputs; the others only take part in collectives.
    """

    model_runner: Any
    rank: int

    def start_trace(self) -> None:
        """Hook the modules."""
        self._trace = Trace()
        for full_name, module in self.model_runner.get_model().named_modules():
            name = full_name.removeprefix("language_model.")  # of a wrapper
            if (traced := _TRACED.fullmatch(name)) and (self.rank == 0 or name == _NORM):
                self._trace.hook(traced[1] + _RENAMED.get(traced[2], traced[2]), module)
            if (experts := _EXPERTS.fullmatch(name)) and self.rank == 0:
                self._trace.hook_router(f"{experts[1]}mlp.gate", module)

    def end_trace(self) -> dict[str, list[int]]:
        """Remove the hooks. Return names and shapes of the tensors that rank 0 has."""
        self._traced = self._trace.end()
        if _NORM in self._traced:
            logits = self._compute_logits(self._traced[_NORM])
            if logits:
                self._traced["lm_head"] = torch.cat(logits)
        return {n: list(t.shape) for n, t in self._traced.items()} if self.rank == 0 else {}

    def pop_traced_tensor(self, name: str) -> bytes:
        """Return the float32 values of a traced tensor in row-major order, and drop it.

        As bytes, because a tensor in an answer arrives in pieces (v1/serial_utils.py:262); one at a
        time, because a message has less than 4 GiB.
        """
        return self._traced.pop(name).numpy().tobytes() if self.rank == 0 else b""

    @torch.inference_mode()
    def _compute_logits(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Compute logits of every position, in pieces; the engine computes only the last one's.

        Returns:
            An empty list on ranks that do not gather them.
        """
        runner = self.model_runner
        pieces = hidden.to(runner.device, runner.dtype).split(_LOGIT_ROWS)
        logits = [runner.get_model().compute_logits(piece) for piece in pieces]
        return [_copy_to_cpu(piece) for piece in logits if piece is not None]


class Trace:
    """Hooks of modules, and copies of their outputs: one for each chunk of a prompt."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._routers: list[Any] = []

    def hook(self, name: str, module: torch.nn.Module) -> None:
        """Keep the outputs of a module."""

        def keep(_: torch.nn.Module, __: Any, output: Any) -> None:
            # Norms that add the residual return (normed, sum).
            self._outputs[name].append(
                _copy_to_cpu(output[0] if isinstance(output, tuple) else output)
            )

        self._hooks.append(module.register_forward_hook(keep))

    def hook_router(self, name: str, moe_runner: Any) -> None:
        """Keep routing weights as a [tokens, experts] matrix, 0 where an expert was not chosen.

        The router is no module, and the gate module returns logits only. A scale that upstream
        applies to the experts' sum (fused_moe/layer.py:435) is applied to the weights here, where
        Megatron and transformers have it.
        """
        router, scale = moe_runner.router, moe_runner.routed_scaling_factor
        select = router.select_experts

        def select_and_keep(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = select(*args, **kwargs)
            dense = weights.new_zeros(len(ids), router.global_num_experts)
            self._outputs[name].append(_copy_to_cpu(dense.scatter_(1, ids.long(), weights * scale)))
            return weights, ids

        router.select_experts = select_and_keep
        self._routers.append(router)

    def end(self) -> dict[str, torch.Tensor]:
        """Remove the hooks. Return the outputs: float32 [tokens, dim]."""
        for hook in self._hooks:
            hook.remove()
        for router in self._routers:
            del router.select_experts  # of the instance; that of the class is used again
        return {name: torch.cat(steps) for name, steps in self._outputs.items()}


def _copy_to_cpu(output: torch.Tensor) -> torch.Tensor:
    """Copy an output, on which the next module works in place."""
    return output.detach().to("cpu", torch.float32, copy=True)


async def run_trace(
    engine: AsyncLLM, prefill: AsyncIterator[Any], num_tokens: int
) -> dict[str, torch.Tensor]:
    """Run a prefill and return the outputs of the first worker's modules by name.

    Raises:
        RuntimeError: an output does not have a row for each token.
    """
    await engine.collective_rpc("start_trace")
    try:
        async for _ in prefill:
            pass
    finally:
        shapes: dict[str, list[int]] = (await engine.collective_rpc("end_trace"))[0]
    for name, (num_rows, _) in shapes.items():
        if num_rows != num_tokens:
            raise RuntimeError(f"traced {num_rows} rows of {name} for {num_tokens} tokens")
    return {name: await _fetch_tensor(engine, name, shape) for name, shape in shapes.items()}


async def _fetch_tensor(engine: AsyncLLM, name: str, shape: list[int]) -> torch.Tensor:
    values, *_ = await engine.collective_rpc("pop_traced_tensor", args=(name,))
    return torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape)
