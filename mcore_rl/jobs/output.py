"""The output folder of a run: who may use it, what a run writes there, which model it left."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoint, format_name, list_steps
from mcore_rl.config.atomic_file import open_lock, write_file
from mcore_rl.config.checks import check_model_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.python_objects import is_object_name
from mcore_rl.config.rules import list_test_files
from mcore_rl.config.schema import (
    EvalConfig,
    ModelConfig,
    RLConfig,
    RMConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.data.prepared_task import get_task_paths
from mcore_rl.data.sample_tables import list_tables, resume_tables
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.observability.console import (
    MeanWithError,
    StepProgress,
    StepReport,
    print_before_after,
    show_commands,
    show_line,
)
from mcore_rl.observability.expert_load import (
    EXPERT_LOAD_FILE,
    ExpertLoad,
    ExpertLoadWriter,
    read_expert_load,
)
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.observability.metrics import METRICS_FILE, MetricsLogger, Report, read_metrics
from mcore_rl.observability.process import find_command, list_versions
from mcore_rl.observability.timeline import (
    TIMELINE,
    TIMELINE_FILE,
    StepTimeline,
    TimelineWriter,
    read_timeline,
)
from mcore_rl.observability.trackers import TRAINING, TrackedRun

CHECKPOINT = "checkpoint"  # folder of the final weights
_SET = "data.sets.NAME=FILE"
_EVALUATED_ALIKE = (
    "data.prompt_column", "data.answer_column", "data.tools_column", "data.images_column",
    "data.max_image_pixels", "data.images_dir", "data.max_prompt_tokens", "rollout.max_images",
    "rollout.max_response_tokens", "rollout.tp", "rollout.dp", "rollout.ep",
    "rollout.nodes_per_server", "rollout.quantization", "rollout.kv_cache_bytes", "reward.name",
)  # fmt: skip
STARTED = "config.json"  # the first file of a run, written when its inputs have been checked
# Names the process that has the folder. After a SIGKILL the run scope removes it, by this name.
_LOCK = ".lock.partial"
TRACES = "error.txt"  # in the log folder: tracebacks of a failed run
LOGS = "logs"  # folder of the output of ranks and of Ray's logs
ATTEMPT = "MCORE_RL_ATTEMPT"  # number of this start of the run, set by launch scripts
_BEFORE_STARTED = {LOGS, "task"}  # entries that a run may leave if it is killed before config.json
SUMMARY = "summary.json"  # the last file of a run
_PEAK_MEMORY = "peak_memory_bytes"  # its entry with the memory of a run, over all processes


# Takes a folder, the names in it, output_dir and `resume`; raises ConfigError to refuse the folder.
CheckContent = Callable[[Path, set[str], str, str], None]


class OutputError(RunFailed):
    """Metrics or the summary of a run could not be written."""


@dataclass(frozen=True, slots=True)
class RunLock:
    """An output folder and its lock. The lock lasts until all processes have closed `fd`."""

    folder: Path
    fd: int  # descriptor of the lock file


@contextmanager
def lock_run_dir(
    output_dir: str, resume: str = "never", check: CheckContent | None = None
) -> Iterator[RunLock]:
    """Make and lock the output folder of a run.

    A folder that was new or empty is restored at the end if no RunOutput was made in it.

    Args:
        check: Checks the content of the folder. By default it must be empty, or hold the run that
            `resume` continues.

    Raises:
        ConfigError: The folder cannot be made, another run has it, or `check` refused its content.
    """
    folder = Path(output_dir)
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_lock(folder / _LOCK)
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} cannot be made: {error.strerror}; allowed: a new folder"
        ) from error
    try:
        with _hold_lock(file, folder, output_dir):
            names = {entry.name for entry in folder.iterdir()} - {_LOCK}
            if ATTEMPT in os.environ:
                names -= {LOGS}  # a launch script writes there before the run starts
            (check or _check_content)(folder, names, output_dir, resume)
            is_refused = False
            try:
                yield RunLock(folder, file)
            except ConfigError:
                is_refused = True
                raise
            finally:
                has_logs = (folder / LOGS).exists() and not is_refused
                if not names and not has_logs and not (folder / STARTED).exists():
                    _remove_content(folder)
    finally:
        os.close(file)
        with suppress(OSError):  # not empty
            for place in missing:
                place.rmdir()


def inspect_run_dir(
    output_dir: str, resume: str, check: CheckContent | None = None
) -> tuple[Path, list[str]]:
    """Return the output folder of a planned run, and a line if the run would be refused.

    Raises:
        ConfigError: The folder cannot be made.
    """
    folder = Path(output_dir)
    try:
        with lock_run_dir(output_dir, resume, check):
            return folder, []
    except ConfigError as error:
        if not folder.is_dir():
            raise
        return folder, [f"the run will be refused: {error}"]


def open_job_scope(run_lock: RunLock) -> AbstractContextManager[Path]:
    """Open the run scope of a job, which writes to error.txt if the job is killed."""
    logs = get_log_dir(run_lock.folder)
    folder, locks = run_lock.folder, [run_lock.fd]
    return clean_up_on_exit(folder, logs=logs / "ray", locks=locks, trace_file=logs / TRACES)


def _check_content(folder: Path, names: set[str], output_dir: str, resume: str) -> None:
    """Raise ConfigError if a run may not start, or resume, in a folder with these entries."""
    is_path = resume not in ("never", "auto")
    if not names or (is_path and folder.absolute() in Path(resume).absolute().parents):
        return
    problem = f"output_dir={output_dir!r} is not empty"
    if resume != "auto":
        hint = ", or resume='auto' to go on with the run in it" if "checkpoints" in names else ""
        raise ConfigError(f"{problem}; allowed: a new folder{hint}")
    files = {name for name in names if not name.endswith(".partial")} - _BEFORE_STARTED
    if STARTED not in names and files:
        raise ConfigError(f"{problem} and holds no run: it has no {STARTED}; allowed: a new folder")
    if names & {CHECKPOINT, SUMMARY} and not list_steps(folder / "checkpoints"):
        raise ConfigError(
            f"{problem}: a run has ended in it that has left no training checkpoints "
            "(trainer.save_every); allowed: a new folder"
        )


def get_log_dir(folder: Path) -> Path:
    """Return the log folder of the run in `folder`; a launch script has one per attempt."""
    attempt = os.environ.get(ATTEMPT)
    return folder / LOGS / f"attempt_{attempt}" if attempt else folder / LOGS


@contextmanager
def _hold_lock(file: int, folder: Path, output_dir: str) -> Iterator[None]:
    """Lock a file with flock, which lasts until the last process with the file open ends."""
    in_use = f"output_dir={output_dir!r} is in use by "
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on host {socket.gethostname()}".encode(), 0)
    except BlockingIOError:
        holder = os.pread(file, 300, 0).decode(errors="replace") or "a run that starts"
        raise ConfigError(f"{in_use}{holder}; allowed: a new folder") from None
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} cannot be locked: {error.strerror}; allowed: a folder on "
            "a file system with flock and room"
        ) from error
    path = folder / _LOCK
    try:
        is_ours = path.stat().st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        is_ours = False
    if not is_ours:
        raise ConfigError(f"{in_use}a run that ends; allowed: a new folder")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _remove_content(folder: Path) -> None:
    """Remove all entries of a folder but its lock."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink()


class RunOutput:
    """Writer of a run's folder: settings, metrics, timeline, TensorBoard, plot, summary."""

    def __init__(
        self,
        folder: Path,
        config: RLConfig | TrainConfig,
        resumed: RunCheckpoint | None = None,
    ) -> None:
        """Begin the files of a run.

        Args:
            resumed: Checkpoint that the run continues from.
        """
        self.folder = folder
        self.memory: PeakMemory | None = None  # source of the metric memory/peak_bytes
        get_log_dir(folder).mkdir(parents=True, exist_ok=True)
        self._config = config
        rows: list[dict[str, Any]] = []
        timelines: list[StepTimeline] = []
        loads: list[ExpertLoad] = []
        self.results: dict[str, Any] = {}  # entries of the summary; checkpoints have them
        if resumed is not None:
            rows = [
                row
                for row in read_metrics(resumed.run / METRICS_FILE)
                if self._is_before_resume(row, resumed.step)
            ]
            timelines = [
                timeline
                for timeline in read_timeline(resumed.run / TIMELINE_FILE)
                if timeline.phase != TRAINING or timeline.step <= resumed.step
            ]
            loads = [
                load
                for load in read_expert_load(resumed.run / EXPERT_LOAD_FILE)
                if load.step <= resumed.step
            ]
            self.results |= resumed.state["results"]
            # The run may have ended before.
            (folder / SUMMARY).unlink(missing_ok=True)
            shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
            if resumed.run != folder.absolute():  # resume="auto" after a start that saved nothing
                config = replace(config, resume=str(resumed.path))
        resume_tables(folder, *((resumed.step, resumed.run) if resumed else (-1, folder)))
        tracked = TrackedRun(folder, config.trainer.tracker_project, asdict(config))
        self._sinks = MetricsLogger(tracked, rows, config.trainer.trackers)
        self._timeline = TimelineWriter(folder, timelines)
        self._expert_load = ExpertLoadWriter(folder, loads)
        self._rewards: list[float] = [row["reward"] for row in rows if "reward" in row]
        write_json(folder / STARTED, asdict(config))

    @contextmanager
    def progress(self, phase: str, num_steps: int) -> Iterator[Report]:
        """Display a phase live; yield the function that records and shows a step's metrics.

        That function raises OutputError if the metrics cannot be written.
        """
        title = phase.replace("_", " ")
        TIMELINE.take(phase, 0)  # the spans of the start
        with StepProgress(title, num_steps) as display:

            def report(step: int, metrics: dict[str, float]) -> None:
                try:
                    show(step, metrics)
                except OSError as error:
                    raise OutputError(
                        f"{title}, step {step}: metrics cannot be written: {error}"
                    ) from error

            def show(step: int, metrics: dict[str, float]) -> None:
                if self.memory is not None:
                    peak_bytes = self._record_peak_memory(self.memory.peak_bytes)
                    metrics["memory/peak_bytes"] = peak_bytes
                self._sinks.write(step, metrics, phase)
                self._timeline.write(TIMELINE.take(phase, step))
                display.update(step, self._summarize_step(metrics))

            yield report

    def _summarize_step(self, metrics: Mapping[str, float]) -> StepReport | str:
        """Return the line of a step for the display."""
        if "reward" not in metrics:
            return f"loss {metrics['loss']:.3f}"
        self._rewards.append(metrics["reward"])
        if "max_logprob_gap" in metrics:  # absent if the step uses the servers' log-probs
            self.record_gap(metrics)
        return StepReport(
            reward=metrics["reward"],
            response_tokens=metrics["response_tokens"],
            max_logprob_gap=metrics.get("max_logprob_gap"),
            step_s=_sum_phases(metrics),
            generate_s=metrics["time/generate_s"],
            train_s=metrics.get("time/log_probs_s", 0.0) + metrics.get("time/update_s", 0.0),
            sync_s=metrics["time/weight_sync_s"],
            tokens_per_s=metrics["tokens_per_s"],
        )

    def _is_before_resume(self, row: Mapping[str, Any], step: int) -> bool:
        """Return whether a metrics row is of the warm start, or of a step up to `step`."""
        return "reward" not in row or bool(row["step"] <= step)

    def record_gap(self, gaps: Mapping[str, float]) -> None:
        """Keep the largest log-prob gap between trainer and rollout of the run.

        `gaps` is empty if no token was compared.
        """
        if gaps:
            largest = self.results.get("max_logprob_gap", 0.0)
            self.results["max_logprob_gap"] = max(gaps["max_logprob_gap"], largest)

    def record_expert_load(self, load: ExpertLoad) -> None:
        """Record the tokens of each expert in a step.

        Raises:
            OutputError: They cannot be written.
        """
        try:
            self._expert_load.write(load)
        except OSError as error:
            text = f"step {load.step}: the load of experts cannot be written: {error}"
            raise OutputError(text) from error

    def record_evaluation(self, when: str, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Record metrics of held-out sets, by set; `when` is "before" or "after"."""
        self.results["evaluation"] = self.results.get("evaluation", {}) | {when: metrics}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics outside of a training step, such as those of an evaluation."""
        self._sinks.write(step, metrics)

    def _record_peak_memory(self, peak_bytes: int) -> int:
        """Record a peak of memory; return the highest of all attempts of the run."""
        highest: int = max(peak_bytes, self.results.get(_PEAK_MEMORY, 0))
        self.results[_PEAK_MEMORY] = highest
        return highest

    def finish(self, *, peak_memory_bytes: int, wall_s: float) -> None:
        """Write the plot and the summary, and print the table.

        Raises:
            OutputError: They cannot be written, such as on a full disk. The weights are there.
        """
        try:
            self._finish(peak_memory_bytes, wall_s)
        except OSError as error:
            raise OutputError(
                f"the summary cannot be written: {error}; the weights are in "
                f"{self.folder / CHECKPOINT}"
            ) from error

    def _finish(self, peak_memory_bytes: int, wall_s: float) -> None:
        from mcore_rl.observability.plots import plot_reward_curve  # slow to import: matplotlib

        rows = list_held_out_rows(self.results.get("evaluation", {}))
        self._sinks.check_place()
        self._sinks.close()
        name, before, after = rows[0] if rows else ("", None, None)
        plot_reward_curve(
            self.folder / "reward_curve.png",
            self._rewards,
            before=before.value if before else None,
            after=after.value if after else None,
            held_out=f"held-out {name}",
        )
        if rows:
            print_before_after("Held out", rows)
        self._write_summary(peak_memory_bytes, wall_s)

    def _write_summary(self, peak_memory_bytes: int, wall_s: float) -> None:
        """Write and print the summary, the last output of a run."""
        config = self._config
        layout = config.engine.layout if isinstance(config, TrainConfig) else config.actor.layout
        peak_bytes = self._record_peak_memory(peak_memory_bytes)
        summary = {
            **self.results,
            "wall_s": round(wall_s, 1),
            "seed": self._config.seed,
            "layout": asdict(layout),
            "versions": list_versions(),
        }
        write_json(self.folder / SUMMARY, summary)
        show_line(f"{wall_s:.0f} s, peak memory {peak_bytes / 1e9:.1f} GB, in {self.folder}")
        show_commands("next:", list_next_commands(self.folder, self._config))


class SupervisedOutput(RunOutput):
    """Output of a supervised job, which has no rewards."""

    def _summarize_step(self, metrics: Mapping[str, float]) -> str:
        names = [name for name in ("loss", "accuracy", "margin") if name in metrics]
        shown = [f"{name} {metrics[name]:.3f}" for name in names]
        rates = f"lr {metrics['lr']:.2g}  {metrics['tokens_per_s']:,.0f} tok/s"
        return "  ".join([*shown, f"norm {metrics['grad_norm']:.2f}", rates])

    def _is_before_resume(self, row: Mapping[str, Any], step: int) -> bool:
        return bool(row["step"] <= step)

    def _finish(self, peak_memory_bytes: int, wall_s: float) -> None:
        self._sinks.check_place()
        self._sinks.close()
        if rows := list_held_out_rows(self.results.get("evaluation", {})):
            print_before_after("Held out", rows)
        self._write_summary(peak_memory_bytes, wall_s)


def _sum_phases(metrics: Mapping[str, float]) -> float:
    """Return the seconds of a step's phases, without its evaluation."""
    other = ("time/evaluate_s", "time/servers_idle_s")  # the latter is beside the phases
    times = [name for name in metrics if name.startswith("time/") and name not in other]
    return sum(metrics[name] for name in times)


def list_held_out_rows(
    evaluation: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> list[tuple[str, MeanWithError | None, MeanWithError]]:
    """Return loss and accuracy of each held-out set, before and after; else its mean reward."""
    before, after, rows = evaluation.get("before", {}), evaluation.get("after", {}), []
    for name, metrics in after.items():
        for kind in [kind for kind in ("loss", "accuracy") if kind in metrics] or ["reward"]:
            title = f"{kind} ({name})" if len(after) > 1 else kind
            first = _get_mean(before[name], kind) if name in before else None
            rows.append((title, first, _get_mean(metrics, kind)))
    return rows


def _get_mean(metrics: Mapping[str, float], kind: str) -> MeanWithError:
    """Return a metric with its standard error, as the table shows it."""
    return MeanWithError(metrics[kind], metrics[f"{kind}_stderr"], kind == "accuracy")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_file(path, json.dumps(value, indent=2) + "\n")


# Commands to run after a run


def list_next_commands(folder: Path, config: RLConfig | TrainConfig) -> list[list[str]]:
    """Return the words of each command to run after a run."""
    return [[*find_command(), *words] for words in _list_commands(folder, config)]


def _list_commands(folder: Path, config: RLConfig | TrainConfig) -> Iterator[list[str]]:
    """Yield the words of each command after mcore-rl."""
    yield ["report", str(folder)]
    if isinstance(config, RMConfig):
        yield ["rl", "recipe=MINE.yaml", f"reward_model.model_path={folder / CHECKPOINT}"]
        return
    if list_tables(folder):
        yield ["samples", str(folder)]
    settings = [*_list_eval_settings(folder, config)] if isinstance(config, RLConfig) else [_SET]
    if settings:
        yield ["eval", f"model.path={folder}", *settings]
    chat = ["chat", str(folder)]
    if isinstance(config, RLConfig):
        for name in ("tp", "kv_cache_bytes"):
            value = getattr(config.rollout, name)
            if value != getattr(RolloutConfig(), name):
                chat += [f"--{name.replace('_', '-')}", str(value)]
    yield chat


def _list_eval_settings(folder: Path, config: RLConfig) -> Iterator[str]:
    """Yield the settings of `mcore-rl eval`; none if it cannot evaluate like the run.

    It cannot with agents, with several reward terms, or with a reward of a Python session.
    """
    is_alike = config.agent.loop == "single_turn" and not config.reward.terms
    if not is_alike or is_object_name(config.reward.name):
        return
    files = {name: file for name, (_, file) in list_test_files(config.data).items()}
    sets = {name: file for name, file in files.items() if not is_object_name(file)}
    made = get_task_paths(folder / "task").test_file
    if config.task.name and made.is_file():
        sets["test"] = str(made)
    yield from [f"data.sets.{name}={file}" for name, file in sets.items()] or [_SET]
    for key in _EVALUATED_ALIKE:
        value, default = (reduce(getattr, key.split("."), of) for of in (config, EvalConfig()))
        if value != default:
            yield f"{key}={value}"
    if settings := config.reward.settings:
        parts = (f"{name}: {json.dumps(value)}" for name, value in settings.items())
        yield f"reward.settings={{{', '.join(parts)}}}"


# The model of a run


def read_chat_date(path: str) -> str:
    """Read model.chat_date of the run in `path`; without a run, the setting's default."""
    model: object = None
    if (Path(path) / STARTED).is_file():
        model = read_json_object(Path(path) / STARTED).get("model")
    if not isinstance(model, dict):  # config.json of transformers has no such object
        return ModelConfig.chat_date
    return str(model.get("chat_date", ModelConfig.chat_date))


def find_model_folder(path: str, setting: str = "model.path") -> Path:
    """Return the folder of a Hugging Face checkpoint.

    Args:
        path: That folder, or the output folder of a run: then its checkpoint/, written at the end,
            else its last hf/step_NNNNNN.
        setting: The setting of `path`, for errors.

    Raises:
        ConfigError: `path` is neither.
    """
    folder = Path(path)
    check_model_exists(setting, folder)
    if not folder.is_dir():
        raise ConfigError(f"{setting}={path!r} is not a folder")
    if (folder / CHECKPOINT / "config.json").is_file():
        return folder / CHECKPOINT
    if steps := list_steps(folder / "hf"):
        return folder / "hf" / format_name(steps[-1])
    if (folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{setting}={path!r} is of a run that has left no Hugging Face checkpoint yet; allowed:"
            f" a run that has ended, or one with checkpoint.hf_every, or what mcore-rl convert "
            f"mcore-to-hf makes of a checkpoint in checkpoints"
        )
    if not (folder / STARTED).is_file():
        raise ConfigError(
            f"{setting}={path!r} has no config.json; allowed: the folder of a Hugging Face "
            f"checkpoint, or the output_dir of a run"
        )
    return folder
