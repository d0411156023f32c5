"""The main job as a user runs it, shortened: what it learns, and what it leaves."""

import json
import re
import struct
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mcore_rl.config.schema import Layout
from tests import attacks
from tests.e2e.outcomes import count_trace_events
from tests.e2e.processes import listeners
from tests.nightly import nightly
from tests.terminal import read_terminal

WARM_STEPS, RL_STEPS, TESTS = 200, 4, 256
EACH = ["run", nightly("shuffled")]


def ended_under_siege(job):
    """Return the job when it has ended well, with strangers at all that listened."""
    with attacks.besiege_listeners(lambda: listeners(set(job.processes))) as job.listeners:
        status = job.process.wait()
    assert status == 0, job.stderr
    return job


@pytest.fixture(scope="module")
def run(start_job):
    job = start_job(
        f"warm_start.num_steps={WARM_STEPS}",
        "warm_start.layout.dp=1",  # less work in all; test_kill.py has the recipe's two ranks
        f"trainer.num_steps={RL_STEPS}",
        f"trainer.eval_samples={TESTS}",
        "profile.steps=[2]",
        "profile.ranks=[0,1]",
        "seed=1",
    )
    return ended_under_siege(job)


@pytest.fixture(scope="module")
def shuffled(run, start_job):
    """Train from the warm start of `run`, as a user's own model, with shuffled rewards.

    And with another way for the weights.
    """
    task = run.output / "task"
    job = start_job(
        "task.name=''",
        f"model.path={run.output / 'warm_start'}",
        f"data.train_file={task / 'train.parquet'}",
        f"data.test_file={task / 'test.parquet'}",
        "warm_start.num_steps=0",
        "reward.shuffle=true",
        "algorithm.kl_coef=0.001",
        "weight_sync.method=disaggregated",
        "actor.layout.tp=1",
        "actor.layout.dp=2",
        "actor.layout.ep=2",
        f"trainer.num_steps={RL_STEPS}",
        f"trainer.eval_samples={TESTS}",
        "seed=1",
    )
    return ended_under_siege(job)


# Learned from the end of `run`, without rewards.
TAUGHT = (
    "teacher.models={grpo: {model_path: TEACHER}}", "algorithm.filter.group_filter=''",
    "actor.optimizer.lr=3e-4",
)  # fmt: skip
PPO = (
    "algorithm.advantage=gae", "algorithm.advantage_settings.lam=1.0",
    "critic.optimizer.lr=1e-3", "algorithm.filter.group_filter=''",
)  # fmt: skip
# Settings of algorithms on one rank, from the warm start of `run`.
ALGORITHMS = {
    "ppo": PPO,
    "ppo with an fsdp critic": (*PPO, "critic.backend=fsdp"),
    "dr_grpo": (
        "algorithm.advantage_settings.normalize_by_std=false",
        "algorithm.loss_aggregation=sequence_sum_fixed_length",
    ),
    "rloo": ("algorithm.advantage=rloo",),
    "optimal_token_baseline": ("algorithm.advantage=optimal_token_baseline",),
    "reinforce_plus_plus": (
        "algorithm.advantage=reinforce_plus_plus", "algorithm.filter.group_filter=''"
    ),
    "remax": ("algorithm.advantage=remax", "algorithm.filter.group_filter=''"),
    "gspo": ("algorithm.loss=gspo", "algorithm.loss_aggregation=sequence_mean_token_mean"),
    "cispo": ("algorithm.loss=cispo",),
    "dapo": (
        "algorithm.loss_settings.clip_ratio_high=0.28", "algorithm.loss_aggregation=token_mean",
        "algorithm.filter.group_filter_settings.of=answer", "algorithm.filter.max_rounds=4",
        "algorithm.filter.mask_truncated=true", "reward.terms.answer={name: final_number}",
        "reward.terms.brief={name: overlong, settings: {buffer_tokens: 8}}",
    ),
    "sampled_kl": (*TAUGHT, "algorithm.distillation.loss=sampled_kl"),
    "reverse_kl": (*TAUGHT, "algorithm.distillation.loss=reverse_kl"),
}  # fmt: skip


@pytest.mark.nightly  # the run above learns by GRPO; test_placement.py has one with a critic
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_raises_held_out_accuracy_by_twenty_points(name, run, start_job):
    task = run.output / "task"
    job = start_job(
        "task.name=''",
        f"model.path={run.output / 'warm_start'}",
        f"data.train_file={task / 'train.parquet'}",
        f"data.test_file={task / 'test.parquet'}",
        "warm_start.num_steps=0",
        "actor.layout.tp=1",
        "actor.layout.ep=1",
        *(word.replace("TEACHER", str(run.output / "checkpoint")) for word in ALGORITHMS[name]),
        "trainer.num_steps=6",
        f"trainer.eval_samples={TESTS}",
        "seed=1",
    )
    assert job.process.wait() == 0, job.stderr
    report = summary(job)
    assert gain(report) >= 0.20
    if name.startswith("ppo"):
        errors, gaps = (
            [row[metric] for row in rows(job)]
            for metric in ("critic/value_error", "max_logprob_gap")
        )
        print(f"{name}: gain {gain(report):.3f}, value errors {errors}, log-prob gaps {gaps}")
        assert all(row["critic/grad_norm"] > 0 for row in rows(job))
        assert 0 < errors[-1] < errors[0] and 0 < max(gaps) < 1e-4


def summary(job) -> dict:
    return json.loads((job.output / "summary.json").read_text())


def gain(report: dict) -> float:
    """Return the gain of held-out accuracy, also if it is that of the term `answer`."""
    before, after = (report["evaluation"][when]["test"] for when in ("before", "after"))
    name = "accuracy" if "accuracy" in after else "accuracy/answer"
    return after[name] - before[name]


def rows(job) -> list[dict]:
    lines = [json.loads(line) for line in (job.output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "reward" in row]


def test_held_out_accuracy_rises_by_twenty_points(run):
    assert gain(summary(run)) >= 0.20


@pytest.mark.nightly
def test_held_out_accuracy_rises_by_twenty_points_with_fsdp(start_job):
    job = start_job(
        f"warm_start.num_steps={WARM_STEPS}",
        "warm_start.layout.dp=1",
        f"trainer.num_steps={RL_STEPS}",
        f"trainer.eval_samples={TESTS}",
        "seed=1",
        recipe="quickstart_fsdp",
    )
    assert job.process.wait() == 0, job.stderr
    report = summary(job)
    print(f"gain: {gain(report):.3f}, {report['evaluation']}")
    assert gain(report) >= 0.20
    assert 0 < max(row["max_logprob_gap"] for row in rows(job)) <= 1e-4


@pytest.mark.nightly
def test_shuffled_rewards_teach_nothing(shuffled):
    report = summary(shuffled)
    assert gain(report) <= 0.08
    assert all("actor/reference_kl" in row for row in rows(shuffled))


@pytest.mark.parametrize("name", EACH)
def test_every_port_is_on_the_loopback_interface(name, request):
    # Ray's, the rendezvous of each group and of the weights, and what gloo listens on.
    ports = request.getfixturevalue(name).listeners
    assert not {a: who for a, who in ports.items() if not a[0].endswith("127.0.0.1")}
    # Two ranks of the trainer and a server: each has a port of Ray's and one of gloo's.
    assert sum(who.startswith("ray::WorkerProcess") for who in ports.values()) >= 6, ports


@pytest.mark.nightly
def test_both_runs_start_from_the_same_accuracy(run, shuffled):
    # The same checkpoint, seed and questions: a vLLM server answers them alike.
    before = [summary(job)["evaluation"]["before"] for job in (shuffled, run)]
    assert before[0] == before[1]


@pytest.mark.parametrize("name", EACH)
def test_trainer_and_rollout_agree_at_every_step(name, request):
    job = request.getfixturevalue(name)
    gaps = [row["max_logprob_gap"] for row in rows(job)]
    assert len(gaps) == RL_STEPS
    assert 0 < max(gaps) <= summary(job)["max_logprob_gap"] <= 1e-4


def test_the_summary_tells_the_whole_run(run):
    report = summary(run)
    assert report["seed"] == 1
    assert report["layout"] == asdict(Layout(tp=2, ep=2))
    assert 0.5e9 < report["peak_memory_bytes"] < 10e9
    assert report["wall_s"] > 0
    assert {"torch", "megatron-core", "ray", "transformers"} <= set(report["versions"])
    assert json.loads((run.output / "config.json").read_text())["trainer"]["num_steps"] == RL_STEPS


def test_the_output_has_one_line_a_step_and_a_table(run):
    printed = run.stdout.splitlines()
    assert printed[0] == "starting ..." and printed[2] == "checking the inputs ..."
    samples = [line for line in printed if re.match(r"step \d+: sample, reward ", line)]
    assert len(samples) == RL_STEPS and all(" -> " in line for line in samples)
    phases = [line for line in printed if re.search(r"( \.\.\.|: [0-9.]+ s|, \d+ s)$", line)]
    assert "evaluating ..." in phases and "exporting ..." in phases
    lines = [line for line in printed if line not in {*samples, *phases}]
    steps = [f"warm start {i}/{WARM_STEPS}" for i in range(1, WARM_STEPS + 1)]
    steps += [f"training {i}/{RL_STEPS}" for i in range(1, RL_STEPS + 1)]
    assert [line.split("  ")[0] for line in lines[: len(steps)]] == steps
    for line in lines[WARM_STEPS : len(steps)]:
        assert re.search(
            r"reward 0\.\d+  length .*  gap .*  .* s  gen .* train .* sync .*  .* tok/s$", line
        )
    table = "\n".join(lines[len(steps) :])
    assert len(lines) - len(steps) < 20
    assert all(word in table for word in ("before", "after", "change", "points", str(run.output)))
    assert all(f"mcore-rl {name} " in table for name in ("samples", "eval", "chat"))
    assert run.stderr == ""


@pytest.mark.nightly
@pytest.mark.parametrize("columns", [80, 140])
def test_a_person_at_a_terminal_sees_samples_one_bar_and_what_to_do_next(run, tmp_path, columns):
    # All processes of a job have the terminal: what they print past its display is seen here.
    task, output = run.output / "task", tmp_path / "out"
    settings = [
        "task.name=''", f"model.path={run.output / 'warm_start'}", "warm_start.num_steps=0",
        f"data.train_file={task / 'train.parquet'}", f"data.test_file={task / 'test.parquet'}",
        "actor.layout.tp=1", "actor.layout.ep=1", "trainer.num_steps=5", "trainer.eval_samples=64",
        f"output_dir={output}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "mcore_rl.cli.main", "rl", "recipe=quickstart", *settings]
    status, lines = read_terminal(command, columns)
    assert status == 0, lines
    samples = [line for line in lines if re.match(r"step \d+: sample, reward ", line)]
    assert len(samples) == 5 and max(map(len, lines)) <= columns
    [bar] = [line for line in lines if line.startswith("training ━")]
    assert bar.endswith("5/5 0:00:00")
    assert not [line for line in lines if "warning" in line or "Traceback" in line]
    steps = [line for line in lines if re.match(r"training \d+/5  reward ", line)]
    assert [line.split()[1] for line in steps] == [f"{step}/5" for step in range(1, 6)]
    assert any(re.match(r"  \S*mcore-rl samples ", line) for line in lines)


def test_tensorboard_has_the_rewards(run):
    events = EventAccumulator(str(run.output / "tensorboard"))
    events.Reload()
    read = {event.step: event.value for event in events.Scalars("reward")}
    assert list(read) == list(range(1, RL_STEPS + 1))
    assert read == pytest.approx({row["step"]: row["reward"] for row in rows(run)})
    assert len(events.Scalars("warm_start/loss")) == WARM_STEPS


def test_the_reward_curve_is_a_picture(run):
    data = (run.output / "reward_curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert 400 <= width <= 4000
    assert 300 <= height <= 4000
    assert len(data) > 5000


def test_the_export_has_the_tensors_of_the_checkpoint_it_started_from(run):
    start, export = (tensors(run.output / name) for name in ("task/model", "checkpoint"))
    described = [{n: (t.shape, t.dtype) for n, t in state.items()} for state in (start, export)]
    assert described[0] == described[1]
    assert all(torch.isfinite(tensor).all() for tensor in export.values())
    warm = tensors(run.output / "warm_start")
    assert not any(torch.equal(export[name], warm[name]) for name in export)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_transformers_loads_the_export_and_its_answers_are_in_format(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mcore_rl.examples.tasks.last_digit import question, split_problems

    folder = run.output / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    answers = []
    for problem in split_problems()[1][:8]:
        chat = [{"role": "user", "content": question(problem)}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        out = model.generate(ids, do_sample=False, max_new_tokens=32)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :]))
    shown = re.compile(r"(\d[+*]\d=\d+\n)*#### \d" + re.escape("<|im_end|>"))
    assert [answer for answer in answers if not shown.fullmatch(answer)] == []
    example = summary(run)["example"]
    assert shown.fullmatch(example["response"])
    assert example["prompt"].endswith("<|im_start|>assistant\n")


def test_trace_of_a_step_has_the_update_and_the_push(run):
    folder = run.output / "profiles" / "step_000002"
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["actor-0.json.gz", "actor-1.json.gz"]
    for file in files:
        events = count_trace_events(file)
        assert events["forward_backward"] >= events["optimizer_step"] >= 1
        assert events["send_weights"] == 1


@pytest.mark.parametrize("name", EACH)
def test_nothing_is_left_but_the_output(name, request):
    job = request.getfixturevalue(name)
    assert len(job.processes) > 8
    assert job.left() == []
    expected = {"checkpoint", "config.json", "logs", "metrics.jsonl", "reward_curve.png"}
    expected |= {"summary.json", "tensorboard", "timeline.jsonl", "samples", "evaluations"}
    expected |= {"expert_load.jsonl"}
    run_folders = {"task", "warm_start", "profiles"} if name == "run" else set()
    assert {path.name for path in job.output.iterdir()} == expected | run_folders
