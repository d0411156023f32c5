"""mcore-rl eval as a user runs it: what it samples, counts and leaves."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import transformers

from mcore_rl.cli.main import main
from tests.e2e.conftest import Job
from tests.e2e.voted import answer
from tests.pages import select_commands

ROOT = Path(__file__).parents[2]
VOTED = f"{ROOT}/tests/e2e/voted.py"
PROMPTS, N = 12, 4


@pytest.fixture(scope="module")
def model_and_sets(user_task_settings) -> list[str]:
    given = dict(setting.split("=", 1) for setting in user_task_settings)
    return [
        f"model.path={given['model.path']}",
        f"data.sets.held_out={given['data.test_file']}",
        f"data.sets.train={given['data.train_file']}",
        f"data.num_prompts={PROMPTS}",
        "data.max_prompt_tokens=96",
        "rollout.max_response_tokens=24",
        "rollout.kv_cache_bytes=33554432",
    ]


def evaluated(folder: Path, *settings: str) -> Job:
    command = [Path(sys.executable).with_name("mcore-rl"), "eval"]
    job = Job(folder, *settings, command=command)
    try:
        assert job.process.wait(timeout=300) == 0, job.stderr
    finally:
        job.close()
    return job


@pytest.fixture(scope="module")
def sampled(model_and_sets, tmp_path_factory) -> Job:
    """Sample by two servers."""
    settings = f"reward.name={VOTED}:is_a", f"rollout.n={N}", "rollout.num_servers=2", "seed=3"
    return evaluated(tmp_path_factory.mktemp("eval"), *model_and_sets, *settings)


def summary(job: Job) -> dict:
    return json.loads((job.output / "summary.json").read_text())


def samples(job: Job, name: str) -> list[dict]:
    return pq.read_table(job.output / "samples" / f"{name}.parquet").to_pylist()


def test_it_leaves_settings_samples_and_a_summary(sampled):
    left = {path.name for path in sampled.output.iterdir()}
    assert left == {"config.json", "logs", "samples", "summary.json"}
    assert {path.name for path in (sampled.output / "samples").iterdir()} == {
        "held_out.parquet", "train.parquet",
    }  # fmt: skip
    assert json.loads((sampled.output / "config.json").read_text())["rollout"]["n"] == N
    assert sampled.stderr == ""


@pytest.mark.parametrize("name", ["held_out", "train"])
def test_samples_are_those_of_the_set_with_their_rewards(sampled, model_and_sets, name):
    given = dict(setting.split("=", 1) for setting in model_and_sets)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["model.path"])
    rows = pq.read_table(given[f"data.sets.{name}"]).slice(0, PROMPTS).to_pylist()
    written = samples(sampled, name)
    places = [(row, number) for row in range(PROMPTS) for number in range(N)]
    assert [(sample["row"], sample["number"]) for sample in written] == places
    for sample in written:
        row = rows[sample["row"]]
        template = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True
        )
        assert (sample["prompt"], sample["answer"]) == (template, row["answer"])
        assert sample["extracted_answer"] == answer(sample["response"], "")
        assert sample["correct"] == (sample["extracted_answer"] == "a") == (sample["reward"] == 1)
        assert sample["reward/length"] == len(sample["response"])
    assert len({sample["response"] for sample in written}) > PROMPTS  # not one response n times


@pytest.mark.parametrize("name", ["held_out", "train"])
def test_metrics_are_those_of_all_subsets_of_the_samples(sampled, name):
    metrics, groups = summary(sampled)["sets"][name], samples(sampled, name)
    groups = [groups[start : start + N] for start in range(0, len(groups), N)]
    assert (metrics["prompts"], metrics["responses"]) == (PROMPTS, PROMPTS * N)
    expected = {f"mean@{N}": [sum(s["correct"] for s in group) / N for group in groups]}
    for k in (1, 2, 4):
        subsets = [list(itertools.combinations(group, k)) for group in groups]
        expected[f"pass@{k}"] = [
            statistics.mean(float(any(s["correct"] for s in subset)) for subset in of_prompt)
            for of_prompt in subsets
        ]
        expected[f"majority@{k}"] = [
            statistics.mean(map(share_of_a, of_prompt)) for of_prompt in subsets
        ]
    for metric, values in expected.items():
        assert metrics[metric]["mean"] == pytest.approx(statistics.mean(values)), metric
        error = statistics.stdev(values) / math.sqrt(PROMPTS)
        assert metrics[metric]["standard_error"] == pytest.approx(error), metric
    assert 0 < metrics["pass@1"]["mean"] < metrics["pass@4"]["mean"] < 1
    shown = f"{metrics['pass@2']['mean']:.3f} ± {metrics['pass@2']['standard_error']:.3f}"
    [line] = [line for line in sampled.stdout.splitlines() if "pass@2" in line]
    assert shown in line


def share_of_a(subset) -> float:
    """Return the share of the vote of the correct answer: ties are split."""
    votes = [s["extracted_answer"] for s in subset if s["extracted_answer"] is not None]
    most = max(map(votes.count, votes), default=0)
    winners = {vote for vote in votes if votes.count(vote) == most}
    return "a" in winners and 1 / len(winners)


@pytest.mark.nightly  # test_rollout_server.py compares log-probs with those of transformers
def test_greedy_responses_are_those_of_transformers(model_and_sets, tmp_path):
    # With a reward that raises for some, and that says nothing of answers.
    job = evaluated(
        tmp_path,
        *model_and_sets,
        f"reward.name={VOTED}:without_answers",
        "reward.on_error=zero",
        "rollout.temperature=0",
        "scoring.correct_from=1.5",
    )
    given = dict(setting.split("=", 1) for setting in model_and_sets)
    model = transformers.AutoModelForCausalLM.from_pretrained(given["model.path"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["model.path"])
    rows = samples(job, "held_out")
    for sample in rows:
        ids = tokenizer.encode(sample["prompt"], add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
        expected_ids = out[:-1] if sample["finish_reason"] == "stop" else out
        assert tokenizer.decode(expected_ids) == sample["response"]
        raised = int(sample["answer"]) % 2 == 1
        assert ("ValueError: odd" in sample["reward_error"]) == raised
        assert sample["correct"] == (not raised and len(sample["response"]) % 2 == 1)
    metrics = summary(job)["sets"]["held_out"]
    assert metrics["reward_errors"] == sum(int(sample["answer"]) % 2 for sample in rows)
    assert 0 < metrics["reward_errors"] < len(rows)
    assert not [name for name in metrics if name.startswith("majority@")]
    assert re.search(r"no majority@k: the reward '.*without_answers' does not say", job.stdout)


@pytest.fixture
def dry_run(monkeypatch, capsys, model_and_sets, tmp_path):
    def start(*settings: str) -> tuple[int, str, str]:
        output = f"output_dir={tmp_path / 'out'}"
        words = ["eval", *model_and_sets, output, *settings, "--dry-run"]
        monkeypatch.setattr(sys, "argv", ["mcore-rl", *words])
        return main(), *capsys.readouterr()

    return start


def test_a_dry_run_shows_sets_and_servers_and_leaves_nothing(dry_run, tmp_path):
    status, out, err = dry_run("rollout.n=6", "rollout.num_servers=2")
    assert (status, err) == (0, "")
    for text in (
        "data.sets.held_out: 12 prompts, 72 responses",
        "rollout: 2 ranks, tp=1 (generation: 2 vLLM servers)",
        "pass@k for k = 1, 2, 4, 6",
    ):
        assert text in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", select_commands("evaluation"), ids=str)
def test_a_command_of_a_page_passes_its_checks(command, user_task_settings, tmp_path, monkeypatch):
    given = dict(setting.split("=", 1) for setting in user_task_settings)
    run = tmp_path / "outputs" / "quickstart"
    shutil.copytree(given["model.path"], run / "checkpoint")
    file = run / "checkpoint" / "config.json"
    longer = json.loads(file.read_text()) | {"max_position_embeddings": 4096}
    file.write_text(json.dumps(longer))
    shutil.copytree(Path(given["data.test_file"]).parent, run / "task")
    shutil.copy(given["data.test_file"], tmp_path / "math.parquet")
    rows = pq.read_table(given["data.test_file"]).to_pylist()
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    words = command.text.replace("/models/Qwen3-0.6B", str(run)).split()
    monkeypatch.setattr(sys, "argv", [*words, "--dry-run"])
    assert main() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.n=2", "rollout.temperature=0"], "rollout.n=2: with rollout.temperature=0 all"),
        (["rollout.n=4", "scoring.ks=[2,8]"], "scoring.ks: 8; allowed: 1 to rollout.n=4"),
        (["rollout.top_p=0"], "rollout.top_p=0.0; allowed: above 0, up to 1"),
        (["scoring.term=math"], "scoring.term='math'; allowed: '', or one of reward.terms"),
        (["reward.on_error=drop"], "reward.on_error='drop' and reward.shuffle=true are for train"),
        (["data.sets.a=none.parquet"], "data.sets.a='none.parquet' does not exist"),
        (["data.sets.a=none:no"], "data.sets.a='none:no'"),
        (["data.prompt_column=text"], "has no column 'text' (data.prompt_column)"),
        (["reward.name=maths"], "reward.name='maths' is unknown; allowed: choice"),
        (["data.max_prompt_tokens=500"], "rollout.max_response_tokens=24 make 524; allowed"),
        (["rollout.tp=3"], "rollout.tp=3 does not divide the model's 4 attention heads"),
        (["model.path=docs"], "model.path='docs' has no config.json; allowed: the folder of"),
    ],
)
def test_bad_input_is_named(dry_run, tmp_path, settings, message):
    status, _, err = dry_run(*settings)
    assert (status, message in err) == (2, True), err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_that_an_output_folder_with_content_will_be_refused(dry_run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text("{}")
    status, out, _ = dry_run()
    lines = " ".join(out.split())  # wrapped to the width of the terminal
    assert (status, "the run will be refused: " in lines) == (0, True)
    assert "is not empty; allowed: a new folder" in lines


@pytest.mark.nightly  # tests/unit/jobs/test_evaluate.py has what of a folder is sampled again
def test_an_evaluation_that_was_ended_samples_what_is_left(sampled, model_and_sets, tmp_path):
    # And gets the numbers that it would have had.
    out = tmp_path / "out"
    shutil.copytree(sampled.output, out)
    (out / "summary.json").unlink()
    (out / "samples" / "train.parquet").unlink()
    modified_ns = (out / "samples" / "held_out.parquet").stat().st_mtime_ns
    settings = f"reward.name={VOTED}:is_a", f"rollout.n={N}", "rollout.num_servers=1", "seed=3"
    again = evaluated(tmp_path, *model_and_sets, *settings, "resume=auto")
    assert "the samples of held_out are there" in again.stdout
    assert summary(again)["sets"] == summary(sampled)["sets"]
    assert (out / "samples" / "held_out.parquet").stat().st_mtime_ns == modified_ns
