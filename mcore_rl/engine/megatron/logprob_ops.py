"""The inner loop of logprob.py, compiled: a tile of logits into running sums, and into gradients.

csrc/logprob/ reads each logit of a tile once in the forward pass, with or without entropy, and
overwrites the logits with gradients in the backward pass: besides the tile it needs a few numbers
per token. Each function has a reference in plain torch (`reference_*`). A tile is float32 or
bfloat16, on the CPU or a GPU; everything else is float32, on the same device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mcore_rl import _csrc

LOGIT_DTYPES = (torch.float32, torch.bfloat16)


class Sums(NamedTuple):
    """Running sums over the vocabulary, each [tokens] float32: p is exp(z - top), z a logit / T.

    They start as `empty`. Those of two halves of a vocabulary are put together by measuring both
    from the larger `top` (logprob.py's reduce).
    """

    top: torch.Tensor  # largest z so far
    total: torch.Tensor  # sum of p
    moment: torch.Tensor | None  # sum of p * (z - top); None without entropy
    chosen: torch.Tensor  # z of the target, 0 where another tile has it

    @classmethod
    def empty(cls, tokens: int, device: torch.device | str, *, with_entropy: bool) -> Sums:
        top = torch.full((tokens,), torch.finfo(torch.float32).min / 4, device=device)
        moment = torch.zeros_like(top) if with_entropy else None
        return cls(top, torch.zeros_like(top), moment, torch.zeros_like(top))

    def log_probs(self) -> torch.Tensor:
        """[tokens] log softmax at the targets, once all tiles are in."""
        return (self.chosen - self.top) - self.total.log()

    def entropy(self) -> torch.Tensor:
        """[tokens], in nats, once all tiles are in."""
        if self.moment is None:
            raise ValueError("these sums were made with with_entropy=False")
        return self.total.log() - self.moment / self.total


class LossGradients(NamedTuple):
    """What the gradient of a logit is made of, each [tokens] float32, of the whole vocabulary."""

    top: torch.Tensor
    total: torch.Tensor
    of_log_probs: torch.Tensor  # of the loss by the log-probs
    entropy: torch.Tensor | None = None  # both or neither
    of_entropy: torch.Tensor | None = None  # of the loss by the entropy


def add_tile(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_id: int,
    sums: Sums,
    *,
    temperature: float = 1.0,
    num_threads: int | None = None,
) -> None:
    """Take the logits of vocabulary ids first_id, first_id + 1, ... into the sums.

    Args:
        logits: [tokens, ids]; the ids are contiguous. Not changed.
        targets: [tokens] int64 vocabulary ids, of any tile.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    tile = _tile(logits, targets, first_id, temperature)
    tile.forward(_csrc.Sums(*_addresses(sums, logits)), *_where(logits, num_threads))


def grad_tile_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_id: int,
    of: LossGradients,
    *,
    temperature: float = 1.0,
    num_threads: int | None = None,
) -> None:
    """Overwrite the logits of a tile with the gradient of the loss by them, in their dtype.

    With z = logits / T: d log p_t / dz_j = [j = t] - p_j and dH / dz_j = -p_j (log p_j + H).
    Arguments and errors as in add_tile.
    """
    tile = _tile(logits, targets, first_id, temperature)
    top, total, of_log_probs, entropy, of_entropy = _addresses(of, logits)
    gradients = _csrc.Gradients(top, total, entropy, of_log_probs, of_entropy)
    tile.backward(gradients, *_where(logits, num_threads))


def reference_add_tile(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_id: int,
    sums: Sums,
    *,
    temperature: float = 1.0,
) -> None:
    """What add_tile does."""
    z = logits.float() / temperature
    top = torch.maximum(sums.top, z.amax(-1))
    change = sums.top - top
    x = z - top[:, None]
    p = x.exp()
    if sums.moment is not None:
        sums.moment.add_(change * sums.total).mul_(change.exp()).add_((p * x).nansum(-1))
    sums.total.mul_(change.exp()).add_(p.sum(-1))
    sums.top.copy_(top)
    index, mine = _place(targets - first_id, logits.shape[1])
    sums.chosen.add_(z.gather(1, index).squeeze(1).where(mine, 0.0))


def reference_grad_tile_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_id: int,
    of: LossGradients,
    *,
    temperature: float = 1.0,
) -> None:
    """What grad_tile_ does."""
    log_p = (logits.float() / temperature - of.top[:, None]) - of.total.log()[:, None]
    p = log_p.exp()
    index, mine = _place(targets - first_id, logits.shape[1])
    grad = -of.of_log_probs[:, None] * p
    grad.scatter_add_(1, index, (of.of_log_probs * mine)[:, None])
    if of.entropy is not None and of.of_entropy is not None:
        grad -= of.of_entropy[:, None] * p * (log_p + of.entropy[:, None])
    logits.copy_(grad / temperature)


def _place(local: torch.Tensor, ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([tokens, 1] place in the tile, [tokens] whether it is there) of each target."""
    return local.clamp(0, ids - 1)[:, None], (local >= 0) & (local < ids)


def _tile(
    logits: torch.Tensor, targets: torch.Tensor, first_id: int, temperature: float
) -> _csrc.LogitTile:
    if logits.dim() != 2 or logits.dtype not in LOGIT_DTYPES:
        raise ValueError(
            f"logits are {list(logits.shape)} {logits.dtype}; "
            "allowed: [tokens, ids] float32 or bfloat16"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}; allowed: 1 from id to id")
    if logits.device.type not in ("cpu", "cuda"):
        raise ValueError(f"logits are on {logits.device}; allowed: cpu, cuda")
    _check("targets", targets, logits, torch.int64)
    tokens, ids = logits.shape
    return _csrc.LogitTile(
        logits.data_ptr(),
        logits.dtype is torch.bfloat16,
        tokens,
        ids,
        logits.stride(0),
        targets.data_ptr(),
        first_id,
        1.0 / temperature,
    )


def _check(name: str, tensor: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype) -> None:
    shape, device = [logits.shape[0]], logits.device
    if list(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; "
            f"allowed: {shape} {dtype} on {device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride(0)}; allowed: 1")


def _addresses(tensors: Sums | LossGradients, logits: torch.Tensor) -> list[int]:
    """Of each tensor, 0 for one that is missing."""
    found = []
    for name, tensor in tensors._asdict().items():
        if tensor is not None:
            _check(name, tensor, logits, torch.float32)
        found.append(0 if tensor is None else tensor.data_ptr())
    return found


def _where(logits: torch.Tensor, num_threads: int | None) -> tuple[int, int, int]:
    """(GPU or -1, stream, threads)."""
    if logits.is_cuda:
        stream = torch.cuda.current_stream(logits.device).cuda_stream
        return logits.device.index, stream, 1
    return -1, 0, torch.get_num_threads() if num_threads is None else num_threads
