"""Products with float8 blocks in plain torch, in place of the kernels that vLLM's CPU build lacks.

Without AMX it has none for linear layers (kernels/linear/scaled_mm/cpu.py:241) nor for experts
(fused_moe/oracle/fp8.py). What vLLM creates, loads and reloads is its own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
from vllm.model_executor.layers.quantization import fp8
from vllm.platforms.interface import PlatformEnum


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes [..., rows, columns] times the scales of their blocks, in float32."""
    rows, columns = codes.shape[-2:]
    grown = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.float() * grown[..., :rows, :columns]


class ReferenceKernel(linear.CPUFp8BlockScaledMMKernel):
    """A linear layer: activations in bfloat16, sums in float32."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave codes and scales as they are."""

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        weight = dequantize(layer.weight, layer.weight_scale_inv)
        y = torch.nn.functional.linear(x.float(), weight)
        return (y if bias is None else y + bias.float()).to(x.dtype)


def apply_experts(
    self: Any,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Sum the experts of each token, those of this worker."""
    w13 = dequantize(layer.w13_weight, layer.w13_weight_scale_inv)
    w2 = dequantize(layer.w2_weight, layer.w2_weight_scale_inv)
    output = torch.zeros(x.shape)
    for token, (ids, weights) in enumerate(zip(topk_ids, topk_weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            local = expert if layer.expert_map is None else int(layer.expert_map[expert])
            if local >= 0:
                gate, up = (w13[local] @ x[token].float()).chunk(2)
                output[token] += weight * (w2[local] @ (torch.nn.functional.silu(gate) * up))
    return output.to(x.dtype)


def use_reference_kernels(patch: Any) -> None:
    """Use them in this process and those that it forks; `patch` is pytest's monkeypatch."""
    kernels = dict(linear._POSSIBLE_FP8_BLOCK_KERNELS)
    kernels[PlatformEnum.CPU] = [ReferenceKernel]
    patch.setattr(linear, "_POSSIBLE_FP8_BLOCK_KERNELS", kernels)
    (experts,) = oracle.backend_to_kernel_cls(oracle.Fp8MoeBackend.CPU)
    choice = oracle.Fp8MoeBackend.CPU, experts
    patch.setattr(fp8, "select_fp8_moe_backend", lambda *_, **__: choice)
    patch.setattr(fp8.Fp8MoEMethod, "process_weights_after_loading", lambda *_: None)
    patch.setattr(fp8.Fp8MoEMethod, "apply", apply_experts)
