"""What a run leaves in its folder, and what it shows while it goes on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoint, list_steps
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.config.train_schema import TrainConfig
from mcore_rl.controller.run_scope import run_scope
from mcore_rl.data.sample_tables import go_on_after
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.next_commands import CHECKPOINT, list_next_commands
from mcore_rl.observability.console import (
    Measured,
    StepProgress,
    StepReport,
    print_before_after,
    show_line,
)
from mcore_rl.observability.metrics import Report
from mcore_rl.observability.sinks import METRICS, MetricsSinks, read_rows
from mcore_rl.observability.trackers import TrackedRun
from mcore_rl.observability.versions import versions

STARTED = "config.json"  # the first thing that a run writes, when it has been checked
# Says who has the folder. After a SIGKILL the scope of the run removes it, by this name.
_LOCK = ".lock.partial"
TRACES = "error.txt"  # in the folder of logs: why the run has failed
LOGS = "logs"  # the folder for what ranks print, and for Ray's own logs
ATTEMPT = "MCORE_RL_ATTEMPT"  # which start of the run this is, where a launch script counts them
_BEFORE_STARTED = {LOGS, "task"}  # what may be there before it, of a run that was killed
SUMMARY = "summary.json"  # the last thing


# Takes a folder, what it holds, its setting and `resume`; raises ConfigError.
CheckContent = Callable[[Path, set[str], str, str], None]


class OutputError(RunFailed):
    """What a run tells about itself could not be written."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder, and the descriptor of the lock on it: whoever holds that keeps other runs out."""

    folder: Path
    lock: int


@contextmanager
def exclusive_run_dir(
    output_dir: str, resume: str = "never", check: CheckContent | None = None
) -> Iterator[Claim]:
    """A folder for a run, new or empty but for one that goes on in it, which `check` says.

    One that was new or empty is so again at the end when no RunOutput was made in it.

    Raises:
        ConfigError: it cannot be made, another run has it, or it holds what `resume` does not go
            on from.
    """
    folder = Path(output_dir)
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir!r} cannot be made: {error.strerror}; allowed: a new folder"
        ) from error
    try:
        with _locked(file, folder, output_dir):
            held = {entry.name for entry in folder.iterdir()} - {_LOCK}
            if ATTEMPT in os.environ:
                held -= {LOGS}  # of a launch script, which writes there before the run
            (check or _check_content)(folder, held, output_dir, resume)
            is_refused = False
            try:
                yield Claim(folder, file)
            except ConfigError:
                is_refused = True
                raise
            finally:
                has_logs = (folder / LOGS).exists() and not is_refused
                if not held and not has_logs and not (folder / STARTED).exists():
                    _empty(folder)
    finally:
        os.close(file)
        with suppress(OSError):  # there is something in it
            for place in missing:
                place.rmdir()


def inspect_run_dir(
    output_dir: str, resume: str, check: CheckContent | None = None
) -> tuple[Path, list[str]]:
    """Return the folder that a run would have, and a line if the run would be refused that folder.

    A run may have it, or have left something in it.

    Raises:
        ConfigError: it cannot be made.
    """
    folder = Path(output_dir)
    try:
        with exclusive_run_dir(output_dir, resume, check):
            return folder, []
    except ConfigError as error:
        if not folder.is_dir():
            raise
        return folder, [f"the run will be refused: {error}"]


def job_scope(folder: Path, lock: int) -> AbstractContextManager[Path]:
    """The run scope of a job in a folder: what nobody else can tell of its end is in error.txt."""
    logs = log_dir(folder)
    return run_scope(folder, logs=logs / "ray", locks=[lock], trace_file=logs / TRACES)


def _check_content(folder: Path, held: set[str], output_dir: str, resume: str) -> None:
    """Raise ConfigError when a run may not begin, or go on, in a folder that holds this."""
    is_path = resume not in ("never", "auto")
    if not held or (is_path and folder.absolute() in Path(resume).absolute().parents):
        return
    told = f"output_dir={output_dir!r} is not empty"
    if resume != "auto":
        hint = ", or resume='auto' to go on with the run in it" if "checkpoints" in held else ""
        raise ConfigError(f"{told}; allowed: a new folder{hint}")
    others = {name for name in held if not name.endswith(".partial")} - _BEFORE_STARTED
    if STARTED not in held and others:
        raise ConfigError(f"{told} and holds no run: it has no {STARTED}; allowed: a new folder")
    if held & {CHECKPOINT, SUMMARY} and not list_steps(folder / "checkpoints"):
        raise ConfigError(
            f"{told}: a run has ended in it that has left no training checkpoints "
            "(trainer.save_every); allowed: a new folder"
        )


def log_dir(folder: Path) -> Path:
    """Of the run in `folder`; each attempt of a launch script has one of its own."""
    attempt = os.environ.get(ATTEMPT)
    return folder / LOGS / f"attempt_{attempt}" if attempt else folder / LOGS


@contextmanager
def _locked(file: int, folder: Path, output_dir: str) -> Iterator[None]:
    """The lock is the kernel's: it goes with the last process that has the file open."""
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


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink()


class RunOutput:
    """The folder of one run: config.json, metrics.jsonl, tensorboard/, a picture, summary.json."""

    def __init__(
        self, folder: Path, config: RLConfig | TrainConfig, resumed: RunCheckpoint | None = None
    ) -> None:
        """With `resumed` it goes on where the run was that has written it."""
        self.folder = folder
        log_dir(folder).mkdir(parents=True, exist_ok=True)
        self._config, self._layout = config, _layout(config)
        rows: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}  # for the summary
        if resumed is not None:
            rows = [
                row for row in read_rows(resumed.run / METRICS) if self._is_kept(row, resumed.step)
            ]
            self.results |= resumed.state["results"]
            # What the run left when it ended before; it goes on now.
            (folder / SUMMARY).unlink(missing_ok=True)
            shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
            if resumed.run != folder.absolute():  # of "auto", after a start that saved nothing
                config = replace(config, resume=str(resumed.path))
        go_on_after(folder, *((resumed.step, resumed.run) if resumed else (-1, folder)))
        tracked = TrackedRun(folder, config.trainer.tracker_project, asdict(config))
        self._sinks = MetricsSinks(tracked, rows, config.trainer.trackers)
        self._rewards: list[float] = [row["reward"] for row in rows if "reward" in row]
        write_json(folder / STARTED, asdict(config))

    @contextmanager
    def progress(self, phase: str, num_steps: int) -> Iterator[Report]:
        """A live display of a phase; each report is shown and recorded, or raises OutputError."""
        title = phase.replace("_", " ")
        with StepProgress(title, num_steps) as display:

            def report(step: int, metrics: dict[str, float]) -> None:
                try:
                    show(step, metrics)
                except OSError as error:
                    raise OutputError(
                        f"{title}, step {step}: metrics cannot be written: {error}"
                    ) from error

            def show(step: int, metrics: dict[str, float]) -> None:
                self._sinks.write(step, metrics, phase)
                display.update(step, self._shown(metrics))

            yield report

    def _shown(self, metrics: Mapping[str, float]) -> StepReport | str:
        """What is worth seeing of a step."""
        if "reward" not in metrics:
            return f"loss {metrics['loss']:.3f}"
        self._rewards.append(metrics["reward"])
        if "max_logprob_gap" in metrics:  # not of a step that trusts the servers
            self.compared(metrics)
        return _step_report(metrics)

    def _is_kept(self, row: Mapping[str, Any], step: int) -> bool:
        """Whether a row is of the warm start, or of a step up to this one."""
        return "reward" not in row or bool(row["step"] <= step)

    def compared(self, gaps: Mapping[str, float]) -> None:
        """Keep the largest log-prob gap between trainer and rollout of the whole run.

        `gaps` is empty where no token was compared.
        """
        if gaps:
            largest = self.results.get("max_logprob_gap", 0.0)
            self.results["max_logprob_gap"] = max(gaps["max_logprob_gap"], largest)

    def evaluated(self, when: str, found: Mapping[str, Mapping[str, float]]) -> None:
        """Record metrics of held-out sets, by name; `when` is "before" or "after"."""
        self.results["evaluation"] = self.results.get("evaluation", {}) | {when: found}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of training that come of no step of it."""
        self._sinks.write(step, metrics)

    def record(self, name: str, value: Any) -> None:
        """Put an entry of its own into the summary."""
        self.results[name] = value

    def finish(self, *, peak_memory_bytes: int, wall_s: float) -> None:
        """Write the picture and the summary, and print the table.

        Raises:
            OutputError: the disk is full, say. All else that the run leaves is there.
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

        rows = held_out_rows(self.results.get("evaluation", {}))
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
        """The last thing that a run writes and shows."""
        summary = {
            **self.results,
            "peak_memory_bytes": peak_memory_bytes,
            "wall_s": round(wall_s, 1),
            "seed": self._config.seed,
            "layout": asdict(self._layout),
            "versions": versions(),
        }
        write_json(self.folder / SUMMARY, summary)
        memory = f"{peak_memory_bytes / 1e9:.1f} GB"
        show_line(f"{wall_s:.0f} s, peak memory {memory}, in {self.folder}")
        for line in list_next_commands(self.folder, self._config):
            show_line(line)


class TrainOutput(RunOutput):
    """Of a run that trains on examples, without rewards."""

    def _shown(self, metrics: Mapping[str, float]) -> str:
        names = [name for name in ("loss", "accuracy", "margin") if name in metrics]
        shown = [f"{name} {metrics[name]:.3f}" for name in names]
        rates = f"lr {metrics['lr']:.2g}  {metrics['tokens_per_s']:,.0f} tok/s"
        return "  ".join([*shown, f"norm {metrics['grad_norm']:.2f}", rates])

    def _is_kept(self, row: Mapping[str, Any], step: int) -> bool:
        return bool(row["step"] <= step)

    def _finish(self, peak_memory_bytes: int, wall_s: float) -> None:
        self._sinks.check_place()
        self._sinks.close()
        if rows := held_out_rows(self.results.get("evaluation", {})):
            print_before_after("Held out", rows)
        self._write_summary(peak_memory_bytes, wall_s)


def held_out_rows(
    found: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> list[tuple[str, Measured | None, Measured]]:
    """Of each set its loss and its accuracy or, where it has neither, the mean reward."""
    before, after, rows = found.get("before", {}), found.get("after", {}), []
    for name, metrics in after.items():
        for kind in [kind for kind in ("loss", "accuracy") if kind in metrics] or ["reward"]:
            title = f"{kind} ({name})" if len(after) > 1 else kind
            was = _measured(before[name], kind) if name in before else None
            rows.append((title, was, _measured(metrics, kind)))
    return rows


def _measured(metrics: Mapping[str, float], kind: str) -> Measured:
    return Measured(metrics[kind], metrics[f"{kind}_stderr"], kind == "accuracy")


def _layout(config: RLConfig | TrainConfig) -> Layout:
    return config.engine.layout if isinstance(config, TrainConfig) else config.actor.layout


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(value, indent=2) + "\n")
    aside.replace(path)


def _step_report(metrics: Mapping[str, float]) -> StepReport:
    return StepReport(
        reward=metrics["reward"],
        response_tokens=metrics["response_tokens"],
        generate_s=metrics["time/generate_s"],
        train_s=metrics.get("time/log_probs_s", 0.0) + metrics.get("time/update_s", 0.0),
        sync_s=metrics["time/weight_sync_s"],
        tokens_per_s=metrics["tokens_per_s"],
    )
