"""Router replay: experts that servers used, as columns for the pipeline ranks that replay them.

The rollout worker adds a jagged column for each pipeline rank, with the MoE layers of that rank:
"stage_routed_experts/LAYERS". Columns are by reference and stored separately: the driver has no
expert ids, and a training rank fetches the experts of its samples and layers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged, Samples
from mcore_rl.data.sample import Sample

EXPERTS = "stage_routed_experts"  # the column that an engine reads: experts of its layers
Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """MoE layers of a model by pipeline rank."""

    stages: tuple[tuple[int, ...], ...]  # decoder layers with experts of each pipeline rank
    topk: int  # experts per token


def format_layers(layers: Sequence[int]) -> str:
    """Format decoder layers for the name of their column, after the slash."""
    return ",".join(map(str, layers)) or "none"


def list_expert_columns(batch: Samples) -> list[str]:
    """Return the names of the expert columns of all pipeline ranks."""
    return [name for name in batch.names if name.startswith(f"{EXPERTS}/")]


def add_experts(batch: Batch, samples: Sequence[Sample], layers: ExpertLayers) -> Batch:
    """Add to the batch of these samples an expert column for each pipeline rank.

    Raises:
        RuntimeError: as `split_by_stage`.
    """
    offsets = np.concatenate([[0], np.cumsum(batch.num_tokens)]).astype(np.int64)
    dtype = np.result_type(
        np.uint8, *{p.ids.dtype for sample in samples for p in sample.routed_experts}
    )
    shapes = [(int(offsets[-1]), len(stage), layers.topk) for stage in layers.stages]
    columns = [Jagged(np.empty(shape, dtype), offsets) for shape in shapes]
    for row, sample in enumerate(samples):
        for column, ids in zip(columns, split_by_stage(sample, layers), strict=True):
            column[row][:] = ids
    names = [f"{EXPERTS}/{format_layers(stage)}" for stage in layers.stages]
    return batch.with_columns(**dict(zip(names, columns, strict=True)))


def divide_experts(batch: Batch, layers: ExpertLayers | None) -> Batch:
    """Divide the expert columns of saved samples anew: by the pipeline ranks of this run.

    Args:
        layers: None if the run replays no experts: the batch then loses the columns.

    Raises:
        ConfigError: the samples lack the experts of a layer.
    """
    names = list_expert_columns(batch)
    saved = [batch.jagged(name) for name in names]
    batch = batch.drop_columns(*names)
    if layers is None or not len(batch):
        return batch
    ids = {
        layer: column.values[:, place]
        for name, column in zip(names, saved, strict=True)
        for place, layer in enumerate(name.removeprefix(f"{EXPERTS}/").split(","))
        if layer != format_layers(())
    }
    columns: dict[str, Jagged] = {}
    for stage in layers.stages:
        if missing := [layer for layer in stage if str(layer) not in ids]:
            raise ConfigError(
                "actor.moe.router_replay='rollout': the samples of the checkpoint, generated "
                f"ahead, have no experts of layers {missing}; allowed: the router_replay of the "
                "run that saved it"
            )
        values = [ids[str(layer)] for layer in stage]
        stacked = np.stack(values, axis=1) if values else saved[0].values[:, :0]
        columns[f"{EXPERTS}/{format_layers(stage)}"] = saved[0].with_values(stacked)
    return batch.with_columns(**columns)


def select_stage_experts(batch: Batch, layers: Sequence[int]) -> Batch:
    """Add the column EXPERTS with the experts of these layers, those of a pipeline rank.

    Raises:
        RuntimeError: the batch has no column of these layers.
    """
    name = f"{EXPERTS}/{format_layers(layers)}"
    if name not in batch:
        raise RuntimeError(
            f"router replay: the batch has no column {name!r}, the experts of the decoder layers "
            "of this rank, which servers fill with actor.moe.router_replay='rollout'"
        )
    return batch.with_columns(**{EXPERTS: batch[name]})


def split_by_stage(sample: Sample, layers: ExpertLayers) -> list[Ids]:
    """Return the experts of each pipeline rank: [prompt and response tokens, its layers, experts].

    No trained log-prob depends on the experts of the last token that the policy chose and of those
    after it. If the server has none for them, they get those of the token before.

    Raises:
        RuntimeError: the server has not recorded a layer, or a token.
    """
    if not (any(sample.response_mask) or sample.routed_experts):
        return [_fill_empty_turn(sample, stage, layers.topk) for stage in layers.stages]
    ids = _concat_tokens(sample, layers.topk)
    stages = []
    for stage in layers.stages:
        _check_layers(ids, stage, _describe(sample))
        stages.append(np.ascontiguousarray(ids[:, list(stage)]))
    return stages


def _fill_empty_turn(sample: Sample, stage: tuple[int, ...], topk: int) -> Ids:
    """Return arbitrary experts for a turn without a token: nothing of it is trained."""
    shape = (len(sample.prompt_ids) + len(sample.response_ids), len(stage), topk)
    return np.broadcast_to(np.arange(topk, dtype=np.uint8), shape)


def _concat_tokens(sample: Sample, topk: int) -> Ids:
    """Concatenate the recorded experts: [prompt and response tokens, decoder layers, topk]."""
    name = _describe(sample)
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
    ids = np.concatenate([part.ids for part in sample.routed_experts])
    return np.concatenate([ids, np.repeat(ids[-1:], num_tokens - num_recorded, axis=0)])


def _check_layers(ids: Ids, stage: tuple[int, ...], name: str) -> None:
    """Raise RuntimeError for a layer without records, whose ids are all 0."""
    for layer in stage:
        if layer >= ids.shape[1] or (ids.shape[2] > 1 and not ids[:, layer].any()):
            raise RuntimeError(
                f"router replay: the server has recorded no experts of layer {layer} for {name}"
            )


def _describe(sample: Sample) -> str:
    return (
        f"the sample of group {sample.group_id}, trajectory {sample.trajectory}, "
        f"segment {sample.segment}"
    )
