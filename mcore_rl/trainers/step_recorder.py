"""Records of the models of a run beside metrics: profiles, peaks of memory, loads of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_rl.checkpoint.run_checkpoints import format_name
from mcore_rl.config.schema import ProfileConfig
from mcore_rl.controller.dispatch import RankGroup
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.observability.expert_load import ExpertLoad, build_expert_load, is_load_due
from mcore_rl.observability.memory import GPU_MEMORY
from mcore_rl.observability.timeline import PROFILES
from mcore_rl.observability.warnings import warn

_PEAKS = ("max_allocated_bytes", "max_reserved_bytes")


class StepRecorder:
    """Collects records from the ranks of all models, with calls around each step."""

    def __init__(
        self,
        models: Mapping[str, RankGroup],
        settings: ProfileConfig,
        folder: Path,
        num_steps: int,
        record_load: Callable[[ExpertLoad], None],
        results: MutableMapping[str, Any],
    ) -> None:
        """Record nothing yet.

        Args:
            models: Workers by role.
            folder: Folder of the run.
            num_steps: Steps of the run.
            record_load: Takes the load of the experts of a trained model.
            results: The summary so far, for gpu_memory: the peaks of each rank. Of a resumed run
                it has those of earlier attempts.
        """
        self._models, self._num_steps = models, num_steps
        self._profile = asdict(settings)
        self._steps = self._profile.pop("steps")
        self._folder = folder / PROFILES
        self._record_load, self._results = record_load, results
        self._has_peaks = True  # until the ranks have answered

    def begin(self, step: int) -> None:
        """Start the profiles of the step, if it has some."""
        if step in self._steps:
            folder = self._folder / format_name(step)
            for role, model in self._models.items():
                model.call(ModelWorker.start_profile, str(folder / role), step, **self._profile)

    def finish(self, step: int) -> dict[str, float]:
        """Write the profiles of the step and the load of experts; return metrics of memory.

        On GPUs, gpu_memory/ROLE/max_allocated_bytes and max_reserved_bytes: the highest of the
        ranks so far, in all attempts of the run.
        """
        if step in self._steps:
            for role, model in self._models.items():
                for problem in filter(None, model.call(ModelWorker.stop_profile)):
                    warn(f"step {step}, profile of {role}: {problem}; the run goes on")
        if is_load_due(step, self._num_steps):
            self._record_loads(step)
        return self._collect_peaks()

    def _record_loads(self, step: int) -> None:
        for role, model in self._models.items():
            if load := model.call(ModelWorker.get_expert_load):
                self._record_load(build_expert_load(step, role, load))

    def _collect_peaks(self) -> dict[str, float]:
        if not self._has_peaks:
            return {}
        by_role = {
            role: model.call(ModelWorker.get_peak_memory) for role, model in self._models.items()
        }
        self._has_peaks = all(rank for ranks in by_role.values() for rank in ranks)
        if not self._has_peaks:  # of the CPU
            return {}
        earlier = self._results.get(GPU_MEMORY, {})
        peaks = {
            role: {
                name: _merge_peaks([rank[name] for rank in ranks], earlier.get(role, {}).get(name))
                for name in _PEAKS
            }
            for role, ranks in by_role.items()
        }
        self._results[GPU_MEMORY] = peaks
        return {
            f"{GPU_MEMORY}/{role}/{name}": max(values)
            for role, kinds in peaks.items()
            for name, values in kinds.items()
        }


def _merge_peaks(peaks: list[int], earlier: list[int] | None) -> list[int]:
    """Return the highest of each rank; earlier ones of another number of ranks are dropped."""
    if earlier is None or len(earlier) != len(peaks):
        return peaks
    return [*map(max, peaks, earlier)]
