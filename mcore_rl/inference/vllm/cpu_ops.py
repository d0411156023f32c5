"""Compiled operators that vLLM has for the CPU but does not use there, or uses wrongly.

In plain torch, the norms and rotary embeddings of a small model take longer than its products of
matrices. Importing this makes vLLM of this process use the compiled ones, where engine arguments
have PRIORITY as `kernel_config`. Upstream lines are those of vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

_PROVIDER = "mcore_rl"
PRIORITY = {"ir_op_priority": {name: [_PROVIDER] for name in ("rms_norm", "fused_add_rms_norm")}}
_VECTOR = 16  # what the size of a normed row must be a multiple of, in the widest dtype

current_platform.import_kernels()


def _norms_rows(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _is_normed(x, weight, variance_size)


def _adds_and_norms_rows(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    both = x.is_contiguous() and x_residual.is_contiguous() and x.dtype == x_residual.dtype
    return both and _is_normed(x, weight, variance_size)


def _is_normed(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return (
        weight is not None
        and weight.dtype == x.dtype
        and variance_size is None
        and x.shape[-1] % _VECTOR == 0
    )


# vLLM itself registers them for GPUs only (kernels/vllm_c.py:24).
@ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_norms_rows)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)  # it looks at no strides
    return output


@ir.ops.fused_add_rms_norm.register_impl(
    _PROVIDER, supports_args=_adds_and_norms_rows, inplace=True
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


_rotate = RotaryEmbedding.forward_cpu


def _rotate_rows(
    self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The compiled rotation mis-rotates 3-D queries, silently: MLA's, by 1 to 4 nats.

    (model_executor/layers/mla.py:228, rotary_embedding/base.py:298.)
    """
    rows = query.dim() == 2 and (key is None or key.dim() == 2)
    rotate = _rotate if rows else RotaryEmbedding.forward_native
    rotated: tuple[Tensor, Tensor | None] = rotate(self, positions, query, key)
    return rotated


RotaryEmbedding.forward_cpu = _rotate_rows
