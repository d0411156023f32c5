"""Attention and experts of transformers' models over ranks, through the library's registries.

A pack goes to every attention layer as the keyword argument `pack`. No mask is ever made, so that
families that make theirs without position ids (gpt_oss) keep sequences apart, too. What a family
states only in its mask, a window or chunks, goes to the layers as a `MaskRule` in place of it.

Sequence parallelism is Ulysses (arXiv:2309.14509): each rank has a share of the tokens, and in
attention, between two all-to-alls, all tokens of a share of the heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.masking_utils import AttentionMaskInterface

from mcore_rl.engine.attention import attend, attend_pack

ATTENTION = "mcore_rl_packed"  # name in transformers' registry of attention functions
EXPERTS = "mcore_rl_dispatched"  # name in transformers' registry of experts functions

_IGNORED = ("position_ids", "cache_position")  # tensors that attention need not know


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences of a pack, over all ranks of `group` that share its tokens (None: this rank)."""

    lengths: tuple[int, ...]
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Keys that a mask of transformers leaves to a query, among those before it in its sequence."""

    window: int | None = None  # keys of a query, itself included
    chunk: int | None = None  # attention does not leave chunks of so many tokens

    def __getitem__(self, index: Any) -> MaskRule:
        """Return the rule itself: layers slice a mask to its keys."""
        return self


def describe_mask(
    *_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any
) -> MaskRule | None:
    """Return what a mask states besides causality. The signature is that of transformers' masks.

    `mask_function` is a conjunction of the functions of transformers/masking_utils.py, whose parts
    are known by their names there. None stands for plain causality, as in most attention functions.

    Raises:
        ValueError: The mask is of another kind.
    """
    fields = dict[str, int]()
    for name in _list_mask_parts(mask_function):
        if name == "sliding_window_overlay" and local_size:
            fields["window"] = local_size
        elif name == "chunked_overlay" and local_size:
            fields["chunk"] = local_size
        elif name not in ("causal_mask_function", "packed_sequence_mask_function"):
            raise ValueError(f"attention has a mask by {name}")
    return MaskRule(**fields) if fields else None


def _list_mask_parts(mask_function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the functions that made the parts of a conjunction of masks."""
    name = mask_function.__qualname__.partition(".")[0]
    if name != "and_masks":
        yield name
        return
    for part in inspect.getclosurevars(mask_function).nonlocals["mask_functions"]:
        yield from _list_mask_parts(part)


def attend_packed(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    pack: Pack | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention inside each sequence of a pack, [1, tokens, heads, value dim].

    The signature is that of transformers' attention functions. Dropout is not applied.

    Args:
        query: [1, heads, tokens of this rank, dim]
        key: [1, groups, tokens of this rank, dim]
        value: [1, groups, tokens of this rank, value dim]
        attention_mask: Result of describe_mask. Its window is that of the layer, as in eager
            attention, which does not read `sliding_window`.
        s_aux: Logit of the attention sink of each head.

    Raises:
        ValueError: The layer asks for a mask, a bias, or attention that is not causal, or does not
            hand over the pack.
    """
    unknown = [name for name, v in options.items() if torch.is_tensor(v) and name not in _IGNORED]
    if pack is None:
        raise ValueError(f"{type(module).__name__} hands no keywords to attention")
    rule = MaskRule(window=sliding_window) if attention_mask is None else attention_mask
    if not isinstance(rule, MaskRule) or unknown or options.get("is_causal") is False:
        name = next(iter(unknown), "a mask of its own")
        raise ValueError(f"{type(module).__name__} calls attention with {name}")
    if pack.group is not None:
        count = pack.group.size()
        if query.shape[1] % count:
            raise ValueError(
                f"{query.shape[1]} attention heads do not divide by {count} sequence-parallel "
                "ranks (layout.cp)"
            )
        if key.shape[1] % count:  # fewer key/value heads than ranks: copies
            # As few copies as give each rank the same number; else one for each query head.
            copies = count // key.shape[1] if count % key.shape[1] == 0 else -1
            copies = copies if copies > 0 else query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (_exchange(x, pack.group, 1, 2) for x in (query, key, value))
        if s_aux is not None:
            s_aux = s_aux.chunk(count)[pack.group.rank()]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attend_one = partial(attend, scale=scaling, window=rule.window, softcap=softcap, sinks=s_aux)
    lengths = _split_lengths(pack.lengths, rule.chunk) if rule.chunk else pack.lengths
    out = attend_pack(q, k, v, lengths, attend_one)[None]
    if pack.group is not None:
        out = _exchange(out, pack.group, 1, 2)
    return out.contiguous(), None


def _split_lengths(lengths: Sequence[int], chunk: int) -> list[int]:
    """Return the lengths of the chunks of sequences, of which the last may be shorter."""
    return [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, scatter: int, gather: int) -> torch.Tensor:
    """Divide `scatter` over the ranks of a group, and join their parts along `gather`."""
    parts = torch.stack(x.chunk(group.size(), scatter)).contiguous()
    exchanged = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return torch.cat(exchanged.unbind(0), gather)


def dispatch_to_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Send tokens to the ranks of their experts, and return the weighted sums of the results.

    The signature is that of transformers' experts functions. `module` has this rank's share of the
    experts, the group as `ep_group`, and `can_group`, whether torch.grouped_mm takes its sizes.

    Args:
        hidden: [tokens, dim]
        chosen: [tokens, k] experts over all ranks.
        weights: [tokens, k]
    """
    group, num_local = module.ep_group, module.num_experts
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=num_local * group.size())
    counts = counts.view(group.size(), num_local)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts, group=group)
    sent, received = counts.sum(1).tolist(), received_counts.sum(1).tolist()
    tokens = _send(hidden[order // chosen.shape[1]], sent, received, group)
    local_ids = torch.arange(num_local, device=hidden.device).repeat(group.size())
    local_ids = local_ids.repeat_interleave(received_counts.flatten())
    # The weights stay on the rank of the tokens, which applies them to what returns.
    unweighted = weights.new_ones(len(tokens), 1)
    if len(tokens):
        multiply = grouped_mm_experts_forward
        if not module.can_group:  # the plain forward pass, which transformers' registry wraps
            multiply = type(module).forward.__wrapped__
        outputs = multiply(module, tokens, local_ids[:, None], unweighted)
    else:  # the parameters take part in the backward pass all the same
        outputs = tokens + 0 * sum(p.sum() for p in module.parameters(recurse=False))
    returned = _send(outputs, received, sent, group)
    # Experts of a rank are consecutive, so what returns is in the order that was sent.
    by_token = torch.zeros_like(returned).index_copy(0, order, returned)
    by_token = by_token.view(*chosen.shape, -1)
    return (by_token * weights[..., None]).sum(1).to(hidden.dtype)


def _send(
    x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    moved: torch.Tensor = all_to_all_single(output, x.contiguous(), received, sent, group=group)
    return moved


def register_functions() -> None:
    """Register attention, the rules of its masks, and experts, by the names above."""
    AttentionInterface.register(ATTENTION, attend_packed)
    AttentionMaskInterface.register(ATTENTION, describe_mask)
    ExpertsInterface.register(EXPERTS, dispatch_to_experts)
