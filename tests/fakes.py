"""Stand-ins for ranks, GPUs and jobs, with the interfaces of the real ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.algorithms.correction import find_gaps_beyond
from mcore_rl.config.schema import RLConfig, RolloutConfig, SampleLogConfig
from mcore_rl.controller.dispatch import RemoteMethod
from mcore_rl.controller.process_cleanup import StopSignals
from mcore_rl.data.batch import Batch
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.inference.lifecycle import State
from mcore_rl.inference.protocol import (
    Completion,
    GenerationServer,
    SamplingParams,
    ServerSpec,
)
from mcore_rl.trainers.base import RLTrainer, TrainerInputs, load_trainer
from mcore_rl.trainers.checkpointing import CheckpointManager
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.policy_checks import compute_logprob_gaps
from mcore_rl.trainers.sample_log import SampleLog


class LocalGroup:
    """A group whose calls are methods of this object, and return what a real group's would."""

    def call(self, method: RemoteMethod[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method.name)(*args, **kwargs)


class LocalWorkers(LocalGroup):
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


class FakeServer(GenerationServer):
    """A server that serves from the beginning, and does nothing: the base of servers of tests."""

    def __init__(self) -> None:
        super().__init__(ServerSpec("", "float32", 64, RolloutConfig(), seed=0))
        self._lifecycle.state = State.SERVING

    async def start(self) -> None: ...

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        return []

    async def abort(self, request_id: str) -> None: ...

    async def load_checkpoint(self, path: str, version: int, **options: bool) -> None: ...


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
    silent = SampleLogConfig(every=0, num_shown=0, tokens=False)
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
    return load_trainer(config.trainer.mode)(inputs)


class FakeGpu:
    """The streams of one GPU: work waits in a stream until the host waits for it."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.current, self.side = FakeStream(), FakeStream()
        self.num_event_waits = self.num_device_waits = 0

    def synchronize(self) -> None:
        self.num_device_waits += 1
        for stream in (self.current, self.side):
            stream.run_until(None)


class FakeStream:
    """Work in order; a recorded event is a place in it."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], Any] | FakeEvent] = deque()

    def enqueue(self, work: Callable[[], Any]) -> None:
        self.pending.append(work)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def run_until(self, event: FakeEvent | None) -> None:
        """Run what is before the event; all without one."""
        while self.pending:
            work = self.pending.popleft()
            if isinstance(work, FakeEvent):
                if work is event:
                    return
            else:
                work()


class FakeEvent:
    """Replaces torch.cuda.Event; `gpus` are those of the process, the first is the current one."""

    gpus: list[FakeGpu]

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._stream: FakeStream | None = None

    def record(self, stream: Any = None) -> None:
        self._stream = stream or self.gpus[0].current
        self._stream.pending.append(self)

    def synchronize(self) -> None:
        if self._stream is None:
            return  # as CUDA does for an event that was never recorded
        for gpu in self.gpus:
            gpu.num_event_waits += self._stream in (gpu.current, gpu.side)
        self._stream.run_until(self)


def replace_torch_cuda(monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu]) -> None:
    """Give torch.cuda these GPUs, the first of which is the current one."""

    def gpu_of(device: Any = None) -> FakeGpu:
        return gpus[0 if device is None else torch.device(device).index or 0]

    monkeypatch.setattr(FakeEvent, "gpus", gpus, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu_of(device).current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: gpu_of(device).synchronize())
