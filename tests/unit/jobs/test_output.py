"""Output folders: locks, metrics and summaries, full disks, commands to run next."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoint
from mcore_rl.cli import chat, report, samples
from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DPOConfig, EvalConfig, RLConfig, RMConfig, SFTConfig
from mcore_rl.controller.reaper import list_processes
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.output import (
    OutputError,
    RunOutput,
    SupervisedOutput,
    _hold_lock,
    list_next_commands,
    lock_run_dir,
)
from mcore_rl.observability.memory import PeakMemory
from mcore_rl.observability.metrics import read_metrics
from tests.small_disk import build_small_disk_command

HOLDER = """
import sys, time
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.jobs.output import lock_run_dir
with lock_run_dir(sys.argv[1]) as run_lock, clean_up_on_exit(run_lock.folder, locks=[run_lock.fd]):
    print("claimed", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path: Path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised, lock_run_dir(str(folder)):
        pass
    return str(raised.value)


def test_a_folder_that_a_run_has_is_refused_until_all_of_that_run_is_gone(holder, tmp_path: Path):
    out = tmp_path / "out"
    who = f"process {holder.pid} on host {socket.gethostname()}"
    in_use = f"output_dir={str(out)!r} is in use by {who}; allowed: a new folder"
    assert refused(out) == in_use
    [reaper] = [pid for pid, (parent, _) in list_processes().items() if parent == holder.pid]
    os.kill(reaper, signal.SIGSTOP)  # it has yet to clean up in there
    holder.kill()
    holder.wait()
    assert refused(out) == in_use
    os.kill(reaper, signal.SIGCONT)
    deadline = time.monotonic() + 30
    while list(out.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with lock_run_dir(str(out)) as run_lock:
        assert run_lock.folder == out
    assert out.exists()  # it was there before, so it stays


def test_a_lock_whose_holder_is_gone_is_none(tmp_path: Path):
    (tmp_path / ".lock.partial").write_text("process 1 on host nowhere")
    with lock_run_dir(str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_its_run_removes_meanwhile_is_none(tmp_path: Path):
    """Or a third run could lock another file of that name, beside the second."""
    out = tmp_path / "out"
    with lock_run_dir(str(out)):
        late = os.open(out / ".lock.partial", os.O_RDWR)  # before it goes
    with (
        pytest.raises(ConfigError, match="is in use by a run that ends"),
        _hold_lock(late, out, str(out)),
    ):
        pass
    os.close(late)


@pytest.mark.parametrize(("error", "left"), [(ConfigError, []), (KeyError, ["runs"])])
def test_logs_stay_but_for_a_run_that_was_refused(tmp_path: Path, error, left):
    out = tmp_path / "runs" / "out"
    with pytest.raises(error), lock_run_dir(str(out)) as run_lock:
        (run_lock.folder / "logs" / "ray").mkdir(parents=True)
        raise error("no cluster answers")
    assert [path.name for path in tmp_path.iterdir()] == left
    assert not left or [path.name for path in out.iterdir()] == ["logs"]


def test_the_largest_gap_of_the_run_stays_in_the_summary(tmp_path: Path):
    output = RunOutput(tmp_path, RLConfig())
    for gap in (0.25, 0.5, 0.125):
        output.record_gap({"max_logprob_gap": gap})
    output.record_gap({})  # of samples without a chosen token
    assert output.results == {"max_logprob_gap": 0.5}


def test_steps_that_compare_no_log_probs_have_no_gap(tmp_path: Path):
    names = ("reward", "response_tokens", "tokens_per_s", "time/generate_s", "time/log_probs_s")
    metrics = dict.fromkeys((*names, "time/update_s", "time/weight_sync_s"), 1.0)
    output = RunOutput(tmp_path, RLConfig())
    with output.progress("training", 1) as report:
        report(1, metrics)
    assert output.results == {}
    output.record_gap({"max_logprob_gap": 0.25})  # of the evaluation in the end
    assert output.results == {"max_logprob_gap": 0.25}


def test_each_step_has_the_peak_memory_so_far(tmp_path: Path):
    with PeakMemory() as memory:
        output = SupervisedOutput(tmp_path, SFTConfig())
        output.memory = memory
        with output.progress("training", 1) as report:
            report(1, {"loss": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "grad_norm": 1.0})
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    assert 1e6 < row["memory/peak_bytes"] <= memory.peak_bytes


@pytest.mark.parametrize(("earlier", "is_higher"), [(1 << 50, True), (1, False)])
def test_peak_memory_of_a_resumed_run_is_the_highest_of_its_attempts(tmp_path, earlier, is_higher):
    state = {"results": {"peak_memory_bytes": earlier}}
    checkpoint = RunCheckpoint(tmp_path / "checkpoints" / "step_000001", 1, state)
    with PeakMemory() as memory:
        output = SupervisedOutput(tmp_path, SFTConfig(), checkpoint)
        output.memory = memory
        with output.progress("training", 2) as report:
            report(2, {"loss": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "grad_norm": 1.0})
    output.finish(peak_memory_bytes=memory.peak_bytes, wall_s=0.0)
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (row["memory/peak_bytes"] == earlier) is is_higher
    assert summary["peak_memory_bytes"] == max(earlier, memory.peak_bytes)


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path):
    (tmp_path / "mine").write_text("x")
    assert refused(tmp_path) == f"output_dir={str(tmp_path)!r} is not empty; allowed: a new folder"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


FULL = """
import json
import sys
from pathlib import Path
from mcore_rl.config.schema import DPOConfig, RLConfig
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.jobs.output import OutputError, RunOutput
folder = Path(sys.argv[1])
output = RunOutput(folder, RLConfig())
try:
    (folder / "filler").write_bytes(bytes(8 << 20))
except OSError:
    pass
try:
    with output.progress("training", 1000) as report:
        for step in range(1, 1000):
            report(step, {"loss": 0.5} | {f"metric_{number}": 0.25 for number in range(100)})
except OutputError as error:
    print(error)
print(len([json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]))
try:
    with summarize_failure(folder / "logs" / "error.txt"):
        raise KeyError("the cause")
except RunFailed as error:
    print(error)
"""


@pytest.mark.job
def test_full_disk_is_reported_without_a_traceback(tmp_path: Path):
    (tmp_path / "script.py").write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, tmp_path / "script.py", disk]
    done = subprocess.run(
        build_small_disk_command(disk, "4m", command), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *_, metrics, rows, cause = done.stdout.splitlines()
    assert metrics.startswith("training, step ")
    assert "metrics cannot be written: [Errno 28] No space left on device" in metrics
    # Each row is whole, though the disk had room for the beginning of another.
    assert rows == str(int(metrics.split()[2].strip(":")) - 1)
    assert cause.startswith("KeyError: 'the cause' (no disk space for the traceback: [Errno 28]")


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replace_file(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").touch()


def put_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


GONE = {"deleted": shutil.rmtree, "moved": move, "a new file": replace_file, "a file": put_file}


@pytest.mark.parametrize("lose", GONE.values(), ids=list(GONE))
def test_a_folder_that_is_gone_ends_the_run_at_its_next_step(tmp_path: Path, lose):
    folder = tmp_path / "out"
    output = RunOutput(folder, RLConfig())
    with output.progress("training", 3) as report:
        report(1, {"loss": 0.5})
        lose(folder)
        message = rf"^training, step 2: metrics cannot be written: .*{folder}/metrics.jsonl"
        with pytest.raises(OutputError, match=message) as raised:
            report(2, {"loss": 0.25})
    assert "was deleted, moved or replaced while the run wrote it" in str(raised.value)


def test_a_folder_that_is_gone_at_the_end_is_no_success(tmp_path: Path):
    for number, kind in enumerate((RunOutput(tmp_path / "a", RLConfig()),
                                   SupervisedOutput(tmp_path / "b", DPOConfig()))):  # fmt: skip
        kind.record_evaluation("after", {"test": {"reward": 0.0, "reward_stderr": 0.0}})
        shutil.rmtree(kind.folder)
        with pytest.raises(OutputError, match=r"summary cannot be written: .*was deleted"):
            kind.finish(peak_memory_bytes=0, wall_s=0.0)
        assert not (tmp_path / "ab"[number] / "summary.json").exists()


def test_a_summary_that_cannot_be_written_says_where_the_weights_are(tmp_path: Path):
    output = RunOutput(tmp_path, RLConfig())
    output.record_evaluation("after", {"test": {"reward": 0.0, "reward_stderr": 0.0}})
    (tmp_path / "summary.json").mkdir()  # what a full disk does to a rename
    with pytest.raises(RunFailed, match=rf"summary cannot be written: .*{tmp_path}/checkpoint$"):
        output.finish(peak_memory_bytes=0, wall_s=0.0)


def test_a_run_on_examples_shows_loss_and_accuracy_of_each_set_with_errors(tmp_path, capsys):
    output = SupervisedOutput(tmp_path, DPOConfig())
    metrics = {"loss": 0.5, "loss_stderr": 0.125, "accuracy": 0.75, "accuracy_stderr": 0.0625}
    output.record_evaluation("before", {"a": metrics})
    output.record_evaluation(
        "after", {"a": metrics | {"loss": 0.25}, "b": {"loss": 2, "loss_stderr": 1}}
    )
    output.finish(peak_memory_bytes=0, wall_s=0.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "±" in line]
    assert [[cell.strip() for cell in line.split("│")[1:5]] for line in lines] == [
        ["loss (a)", "0.500 ± 0.125", "0.250 ± 0.125", "-0.250"],
        ["accuracy (a)", "75.0% ± 6.2", "75.0% ± 6.2", "+0.0 points"],
        ["loss (b)", "", "2.000 ± 1.000", ""],
    ]


def test_a_run_without_held_out_sets_has_a_summary_and_no_table(tmp_path, capsys):
    names = ("reward", "response_tokens", "tokens_per_s", "time/generate_s", "time/log_probs_s")
    metrics = dict.fromkeys((*names, "time/update_s", "time/weight_sync_s"), 1.0)
    output = RunOutput(tmp_path, RLConfig())
    with output.progress("training", 1) as report:
        report(1, metrics)
    output.finish(peak_memory_bytes=10**9, wall_s=2.0)
    assert "evaluation" not in json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "reward_curve.png").stat().st_size > 5000
    message = capsys.readouterr().out
    assert "Held out" not in message and "2 s, peak memory 1.0 GB" in message


def quickstart(folder: Path) -> RLConfig:
    (folder / "task").mkdir()
    (folder / "task" / "test.parquet").touch()
    (folder / "samples").mkdir()
    (folder / "samples" / "step_000001.parquet").touch()
    return compose_config(RLConfig, ["recipe=quickstart"])


def test_a_run_says_how_to_look_at_it_evaluate_it_and_talk_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin/mcore-rl")])  # which is not on PATH
    folder = Path("my run")
    folder.mkdir()
    next_commands = list_next_commands(folder, quickstart(folder))
    assert {line[0] for line in next_commands} == {"bin/mcore-rl"}
    assert [line[1] for line in next_commands] == ["report", "samples", "eval", "chat"]
    drawn, shown, evaluated, talked = next_commands
    assert report.build_parser().parse_args(drawn[2:]).run == [str(folder)]
    assert samples.build_parser().parse_args(shown[2:]).run == str(folder)
    config = compose_config(EvalConfig, evaluated[2:])
    assert config.model.path == str(folder)
    assert config.data.sets == {"test": str(folder / "task" / "test.parquet")}
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (64, 32)
    options = chat.build_parser().parse_args(talked[2:])
    assert (options.model, options.kv_cache_bytes) == (str(folder), None)


def test_held_out_sets_and_what_differs_from_the_defaults_of_an_evaluation_are_named():
    settings = ["data.test_files={math: m.jsonl, code: c.jsonl}", "data.answer_column=solution"]
    settings += ["reward.name=math", "reward.settings={digits: 3}", "data.train_file=t.jsonl"]
    config = compose_config(RLConfig, settings)
    _, evaluated, _ = list_next_commands(Path("out"), config)
    assert compose_config(EvalConfig, evaluated[2:]).reward.settings == {"digits": 3}
    assert evaluated[3:] == [
        "data.sets.math=m.jsonl", "data.sets.code=c.jsonl", "data.answer_column=solution",
        "reward.name=math", "reward.settings={digits: 3}",
    ]  # fmt: skip


def test_held_out_rows_of_a_python_session_are_named_as_the_users_choice():
    config = compose_config(RLConfig, ["data.test_file=<python>:rows"])
    _, evaluated, _ = list_next_commands(Path("out"), config)
    assert evaluated[3:] == ["data.sets.NAME=FILE"]


@pytest.mark.parametrize(
    "setting", ["data.max_image_pixels=9", "data.images_dir=p", "rollout.max_images=3"]
)
def test_an_evaluation_has_the_limits_of_images_of_the_run(setting):
    config = compose_config(RLConfig, ["data.images_column=images", setting])
    _, evaluated, _ = list_next_commands(Path("out"), config)
    assert {"data.images_column=images", setting} <= {*evaluated}


@pytest.mark.parametrize(
    "setting",
    ["agent.loop=tools", "reward.terms.math={weight: 1.0}", "reward.name=<python>:score"],
)
def test_no_evaluation_is_named_that_would_be_another_one(setting):
    config = compose_config(RLConfig, [setting])
    assert [line[1] for line in list_next_commands(Path("out"), config)] == ["report", "chat"]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (SFTConfig(), ["report", "eval", "chat"]),
        (DPOConfig(), ["report", "eval", "chat"]),
        (RMConfig(), ["report", "rl"]),
    ],
)
def test_training_on_examples_leaves_what_can_be_evaluated_or_what_rewards(config, names):
    next_commands = list_next_commands(Path("out"), config)
    assert [line[1] for line in next_commands] == names
    assert "rl" not in names or next_commands[1][3] == "reward_model.model_path=out/checkpoint"
