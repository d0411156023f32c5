"""Jobs of test_policy.py: updates of a policy that samples at a temperature."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ranks
import torch

from mcore_rl.config.schema import AlgorithmConfig, Layout, RLConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.jobs.run_plan import Role, plan_run
from mcore_rl.trainers.policy_loss import PolicyLoss
from tests.fakes import LocalGroup

TEMPERATURE = 2.0
LOSS = PolicyLoss(AlgorithmConfig(kl_coef=0.1, entropy_coef=0.3))


def update(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Scores, whole gradients by Hugging Face name, and the metrics of an optimizer step."""
    worker = ModelWorker(ranks.build_engine_spec(path, layout), LOSS)
    worker.initialize()
    engine = worker._engine
    ranks._STARTED.append(engine)
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    scored = worker.compute_log_probs(share, temperature=TEMPERATURE)
    result: ranks.Result = {"metrics": worker.update(share, temperature=TEMPERATURE)[0]}
    if scored is not None:
        for name in ("log_probs", "entropy"):
            column = scored.jagged(name)
            result[name] = {row: column[i].tolist() for i, row in enumerate(rows)}
    return result


def gradients(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Return the gradients of a loss at a temperature, by Hugging Face name, on rank 0."""
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout))
    share = batch.take(ranks.list_rows(engine, batch))
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(share, LOSS, forward_only=False, temperature=TEMPERATURE)
    with torch.no_grad():  # they are laid out as the weights are, and so is their export
        for chunk in engine.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return {"gradients": dict(engine.get_per_tensor_param())}


def supervised(path: Path, batch: Batch, temperature: float, folder: Path) -> ranks.Result:
    """Losses of two steps of the job's own supervised training, with its rank in this process."""
    from mcore_rl.jobs import rl

    config = RLConfig()
    config.model.path, config.model.dtype = str(path), "float32"
    config.rollout.temperature = temperature
    config.warm_start.num_steps, config.warm_start.batch_size = 2, len(batch)
    losses: list[float] = []

    @contextmanager
    def progress(*_: Any) -> Iterator[Any]:
        yield lambda step, metrics: losses.append(metrics["loss"])

    output: Any = SimpleNamespace(folder=folder, progress=progress)
    with ExitStack() as stack:
        rl._warm_start(config, plan_run(config), batch, output, _Pools(), stack)
    return {"losses": losses}


class _Group(LocalGroup, SimpleNamespace):
    """A group whose methods are given."""


class _Pools:
    """Pools with groups of one worker each, which returns results like a group."""

    @contextmanager
    def start(self, role: Role) -> Iterator[Any]:
        made = ModelWorker(*role.build_worker_arguments())
        ranks._STARTED.append(made._engine)
        yield _Group(
            initialize=made.initialize,
            update=lambda *args, **kwargs: [made.update(*args, **kwargs)],
            export=lambda *args: [made.export(*args)],
            worker_infos={0: SimpleNamespace(host=socket.gethostname())},
        )
