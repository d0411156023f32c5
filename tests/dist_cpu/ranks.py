"""What the ranks of a spawn run: real engines on gloo, all cases of one world size in one go."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from mcore_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
)
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.workers.policy_loss import PolicyLoss

Result = dict[str, Any]  # tensors, numbers and containers of them: what torch.load takes safely
Job = Callable[[], Result]

LOSS = PolicyLoss(AlgorithmConfig(kl_coef=0.1))


def engine_spec(path: Path, layout: Layout, dtype: str = "float32") -> EngineSpec:
    settings = EngineConfig(
        layout=layout,
        optimizer=OptimizerConfig(lr=1e-3, beta2=0.98, weight_decay=0.01, warmup_steps=2),
        max_tokens_per_micro_batch=96,  # several micro-batches
        logprob_chunk_bytes=32 << 10,
    )
    model = ModelConfig(path=str(path), dtype=dtype)
    return EngineSpec(model, settings, temperature=1.0, seed=3, total_steps=6)


_STARTED: list[MegatronEngine] = []


def started(spec: EngineSpec, kind: Callable[..., Any] = MegatronEngine) -> Any:
    """An engine that is closed when the job ends."""
    engine = kind(spec)
    engine.initialize()
    _STARTED.append(engine)
    return engine


def share_of(engine: MegatronEngine, batch: Batch) -> list[int]:
    """This rank's rows: an uneven share, so that ranks differ in samples and tokens."""
    dp, rank = engine.layout.dp, engine.mesh.coordinate(engine.world_rank).dp_rank
    cuts = np.linspace(0, len(batch), dp + 1).astype(int)
    cuts[1:-1] += 1
    return list(range(cuts[rank], cuts[rank + 1]))


def parity(path: Path, layout: Layout, batch: Batch, dtype: str = "float32") -> Result:
    """Scores, logits, export, and two optimizer steps with the weights after them."""
    engine = started(engine_spec(path, layout, dtype))
    rows = share_of(engine, batch)
    mine = batch.take(rows)
    scored = engine.infer_batch(mine)
    return {
        "rows": rows,
        "log_probs": [torch.from_numpy(r.copy()) for r in scored.jagged("log_probs")],
        "entropy": [torch.from_numpy(r.copy()) for r in scored.jagged("entropy")],
        "logits": full_logits(engine, mine),
        "exported": dict(engine.get_per_tensor_param()),
        "steps": [engine.train_batch(mine, LOSS) for _ in range(2)],
        "trained": dict(engine.get_per_tensor_param()),
    }


def full_logits(engine: MegatronEngine, batch: Batch) -> torch.Tensor:
    """[response tokens, vocabulary] of the whole batch; the engine itself never makes them."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from mcore_rl.engine.megatron.heads import states_at
    from mcore_rl.engine.megatron.packing import Split, pack
    from mcore_rl.engine.megatron.step import whole_column

    [micro] = pack(batch, [list(range(len(batch)))], Split.of_this_rank(), engine.device)
    [model] = engine.chunks
    with torch.no_grad():
        output = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
        logits = states_at(model.config, output, micro.hidden_rows) @ model.head_weight.t()
        group = parallel_state.get_tensor_model_parallel_group()
        whole = gather_from_tensor_model_parallel_region(logits, group=group)
    logits = whole_column(micro, whole[:, : engine.hf_config["vocab_size"]])
    lengths = batch.jagged("response_ids").lengths[micro.rows].tolist()
    by_row = dict(zip(micro.rows, logits.split(lengths), strict=True))
    return torch.cat([by_row[row] for row in sorted(by_row)])


def distributed_optimizer(path: Path, layout: Layout, batch: Batch) -> Result:
    """Two steps with the optimizer state sharded over data-parallel ranks."""
    spec = engine_spec(path, layout)
    spec.engine.optimizer.distributed = True
    engine = started(spec)
    mine = batch.take(share_of(engine, batch))
    steps = [engine.train_batch(mine, LOSS) for _ in range(2)]
    return {"steps": steps, "trained": dict(engine.get_per_tensor_param())}


def fewer_samples_than_ranks(path: Path, layout: Layout, batch: Batch) -> Result:
    """One sample on DP rank 0 and none elsewhere: two steps."""
    engine = started(engine_spec(path, layout))
    mine = batch.take([0] if engine.mesh.coordinate(engine.world_rank).dp_rank == 0 else [])
    engine.infer_batch(mine)
    return {"steps": [engine.train_batch(mine, LOSS) for _ in range(2)]}


def resume(path: Path, layout: Layout, batch: Batch, folder: Path) -> Result:
    """Four steps in one go, and two, a checkpoint, and two more in a new engine."""
    engine = started(engine_spec(path, layout))
    mine = batch.take(share_of(engine, batch))
    steps = [engine.train_batch(mine, LOSS) for _ in range(2)]
    engine.save_checkpoint(folder / "checkpoint")
    steps += [engine.train_batch(mine, LOSS) for _ in range(2)]
    trained = dict(engine.get_per_tensor_param())
    other = started(engine_spec(path, layout))
    other.load_checkpoint(folder / "checkpoint")
    resumed = [other.train_batch(mine, LOSS) for _ in range(2)]
    return {
        "steps": steps,
        "resumed": resumed,
        "trained": trained,
        "trained_after_resume": dict(other.get_per_tensor_param()),
    }


def _run_all(jobs: Mapping[str, Job]) -> Result:
    results = {}
    for name, job in jobs.items():
        results[name] = job()
        while _STARTED:
            _STARTED.pop().close()
    return results


def _rank_main(rank: int, world: int, port: int, jobs: Mapping[str, Job], folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        torch.save(_run_all(jobs), Path(folder, f"{rank}.pt"))
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def spawn(world: int, jobs: Mapping[str, Job]) -> dict[str, list[Result]]:
    """Run every job on `world` ranks; the results of each job by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            args = (world, port, dict(jobs), folder)
            mp.start_processes(_rank_main, args, nprocs=world, start_method="spawn")
        except Exception as error:
            reports = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            raise AssertionError("\n".join(reports)) from error
        by_rank = [torch.load(Path(folder, f"{r}.pt"), weights_only=True) for r in range(world)]
    return {name: [results[name] for results in by_rank] for name in jobs}


def job(function: Callable[..., Result], *args: Any) -> Job:
    return partial(function, *args)
