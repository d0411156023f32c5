"""What the ranks of a spawn run: real engines on gloo, every case of one world size in one go."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from mcore_rl.algorithms.losses import ppo_clip
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig, OptimizerConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import EngineSpec

Case = tuple[str, str, Layout]  # name, checkpoint folder, layout


@dataclass
class CaseResult:
    """What rank 0 saw of one case; columns are in the order of the whole batch."""

    log_probs: np.ndarray = field(default_factory=lambda: np.empty(0))
    entropy: np.ndarray = field(default_factory=lambda: np.empty(0))
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))
    exported: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    trained: dict[str, torch.Tensor] = field(default_factory=dict)


def grpo_loss(log_probs: torch.Tensor, columns: Any) -> Any:
    return ppo_clip(
        log_probs,
        columns["rollout_log_probs"],
        columns["advantages"],
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
    )


def engine_spec(path: str, layout: Layout, **changes: Any) -> EngineSpec:
    engine = EngineConfig(
        layout=layout,
        optimizer=OptimizerConfig(lr=1e-3, beta2=0.98, clip_grad=1.0),
        max_tokens_per_micro_batch=changes.pop("max_tokens", 96),
        logprob_chunk_tokens=changes.pop("chunk", 16),
    )
    return EngineSpec(
        model=ModelConfig(path=path), engine=engine, temperature=1.0, seed=3, total_steps=4, **changes
    )


def shares(batch: Batch, dp: int) -> list[list[int]]:
    """Uneven shares of the rows, so that ranks differ in samples and tokens."""
    cuts = np.linspace(0, len(batch), dp + 1).astype(int)
    cuts[1:-1] += 1
    return [list(range(a, b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def full_logits(engine: Any, batch: Batch) -> np.ndarray:
    """[response tokens, vocabulary], gathered over TP; the engine itself never makes them."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    from mcore_rl.engine.megatron.build import head_weight
    from mcore_rl.engine.megatron.packing import pack

    [micro] = pack(batch, 1, engine.layout.tp, engine.device)
    with torch.no_grad():
        hidden = engine.model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
        if engine.layout.tp > 1:
            hidden = gather_from_sequence_parallel_region(hidden[0])[None]
        logits = hidden[0, micro.hidden_rows] @ head_weight(engine.model).t()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)[:, : engine.scorer.vocab_size].numpy()


def run_case(path: str, layout: Layout, batch: Batch) -> CaseResult | None:
    from mcore_rl.engine.megatron.engine import MegatronEngine

    engine = MegatronEngine(engine_spec(path, layout))
    engine.initialize()
    at = engine.mesh.coordinate(engine.world_rank)
    mine = batch.take(shares(batch, layout.dp)[at.dp_rank])
    inferred = engine.infer_batch(mine)
    result = CaseResult()
    result.logits = full_logits(engine, mine)
    result.exported = dict(engine.get_per_tensor_param())
    result.steps = [engine.train_batch(mine, grpo_loss) for _ in range(2)]
    result.trained = dict(engine.get_per_tensor_param())
    columns = [np.concatenate(c) for c in zip(*_over_data_ranks(engine, inferred), strict=True)]
    result.log_probs, result.entropy = columns
    return result if engine.world_rank == 0 else None


def _over_data_ranks(engine: Any, inferred: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
    mine = tuple(inferred.jagged(name).values for name in ("log_probs", "entropy"))
    everyone: list[Any] = [None] * engine.mesh.world_size
    torch.distributed.all_gather_object(everyone, mine)
    return [everyone[ranks[0]] for ranks in
            (engine.mesh.ranks(dp_rank=d) for d in range(engine.layout.dp))]


def _rank_main(rank: int, world: int, port: int, task: Any, out: str) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }
    try:
        result = task()
        if rank == 0:
            torch.save(result, out)
    except BaseException:
        Path(f"{out}.error{rank}").write_text(traceback.format_exc())
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def spawn(world: int, task: Any, folder: Path) -> Any:
    """Run task() on `world` ranks and return what rank 0's call returned."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = str(folder / f"world{world}.pt")
    try:
        mp.start_processes(_rank_main, (world, port, task, out), nprocs=world, start_method="spawn")
    except Exception as error:
        reports = [p.read_text() for p in sorted(folder.glob(f"world{world}.pt.error*"))]
        raise AssertionError("\n".join(reports)) from error
    return torch.load(out, weights_only=False)


def run_cases(cases: list[Case], batch: Batch) -> dict[str, CaseResult | None]:
    return {name: run_case(path, layout, batch) for name, path, layout in cases}


def spawn_cases(world: int, cases: list[Case], batch: Batch, folder: Path) -> dict[str, CaseResult]:
    return spawn(world, partial(run_cases, cases, batch), folder)
