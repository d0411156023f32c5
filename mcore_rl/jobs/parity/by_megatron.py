"""Megatron's side: what the ranks of a layout run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.jobs.parity.compare import Scores


def score(spec: EngineSpec, checkpoint: str, sequences: list[list[int]]) -> dict[str, Any]:
    """On a rank: scores of the sequences that its data-parallel share has.

    Weights are those of spec.model.path or, where it is not "", of the Megatron checkpoint. Empty
    on pipeline stages before the last. `spec` must ask for the likeliest id of each token.
    """
    engine = _started(spec, checkpoint)
    rows = list(range(_place(engine).dp_rank, len(sequences), engine.layout.dp))
    scored = engine.infer_batch(_batch(sequences).take(rows))
    engine.close()
    if scored is None:
        return {}
    return {
        "rows": rows,
        "log_probs": [row.tolist() for row in scored.jagged("log_probs")],
        "top_ids": [row[:, 0].tolist() for row in scored.jagged("top_ids")],
    }


def gathered(by_rank: Sequence[dict[str, Any]]) -> Scores:
    """What `score` returned on all ranks, as scores in the order of the sequences."""
    found = {}
    for rank in filter(None, by_rank):
        for row, *scores in zip(rank["rows"], rank["log_probs"], rank["top_ids"], strict=True):
            found[row] = scores
    in_order = [found[row] for row in sorted(found)]
    return Scores([log_probs for log_probs, _ in in_order], [top_ids for _, top_ids in in_order])


def trace(
    spec: EngineSpec, checkpoint: str, sequences: list[list[int]]
) -> list[dict[str, torch.Tensor]]:
    """On a rank: of each sequence, what the modules of its stage put out; [] on replicas."""
    engine = _started(spec, checkpoint)
    at, found = _place(engine), []
    for ids in sequences:
        batch = _batch([ids])
        found.append(engine.trace(batch if at.dp_rank == 0 else batch.take([])))
    engine.close()
    return found if at.dp_rank == at.cp_rank == at.tp_rank == 0 else []


def joined(by_rank: Sequence[list[dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    """What `trace` returned on all ranks: of each sequence the modules of the whole model."""
    return [
        {name: value for stage in stages for name, value in stage.items()}
        for stages in zip(*filter(None, by_rank), strict=True)
    ]


def _started(spec: EngineSpec, checkpoint: str) -> MegatronEngine:
    engine = MegatronEngine(spec)
    engine.initialize()
    if checkpoint:
        engine.load_checkpoint(Path(checkpoint))
    return engine


def _place(engine: MegatronEngine) -> Any:
    return engine.mesh.coordinate(engine.world_rank)


def _batch(sequences: list[list[int]]) -> Batch:
    """All tokens but the first are to be scored."""
    return Batch(
        {
            "prompt_ids": Jagged.of([ids[:1] for ids in sequences], np.int64),
            "response_ids": Jagged.of([ids[1:] for ids in sequences], np.int64),
        }
    )
