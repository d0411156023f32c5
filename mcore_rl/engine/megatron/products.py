"""Matrix products on a CPU in float32, by oneDNN.

torch.mm calls MKL, which uses AVX2 on CPUs that are not Intel's: an EPYC with AVX-512 takes twice
as long as with oneDNN, the library that torch uses in bfloat16 anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Multiply-adds from which oneDNN is faster although it compiles a kernel for every new shape, which
# takes some 0.3 ms.
_MIN_MULTIPLY_ADDS = 1 << 26


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b for b of two dims. Has no gradient: for autograd functions."""
    if not _suits_onednn(a, b):
        return a @ b
    rows = a.reshape(-1, a.shape[-1])
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, b.t(), None, "none", [], "")
    return product.view(*a.shape[:-1], b.shape[1])


def multiply_by_onednn(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Return an autograd function that does its products by `multiply`."""

    class Function(function):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with _Products():
                return function.forward(ctx, *inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            with _Products():
                return function.backward(ctx, *grads)

    return Function


class _Products(TorchFunctionMode):
    """Replaces torch.matmul and Tensor.matmul by `multiply`."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.matmul, torch.Tensor.matmul) and not kwargs:
            return multiply(*args)
        return function(*args, **(kwargs or {}))


def _suits_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and b.dim() == 2
        and a.numel() * b.shape[1] >= _MIN_MULTIPLY_ADDS
        and _has_onednn()
    )


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
