"""The experts that servers have used, on their way to the pipeline ranks that replay them.

A server's worker stores what belongs to a sample in Ray's object store: an object for each pipeline
rank, with the MoE layers of that rank. Batches carry references to them in the column
"expert_records", so the driver never has an expert's id; a training rank fetches the objects of its
own samples and layers. An object is gone when no batch refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import ray

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample

COLUMN, STAGE_COLUMN = "expert_records", "stage_routed_experts"
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Where the experts of a model are."""

    stages: tuple[tuple[int, ...], ...]  # by pipeline rank its decoder layers with experts
    topk: int  # experts a token

    @property
    def bytes_per_token(self) -> int:
        """Of a model with at most 256 experts; with more it is twice as much."""
        return sum(map(len, self.stages)) * self.topk


@dataclass(frozen=True, slots=True)
class StageExperts:
    """What a pipeline rank is to replay of a sample."""

    layers: tuple[int, ...]  # decoder layers, numbered over the whole model
    ids: Ids  # [prompt and response tokens, layers, experts a token]


def with_records(batch: Batch, samples: Sequence[Sample], layers: ExpertLayers) -> Batch:
    """The batch of these samples with the column of references.

    Raises:
        RuntimeError: as `by_stage`.
    """
    column = np.empty(len(samples), dtype=object)
    for row, sample in enumerate(samples):
        column[row] = tuple(ray.put(stage) for stage in by_stage(sample, layers))
    return batch.with_columns(**{COLUMN: column})


def with_stage_experts(
    batch: Batch, layers: Sequence[int], pp_rank: int, timeout_s: float
) -> Batch:
    """The batch as a pipeline rank replays it, with the ids of its `layers` for the references.

    Raises:
        RuntimeError: there are no references, or what they refer to lacks a layer.
        TimeoutError: an object has not arrived in `timeout_s`.
    """
    if COLUMN not in batch:
        raise RuntimeError(
            f"router replay: the batch has no column {COLUMN!r}, which servers fill with "
            "actor.moe.router_replay='rollout'"
        )
    references = [stages[pp_rank] for stages in batch.array(COLUMN)]
    try:
        found: list[StageExperts] = ray.get(references, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(
            f"router replay: the experts of {len(references)} samples have not arrived in "
            f"{timeout_s:g} s"
        ) from error
    ids = [_of_layers(one, layers, batch, row) for row, one in enumerate(found)]
    own = {name: column for name, column in batch.columns.items() if name != COLUMN}
    dtype = np.result_type(np.uint8, *{one.dtype for one in ids})
    return Batch({**own, STAGE_COLUMN: Jagged.of(ids, dtype)})


def with_references(scored: Batch, batch: Batch) -> Batch:
    """What an engine gave for `with_stage_experts(batch)`, with the references instead again."""
    columns = {name: one for name, one in scored.columns.items() if name != STAGE_COLUMN}
    return Batch({**columns, COLUMN: batch[COLUMN]})


def by_stage(sample: Sample, layers: ExpertLayers) -> list[StageExperts]:
    """What each pipeline rank is to replay.

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
        found.append(StageExperts(stage, np.ascontiguousarray(ids[:, list(stage)])))
    return found


def _of_no_token(sample: Sample, stage: tuple[int, ...], topk: int) -> StageExperts:
    """Of a turn that ended before its first token: any experts, as nothing is trained."""
    shape = (len(sample.prompt_ids) + len(sample.response_ids), len(stage), topk)
    return StageExperts(stage, np.broadcast_to(np.arange(topk, dtype=np.uint8), shape).copy())


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


def _of_layers(stage: StageExperts, layers: Sequence[int], batch: Batch, row: int) -> Ids:
    if stage.layers == tuple(layers):
        return stage.ids
    places = {layer: place for place, layer in enumerate(stage.layers)}
    missing = [layer for layer in layers if layer not in places]
    if missing:
        names = "group_ids", "trajectories", "segments"
        name = _name(*(int(batch.array(n)[row]) if n in batch else 0 for n in names))
        raise RuntimeError(
            f"router replay: {name} has experts of layers {list(stage.layers)} for a pipeline rank "
            f"that replays {list(layers)}; missing: {missing}"
        )
    return stage.ids[:, [places[layer] for layer in layers]]


def _name(group: int, trajectory: int, segment: int) -> str:
    return f"the sample of group {group}, trajectory {trajectory}, segment {segment}"
