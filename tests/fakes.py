"""Parts of runs that several test files put in the place of ranks and jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.config.schema import RLConfig, SampleTablesConfig
from mcore_rl.controller.stop_signals import StopSignals
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.trainers.base import RLTrainer, TrainerInputs
from mcore_rl.trainers.checkpointing import CheckpointManager
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.policy_checks import compute_logprob_gaps
from mcore_rl.trainers.registry import TRAINERS
from mcore_rl.trainers.sample_log import SampleLog


class LocalWorkers:
    """A group of ModelWorker in this process: the base of models that compute something simple."""

    def apply(self, function: Callable[..., Any], batch: Batch, *args: object) -> Any:
        return function(batch, *args)

    def to(self, place: str, **parts: bool) -> None: ...

    def update_with_scores(
        self: Any, batch: Batch, *, temperature: float, bounds: Mapping[str, float]
    ) -> tuple[Batch, dict[str, float], dict[str, float]]:
        """ModelWorker.update_with_scores, made of compute_log_probs and update."""
        assert "log_probs" not in batch
        scored = self.compute_log_probs(batch, temperature=temperature)
        scores = scored.select("log_probs", "entropy")
        gaps = compute_logprob_gaps(scored.with_columns(response_mask=batch["gap_mask"]))
        if find_gaps_beyond(gaps, bounds):
            return scores, gaps, {}
        [[metrics]] = self.update(scored, sizes=[len(batch)], temperature=temperature)
        return scores, gaps, metrics


def build_trainer(
    config: RLConfig,
    folder: Path,
    devices: DeviceSharing,
    *,
    prompts: PromptDataset | None = None,
    sample_log: Any = None,
    thread: Any = None,
    stop: StopSignals | None = None,
) -> RLTrainer:
    """Build the trainer of trainer.mode as a job does, without held-out prompts.

    `prompts` are thirty of one token, if they are not given.
    """
    silent = SampleTablesConfig(every=0, num_shown=0, tokens=False)
    inputs = TrainerInputs(
        config=config,
        devices=devices,
        prompts=prompts or PromptDataset([PromptRow([row], {}) for row in range(30)]),
        test_sets={},
        sample_log=sample_log or SampleLog(folder, None, silent),  # type: ignore[arg-type]
        thread=thread,
        record_evaluation=lambda *_: None,
        build_checkpoints=lambda states: CheckpointManager(
            config, folder, devices, states, dict, stop or StopSignals(), 0
        ),
    )
    return TRAINERS[config.trainer.mode](inputs)
