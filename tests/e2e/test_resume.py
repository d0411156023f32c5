"""A run that is ended at any moment and goes on is the run that was not: the same, bit for bit.

So are a run whose server dies, and an asynchronous one that waits for the weights of each step.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.checkpoint.run_checkpoints import list_steps
from mcore_rl.data.sample_tables import get_table_path, list_tables
from tests.e2e.outcomes import list_gaps, rows_of, timeless
from tests.e2e.processes import processes_of
from tests.e2e.test_kill import assert_gone_soon, assert_whole, steps
from tests.nightly import nightly

pytestmark = pytest.mark.job

SETTINGS = (
    "warm_start.num_steps=4", "warm_start.optimizer.warmup_steps=0", "trainer.eval_samples=8",
    "trainer.prompts_per_step=8", "actor.optimizer.warmup_steps=1",
    "actor.optimizer.schedule=cosine", "algorithm.filter.group_filter=''",
    "reward.name=tests/e2e/own_functions.py:fingerprint", "data.max_prompt_tokens=64",
)  # fmt: skip
ONE_RANK = ("actor.layout.tp=1", "actor.layout.ep=1", "warm_start.layout.dp=1")  # else two
# A LoRA actor without its adapters is the reference model.
LORA = ("actor.lora.rank=4", "actor.optimizer.lr=1e-3", "algorithm.kl_coef=0.05")
NUM_STEPS = 6


def settings(num_steps: int, save_every: int) -> tuple[str, ...]:
    return (*SETTINGS, f"trainer.num_steps={num_steps}", f"trainer.save_every={save_every}")


@pytest.fixture(scope="module")
def mixture(user_task_settings) -> list[str]:
    """Add a second source, outside of the package, that a run draws several times."""
    [train] = [s for s in user_task_settings if s.startswith("data.train_file=")]
    files = f"[{train.partition('=')[2]},tests/e2e/own_functions.py:problems]"
    other_settings = [s for s in user_task_settings if s != train]
    return [*other_settings, f"data.train_files={files}", "data.train_weights=[2,1]"]


@pytest.fixture
def disturb(start_job, tmp_path_factory):
    """disturb(*settings) is a job that goes on, in one folder for all that it is called for."""
    folder = tmp_path_factory.mktemp("disturbed") / "run"

    def start(*settings: str, resume: str = "auto"):
        job = start_job(*settings, f"resume={resume}", output=folder)
        return job

    return start


def ended(job) -> Path:
    assert job.process.wait(300) == 0, job.stderr
    return job.output


def kill(job) -> None:
    job.process.kill()
    job.process.wait()


def kill_after_save(job, step: int) -> None:
    """Kill a run that has saved the checkpoint of a step."""
    checkpoint = job.output / f"checkpoints/step_{step:06d}"
    job.wait_until(checkpoint.exists, f"the checkpoint of step {step}")
    kill(job)


def kill_and_resume(
    start_job, folder: Path, num_steps: int, *settings: str, resumed: tuple[str, ...] = ()
) -> Path:
    """Kill a run after it has saved step 2; return its output when it has been resumed.

    Args:
        num_steps: Steps of the run, which it has not reached when it is killed.
        resumed: Settings of the resumed run alone.
    """
    settings += ("trainer.save_every=2", "resume=auto")
    killed = start_job(*settings, output=folder)
    kill_after_save(killed, 2)
    assert len(steps(killed)) < num_steps
    return ended(start_job(*settings, *resumed, output=folder))


def seconds(row: dict[str, float]) -> float:
    return sum(value for name, value in row.items() if name.startswith("time/"))


def _trained(row: dict[str, float]) -> dict[str, float]:
    """Return metrics of training rows: evaluations and queues of an asynchronous run differ."""
    return {n: value for n, value in row.items() if not n.startswith(("eval/", "queue/"))}


def assert_the_same_run(output: Path, expected: Path, num_steps: int) -> None:
    """Compare samples, metrics, weights and picture; all but clocks."""

    rows, expected_rows = (
        [_trained(row) for row in timeless(folder)] for folder in (output, expected)
    )
    assert rows == expected_rows
    trained = [row for row in timeless(output) if "reward" in row]
    assert [row["step"] for row in trained] == list(range(1, num_steps + 1))
    assert len({row["reward/fingerprint"] for row in trained}) == num_steps
    assert all(row["actor/grad_norm"] > 0 for row in trained)
    for file in ("checkpoint/model.safetensors", "reward_curve.png"):
        assert (output / file).read_bytes() == (expected / file).read_bytes(), file
    assert list(list_tables(output)) == list(range(1, num_steps + 1))
    for step, table in list_tables(output).items():
        assert pq.read_table(table).equals(pq.read_table(get_table_path(expected, step))), table
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (output, expected)]
    for name in ("evaluation", "max_logprob_gap"):
        assert summaries[0][name] == summaries[1][name], name
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == list(range(1, num_steps + 1))


def assert_saved_after_a_signal(job) -> int:
    """Check the end of a run that SIGUSR1 asks for; return its last step, which is saved."""
    assert job.process.wait(120) == 75, job.stderr
    assert job.left() == []
    assert_whole(job)
    last = max(row["step"] for row in steps(job))
    message, word = job.stderr.splitlines()
    assert message.startswith("SIGUSR1: the run ends after this step")
    assert word == (
        f"mcore-rl rl: SIGUSR1: step {last} is saved; to go on: the same command with resume=auto "
        f"output_dir={job.output}"
    )
    return last


@pytest.fixture(scope="module")
def undisturbed(start_job, mixture) -> Path:
    return ended(start_job(*mixture, *settings(NUM_STEPS, 0), *ONE_RANK, *LORA))


@pytest.mark.parametrize(
    "is_stopped",
    [False, nightly(True)],  # test_own_engine.py has a run that goes on after a signal
    ids=["killed", "and stopped"],
)
def test_a_run_that_is_killed_and_then_stopped_is_the_undisturbed_one(
    disturb, mixture, undisturbed, is_stopped
):
    # With adapters; saved in the background, by the last checkpoint and by one that a signal asks
    # for.
    overrides = (*mixture, *settings(NUM_STEPS, 3), *ONE_RANK, *LORA)
    # The undisturbed run has no evaluation between its steps: they change nothing.
    overrides += ("checkpoint.async_save=true", "evaluation.every=2")
    killed = disturb(*overrides)
    kill_after_save(killed, 3)

    if is_stopped:
        stopped = disturb(*overrides)
        stopped.wait_until(lambda: "training 4/" in stopped.stdout, "a step after it")
        assert "going on after step 3, from " in stopped.stdout
        stopped.process.send_signal(signal.SIGUSR1)
        last = assert_saved_after_a_signal(stopped)
        assert 4 <= last < NUM_STEPS
        assert (stopped.output / f"checkpoints/step_{last:06d}").exists()

    resumed = disturb(*overrides)
    output = ended(resumed)
    assert is_stopped or "going on after step 3, from " in resumed.stdout
    assert_the_same_run(output, undisturbed, NUM_STEPS)
    assert all(row["actor/reference_kl"] > 0 for row in rows_of(output)[-NUM_STEPS + 1 :])
    evaluated = [row["step"] for row in rows_of(output) if "eval/test/reward" in row]
    assert evaluated == [0, *range(2, NUM_STEPS + 1, 2)]
    assert not list(output.rglob(".*partial"))

    if is_stopped:
        again = disturb(*overrides)
        ended(again)
        assert f"has ended after step {NUM_STEPS}" in again.stdout
        assert_the_same_run(output, undisturbed, NUM_STEPS)


@pytest.mark.nightly  # test_fsdp_engine.py has the checkpoint alone, in more layouts
def test_a_killed_run_with_fsdp_is_the_undisturbed_one_with_other_ranks(
    start_job, disturb, mixture
):
    overrides = (
        *mixture, *settings(NUM_STEPS, 3), *ONE_RANK, "actor.backend=fsdp",
        "warm_start.moe_aux_loss_coef=0", "algorithm.kl_coef=0.05", "actor.optimizer.lr=1e-3",
        # Else the rounding of gradients near 0 decides the sign of Adam's step.
        "actor.optimizer.eps=1e-3",
    )  # fmt: skip
    expected = ended(start_job(*overrides, "actor.layout.dp=2"))
    kill_after_save(disturb(*overrides, "actor.layout.dp=2"), 3)
    resumed = disturb(*overrides, "actor.layout.dp=1")
    output = ended(resumed)
    assert "going on after step 3, from " in resumed.stdout
    rows, expected_rows = (
        [row for row in timeless(folder) if "reward" in row] for folder in (output, expected)
    )
    assert [row["step"] for row in rows] == [*range(1, NUM_STEPS + 1)]
    gaps = list_gaps(rows, expected_rows)
    print(f"{len(gaps)} numbers a step, largest: {sorted(gaps.items(), key=lambda g: -g[1])[:5]}")
    assert len(gaps) > 20 and gaps["reward/fingerprint"] == 0  # the same samples
    assert gaps.pop("max_logprob_gap") < 1e-4  # the largest of some thousand roundings
    assert max(gaps.values()) < 1e-5
    tensors, expected_tensors = (
        load_file(folder / "checkpoint/model.safetensors") for folder in (output, expected)
    )
    for name, tensor in expected_tensors.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.nightly  # tests/unit/trainers/test_fully_async.py has it of an engine in the process
def test_a_fully_asynchronous_run_of_staleness_0_is_the_synchronous_one(
    start_job, mixture, undisturbed
):
    # Samples, rewards, losses, gradients, gaps.
    overrides = (*mixture, *settings(NUM_STEPS, 0), *ONE_RANK, *LORA)
    mode = "trainer.mode=fully_async", "trainer.staleness=0"
    output = ended(start_job(*overrides, *mode))
    assert_the_same_run(output, undisturbed, NUM_STEPS)
    assert all("max_logprob_gap" in row for row in rows_of(output) if "reward" in row)


@pytest.mark.nightly  # test_server_pool.py has servers that die, without a trainer
def test_a_run_whose_server_is_killed_in_mid_generation_is_the_undisturbed_one(
    start_job, mixture, undisturbed, tmp_path
):
    # Of two servers, which start without weights, on devices of their own.
    paused, function = tmp_path / "paused", "tests/e2e/own_functions.py:later_pausing_fingerprint"
    job = start_job(
        *mixture, *settings(NUM_STEPS, 0), *ONE_RANK, *LORA, "rollout.num_servers=2",
        "rollout.max_restarts=100", "rollout.load_format=dummy", "placement.rollout=own",
        "weight_sync.method=disaggregated", f"reward.name={function}", "reward.settings.after=40",
        f"reward.settings.file={paused}", "reward.settings.log=rollout-1-0.log",
    )  # fmt: skip
    job.wait_until(paused.exists, "the second step generates")
    processes_of(job, 1)[0].kill()
    output = ended(job)
    assert "rollout-1.collect: rank 0" in job.stdout
    assert "It is started again: 1, rollout.max_restarts=100" in job.stdout
    assert_the_same_run(output, undisturbed, NUM_STEPS)
    assert_gone_soon(job)


@pytest.mark.nightly
def test_a_run_that_is_killed_at_each_step_in_turn_trains_every_sample_once(
    start_job, user_task_settings, tmp_path
):
    # With a reference model. It is asked for 6 steps, then for 12, of which the last three and the
    # end are in another folder; and the last step once more, in another layout.
    num_steps, moments, places = 12, random.Random(0), [tmp_path / name for name in "abc"]
    overrides = (
        *user_task_settings, *SETTINGS, *ONE_RANK, "actor.optimizer.schedule=constant",
        "algorithm.kl_coef=0.05", "trainer.save_every=1", "checkpoint.keep=2",
    )  # fmt: skip

    def start(*settings: str, place: Path, num_steps: int = num_steps):
        return start_job(*overrides, f"trainer.num_steps={num_steps}", *settings, output=place)

    undisturbed = ended(start(place=tmp_path / "undisturbed"))
    step_s = statistics.median(seconds(row) for row in rows_of(undisturbed) if "reward" in row)
    exact = 0
    for step in range(1, num_steps + 1):
        place, resume = places[step > 9], "auto"
        if step == 10:
            [*_, newest] = list_steps(places[0] / "checkpoints")
            resume = f"{places[0]}/checkpoints/step_{newest:06d}"
        job = start(f"resume={resume}", place=place, num_steps=6 if step <= 6 else num_steps)
        job.wait_until(lambda job=job, step=step: len(steps(job)) >= step, f"step {step}")
        time.sleep(moments.uniform(0, 0.7 * step_s))
        kill(job)
        exact += len(steps(job)) == step
        if step == 6:
            ended(start("resume=auto", place=place, num_steps=6))
    assert exact > num_steps / 2  # others were fast, and killed a step later
    resumed = ended(start("resume=auto", place=places[1]))
    assert_the_same_run(resumed, undisturbed, num_steps)
    assert all(row["actor/reference_kl"] > 0 for row in rows_of(resumed)[-num_steps + 1 :])

    last = resumed / f"checkpoints/step_{num_steps - 1:06d}"
    layout = ("actor.layout.tp=2", "actor.layout.ep=2", f"resume={last}")
    rows = [rows_of(folder)[-1] for folder in (ended(start(*layout, place=places[2])), resumed)]
    for name in ("step", "reward", "reward/fingerprint", "response_tokens"):
        assert rows[0][name] == rows[1][name], name
    for name in ("actor/loss", "actor/grad_norm", "actor/reference_kl"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3, abs=1e-6), name


@pytest.mark.nightly
def test_a_disk_without_room_costs_checkpoints_and_an_interrupted_run_saves_when_there_is_some(
    start_job, user_task_settings
):
    """Ctrl-C goes to all processes in the foreground."""
    job = start_job(*user_task_settings, *settings(1000, 1), "checkpoint.keep=1", disk="160m")
    inside = Path(f"/proc/{job.process.pid}/root{job.output}")
    checkpoints = inside / "checkpoints"
    job.wait_until(lambda: checkpoints.exists() and list_steps(checkpoints) != [], "a checkpoint")
    filler = inside / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(inside).free - (1 << 20)))
    job.wait_until(lambda: "No space left on device" in job.stderr, "a save that fails")
    [held] = list_steps(checkpoints)
    assert f"no checkpoint: {job.output}" in job.stderr
    assert f"that of step {held} stays, and the run goes on" in job.stderr
    before = len(steps(job, inside))
    job.wait_until(lambda: len(steps(job, inside)) > before, "another step")
    filler.unlink()
    job.wait_until(lambda: list_steps(checkpoints) != [held], "another checkpoint")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.process.wait(120) == 75
    assert "mcore-rl rl: SIGINT: step " in job.stderr
    assert job.left() == []
