"""The experts that servers have used, on their way to the pipeline ranks that replay them.

A server's worker adds a column along tokens for each pipeline rank, of the MoE layers of that rank:
"stage_routed_experts/LAYERS". They are by reference, so the driver never has an expert's id, and
each has objects of its own: a training rank fetches the experts of its samples and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.data.batch import Batch, Jagged, Samples
from mcore_rl.data.sample import Sample

EXPERTS = "stage_routed_experts"  # as an engine reads those of its own layers
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Where the experts of a model are."""

    stages: tuple[tuple[int, ...], ...]  # by pipeline rank its decoder layers with experts
    topk: int  # experts a token


def part_of(layers: Sequence[int]) -> str:
    """What the column for these decoder layers is called after its slash."""
    return ",".join(map(str, layers)) or "none"


def columns_of_experts(batch: Samples) -> list[str]:
    """The names of those for all pipeline ranks."""
    return [name for name in batch.names if name.startswith(f"{EXPERTS}/")]


def with_experts(batch: Batch, samples: Sequence[Sample], layers: ExpertLayers) -> Batch:
    """The batch of these samples with a column for each pipeline rank.

    Raises:
        RuntimeError: as `by_stage`.
    """
    offsets = np.concatenate([[0], np.cumsum(batch.num_tokens)]).astype(np.int64)
    dtype = np.result_type(np.uint8, *{p.ids.dtype for one in samples for p in one.routed_experts})
    shapes = [(int(offsets[-1]), len(stage), layers.topk) for stage in layers.stages]
    columns = [Jagged(np.empty(shape, dtype), offsets) for shape in shapes]
    for row, sample in enumerate(samples):
        for column, ids in zip(columns, by_stage(sample, layers), strict=True):
            column[row][:] = ids
    names = [f"{EXPERTS}/{part_of(stage)}" for stage in layers.stages]
    return batch.with_columns(**dict(zip(names, columns, strict=True)))


def with_own_experts(batch: Batch, layers: Sequence[int]) -> Batch:
    """With the column that the engine of a pipeline rank with these layers reads.

    Raises:
        RuntimeError: there is none of these layers.
    """
    name = f"{EXPERTS}/{part_of(layers)}"
    if name not in batch:
        raise RuntimeError(
            f"router replay: the batch has no column {name!r}, the experts of the decoder layers "
            "of this rank, which servers fill with actor.moe.router_replay='rollout'"
        )
    return batch.with_columns(**{EXPERTS: batch[name]})


def by_stage(sample: Sample, layers: ExpertLayers) -> list[Ids]:
    """What each pipeline rank is to replay: [prompt and response tokens, its layers, experts].

    Tokens after the last one that the policy chose need no experts, nor does that one itself: no
    log-prob that is trained depends on them. Where the server has none they get those of the token
    before.

    Raises:
        RuntimeError: the server has not recorded a layer, or a token.
    """
    if not (any(sample.response_mask) or sample.routed_experts):
        return [_of_no_token(sample, stage, layers.topk) for stage in layers.stages]
    ids = _all_tokens(sample, layers.topk)
    found = []
    for stage in layers.stages:
        _check_layers(ids, stage, _name(sample.group_id, sample.trajectory, sample.segment))
        found.append(np.ascontiguousarray(ids[:, list(stage)]))
    return found


def _of_no_token(sample: Sample, stage: tuple[int, ...], topk: int) -> Ids:
    """Of a turn that ended before its first token: any experts, as nothing is trained."""
    shape = (len(sample.prompt_ids) + len(sample.response_ids), len(stage), topk)
    return np.broadcast_to(np.arange(topk, dtype=np.uint8), shape)


def _all_tokens(sample: Sample, topk: int) -> Ids:
    """[prompt and response tokens, decoder layers, experts a token]."""
    name = _name(sample.group_id, sample.trajectory, sample.segment)
    num_tokens, num_recorded = len(sample.prompt_ids) + len(sample.response_ids), 0
    for part in sample.routed_experts:
        if part.start != num_recorded or part.ids.shape[2] != topk:
            raise RuntimeError(
                f"router replay: {name} has {num_recorded} tokens with {topk} experts; the server "
                f"goes on at token {part.start} with {part.ids.shape[2]}"
            )
        num_recorded += len(part.ids)
    chosen = np.flatnonzero(sample.response_mask)
    needed = len(sample.prompt_ids) + int(chosen[-1]) if len(chosen) else 0
    if not max(needed, 1) <= num_recorded <= num_tokens:
        raise RuntimeError(
            f"router replay: the server has recorded the experts of {num_recorded} tokens of "
            f"{name}; it needs those of {max(needed, 1)}, and has {num_tokens} tokens"
        )
    whole = np.concatenate([part.ids for part in sample.routed_experts])
    return np.concatenate([whole, np.repeat(whole[-1:], num_tokens - num_recorded, axis=0)])


def _check_layers(ids: Ids, stage: tuple[int, ...], name: str) -> None:
    """Of a layer that was not recorded all ids are 0, and no token has an expert twice."""
    for layer in stage:
        if layer >= ids.shape[1] or (ids.shape[2] > 1 and not ids[:, layer].any()):
            raise RuntimeError(
                f"router replay: the server has recorded no experts of layer {layer} for {name}"
            )


def _name(group: int, trajectory: int, segment: int) -> str:
    return f"the sample of group {group}, trajectory {trajectory}, segment {segment}"
