"""mcore-rl sft, dpo and rm as a user runs them: what they learn, leave and go on from.

sft on ranks of Ray's, dpo and rm on those of torchrun.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mcore_rl.cli.main import main
from mcore_rl.examples.tasks import last_digit
from mcore_rl.examples.tasks.last_digit import answer, question, split_problems, worked_response
from mcore_rl.observability.expert_load import EXPERT_LOAD_FILE, read_expert_load
from tests.dist_cpu import moe_reference
from tests.e2e.outcomes import count_trace_events, rows_of, timeless
from tests.pages import select_commands

ROOT = Path(__file__).parents[2]
# By the name of the command, as its words on the page: what is trained comes from the fixtures.
ON_THE_PAGE = {
    re.search(r"mcore-rl (\w+)", shown.text)[1]: shown.text.split()
    for shown in select_commands("examples")
}
PROGRAMS = {name: str(Path(sys.executable).with_name(name)) for name in ("mcore-rl", "torchrun")}
DPO_STEPS = 8


def command(kind: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the page, with settings after its own."""
    line = [PROGRAMS.get(word, word) for word in (*ON_THE_PAGE[kind], *settings)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def dry_run(monkeypatch, capsys):
    """dry_run(kind, *settings) is its exit status and what it has printed, in this process."""

    def start(kind: str, *settings: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mcore-rl", kind, *settings, "--dry-run"])
        return main(), *capsys.readouterr()

    return start


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Make an untrained model, conversations, and pairs with the better answer in the format."""
    folder = tmp_path_factory.mktemp("data")
    last_digit._write_model(folder / "model", 0)
    train, test = split_problems()
    train = random.Random(0).sample(train, 640)
    for name, problems in (("train", train), ("test", test[:32])):
        write(folder / f"sft_{name}.jsonl", [{"messages": conversation(p)} for p in problems])
        write(folder / f"pairs_{name}.jsonl", [pair(p) for p in problems])
    return folder


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversation(problem) -> list[dict[str, str]]:
    """Return a conversation of two turns, the second of which needs the first."""
    again = {"role": "user", "content": "Only the digit."}
    return [
        {"role": "user", "content": question(problem)},
        {"role": "assistant", "content": worked_response(problem)},
        again,
        {"role": "assistant", "content": answer(problem)},
    ]


def pair(problem) -> dict:
    answers = f"#### {answer(problem)}", f"{answer(problem)} it may be"
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
    prompt = conversation(problem)[:1]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": 0.5}


def settings(data: Path, kind: str, output: Path, *more: str) -> list[str]:
    return [
        f"model.path={data / 'model'}",
        f"data.train_file={data / f'{kind}_train.jsonl'}",
        f"data.test_file={data / f'{kind}_test.jsonl'}",
        "data.max_tokens=160",
        "engine.max_tokens_per_micro_batch=2048",
        f"output_dir={output}",
        *more,
    ]


def ended(done: subprocess.CompletedProcess[str], output: Path) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    left = {"checkpoint", "config.json", "logs", "metrics.jsonl", "summary.json", "tensorboard"}
    left |= {"timeline.jsonl"}
    optional = {"checkpoints", "profiles", "expert_load.jsonl"}  # the last: of Megatron's experts
    assert {path.name for path in output.iterdir()} - optional == left
    return json.loads((output / "summary.json").read_text())


def get_held_out(summary: dict, when: str = "after") -> dict[str, float]:
    """Return the metrics of the held-out rows."""
    return summary["evaluation"][when]["test"]


@pytest.fixture(scope="module")
def sft(data, tmp_path_factory) -> tuple[Path, dict, str]:
    output = tmp_path_factory.mktemp("sft") / "out"
    done = command("sft", *sft_settings(data, output))
    return output, ended(done, output), done.stdout


def sft_settings(data: Path, output: Path) -> list[str]:
    return settings(
        data, "sft", output, "trainer.batch_size=32", "engine.layout.pp=2",
        "engine.layout.first_stage_layers=1", "engine.optimizer.lr=3e-3",
        "engine.moe.aux_loss_coef=0.01", "evaluation.every=10", "profile.steps=[2,3]",
        "profile.ranks=[1]",
    )  # fmt: skip


def test_sft_learns_both_turns_in_an_epoch_and_says_so(sft):
    output, summary, stdout = sft
    before, after = get_held_out(summary, "before"), get_held_out(summary, "after")
    assert before["loss"] > 5 and after["loss"] < 0.5 * before["loss"]
    rows = rows_of(output)
    assert [row["step"] for row in rows] == list(range(21))  # 640 rows, 32 a step
    assert [row["step"] for row in rows if "eval/test/loss" in row] == [0, 10, 20]
    assert rows[-1]["eval/test/loss"] == after["loss"] and after["loss_stderr"] > 0
    assert "training 20/20  loss " in stdout
    assert "Held out" in stdout and "±" in stdout


def test_expert_load_of_a_step_is_that_of_the_routers_of_transformers(data, tmp_path):
    """One step on all rows, so that their order does not matter, on two ranks with own experts."""
    rows = [json.loads(line) for line in (data / "sft_test.jsonl").read_text().splitlines()]
    output = tmp_path / "out"
    file = f"data.train_file={data / 'sft_test.jsonl'}"
    steps = f"trainer.batch_size={len(rows)}", "trainer.num_steps=1", "evaluation.before=false"
    layout = "engine.layout.dp=2", "engine.layout.ep=2"
    line = ON_THE_PAGE["dpo"][: ON_THE_PAGE["dpo"].index("dpo")]
    line = [PROGRAMS.get(word, word) for word in line]
    line += ["sft", *settings(data, "sft", output, file, *steps, *layout)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(data / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(data / "model")
    expected = Counter()
    with moe_reference.routed(model, None) as seen, torch.no_grad():
        for row in rows:
            # What follows the last trained token is not run.
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False).rstrip("\n")
            ids = tokenizer.encode(text, add_special_tokens=False)
            model(torch.tensor([ids]))
            for layer, (_, chosen) in seen.items():
                expected.update((layer, int(expert)) for expert in chosen.flatten())
    [load] = read_expert_load(output / EXPERT_LOAD_FILE)
    assert (load.step, load.role) == (1, "model")
    actual = {
        (layer, expert): tokens
        for layer, counts in zip(load.layers, load.tokens, strict=True)
        for expert, tokens in enumerate(counts)
        if tokens
    }
    assert actual == dict(expected)


@pytest.mark.nightly
def test_sft_under_torchrun_is_sft_on_ranks_of_ray(sft, data, tmp_path):
    output, summary, _ = sft
    again = tmp_path / "out"
    torchrun = ON_THE_PAGE["dpo"][: ON_THE_PAGE["dpo"].index("dpo")]
    line = [PROGRAMS.get(word, word) for word in torchrun]
    line += ["sft", *sft_settings(data, again)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert get_held_out(ended(done, again)) == get_held_out(summary)
    assert timeless(again) == timeless(output)


def test_the_loss_that_sft_tells_is_that_of_its_checkpoint_by_transformers(sft, data):
    # On the held-out conversations, with the masks of the template by hand.
    output, summary, _ = sft
    folder = output / "checkpoint"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    losses = []
    for line in (data / "sft_test.jsonl").read_text().splitlines():
        messages, ids, trained = json.loads(line)["messages"], [], []
        for message in messages:
            head = f"<|im_start|>{message['role']}\n"
            for text, flag in ((head, False), (message["content"] + "<|im_end|>", True), ("\n", 0)):
                tokens = tokenizer.encode(text, add_special_tokens=False)
                ids += tokens
                trained += [bool(flag) and message["role"] == "assistant"] * len(tokens)
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        token_losses = -scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        losses.append(token_losses[torch.tensor(trained[1:])])
    assert get_held_out(summary)["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


@pytest.fixture(scope="module")
def dpo(data, tmp_path_factory) -> tuple[Path, dict]:
    output = tmp_path_factory.mktemp("dpo") / "out"
    done = command("dpo", *dpo_settings(data, output))
    return output, ended(done, output)


def dpo_settings(data: Path, output: Path) -> list[str]:
    return settings(
        data, "pairs", output, "trainer.batch_size=16", f"trainer.num_steps={DPO_STEPS}",
        "engine.optimizer.lr=4e-4", "trainer.save_every=4", "profile.steps=[2]",
    )  # fmt: skip


def test_dpo_under_torchrun_learns_to_prefer(dpo):
    output, summary = dpo
    assert get_held_out(summary, "before")["accuracy"] == 0.5  # the policy is the reference
    assert get_held_out(summary, "before")["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert get_held_out(summary)["accuracy"] >= 0.95
    assert get_held_out(summary)["loss"] < 0.5
    assert len(rows_of(output)) == 1 + DPO_STEPS


def test_dpo_goes_on_from_a_checkpoint_as_the_run_that_was_not_ended(dpo, data, tmp_path):
    # Under torchrun, in another folder: the same metrics and the same weights, bit for bit.
    output, summary = dpo
    resume = f"resume={output / 'checkpoints' / 'step_000004'}"
    again = tmp_path / "again"
    done = command("dpo", *dpo_settings(data, again), resume)
    assert "going on after step 4" in done.stdout
    assert get_held_out(ended(done, again)) == get_held_out(summary)
    assert timeless(again) == timeless(output)
    file = "checkpoint/model.safetensors"
    assert (again / file).read_bytes() == (output / file).read_bytes()


@pytest.mark.nightly  # tests/unit/jobs/test_resume.py has what a run must have as it was
def test_dpo_does_not_go_on_with_other_rows_in_the_same_file(dpo, data, tmp_path):
    file, again = data / "pairs_train.jsonl", tmp_path / "again"
    first, second, *rest = (before := file.read_text()).splitlines(keepends=True)
    file.write_text("".join([second, first, *rest]))
    try:
        resume = f"resume={dpo[0] / 'checkpoints' / 'step_000004'}"
        done = command("dpo", *dpo_settings(data, again), resume)
    finally:
        file.write_text(before)
    assert f"step_000004 is of a run with other rows in data.train_file='{file}'; " in done.stderr
    assert done.returncode and not again.exists()


PROFILED = {
    "sft": ["step_000002/model-1.json.gz", "step_000003/model-1.json.gz"],
    "dpo": ["step_000002/model-0.json.gz"],  # with its reference, in the same process
    "rm": ["step_000002/model-0.json.gz"],
}


@pytest.mark.parametrize("kind", PROFILED)
def test_trace_of_a_step_has_its_passes_and_their_kernels(request, kind):
    output, *_ = request.getfixturevalue(kind)
    folder = output / "profiles"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == PROFILED[kind]
    events = count_trace_events(folder / files[0])
    # Adam runs once for experts and once for the rest.
    steps = {"update": 1, "optimizer_step": 1, "Optimizer.step#AdamW.step": 2}
    assert {name: events[name] for name in steps} == steps
    # Two conversations a pair by the policy, and by the reference of dpo.
    scored = {"sft": {}, "dpo": {"compute_log_probs": 2}, "rm": {"compute_values": 1}}[kind]
    assert {name: events[name] for name in scored} == scored
    assert events["forward_backward"] == 1 + sum(scored.values())
    assert events["aten::mm"] > 10


@pytest.fixture(scope="module")
def rm(data, tmp_path_factory) -> tuple[Path, dict]:
    output = tmp_path_factory.mktemp("rm") / "out"
    done = command(
        "rm",
        *settings(data, "pairs", output, "trainer.batch_size=16", "trainer.num_steps=12"),
        "profile.steps=[2]",
        "engine.optimizer.lr=1e-3",
        "data.margin_column=margin",
    )
    return output, ended(done, output)


def test_rm_under_torchrun_learns_which_answer_is_better(rm):
    _, summary = rm
    assert get_held_out(summary, "before")["accuracy"] == 0.5  # all scores are 0
    assert get_held_out(summary)["accuracy"] >= 0.95


def test_a_reward_model_gives_its_scores_in_transformers(rm, data):
    output, summary = rm
    folder = output / "checkpoint"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert load_file(folder / "model.safetensors")["score.weight"].shape[0] == 1
    pairs = [json.loads(line) for line in (data / "pairs_test.jsonl").read_text().splitlines()]
    means = []
    for side in ("chosen", "rejected"):
        texts = [
            tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False).rstrip("\n")
            for row in pairs
        ]
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        with torch.no_grad():
            means.append(model(**inputs).logits.mean().item())
    metrics = get_held_out(summary)
    assert [metrics["reward_chosen"], metrics["reward_rejected"]] == pytest.approx(means, abs=1e-4)


@pytest.mark.nightly  # the test above has its scores, tests/unit/trainers/test_roles.py the reward
def test_a_reward_model_of_ours_is_the_reward_of_a_run(rm, data, tmp_path):
    # Two steps: each reward is its score, by weight.
    prompts = tmp_path / "prompts.jsonl"
    problems = split_problems()[0][:64]
    write(prompts, [{"messages": conversation(p)[:1], "answer": answer(p)} for p in problems])
    output = tmp_path / "out"
    given = (
        f"model.path={data / 'model'}", f"reward_model.model_path={rm[0] / 'checkpoint'}",
        "reward_model.weight=0.5", "reward_model.layout.pp=3",
        "reward.terms={final_number: {weight: 0}}", "task.name=''", "warm_start.num_steps=0",
        f"data.train_file={prompts}", f"data.test_file={prompts}", f"output_dir={output}",
        "trainer.num_steps=2", "trainer.prompts_per_step=4", "trainer.eval_samples=4",
        "algorithm.group_size=4", "algorithm.num_mini_batches=1", "actor.layout.tp=1",
        "algorithm.filter.group_filter=''",
        "actor.layout.ep=1", "rollout.max_response_tokens=16",
    )  # fmt: skip
    line = [PROGRAMS["mcore-rl"], "rl", "recipe=quickstart", *given]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(output) if "reward" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["reward/model"] != 0
        assert row["reward"] == pytest.approx(0.5 * row["reward/model"], rel=1e-5)
        assert row["actor/grad_norm"] > 0


@pytest.mark.parametrize("kind", ["sft", "dpo", "rm"])
def test_a_dry_run_shows_ranks_and_leaves_nothing(data, tmp_path, dry_run, kind):
    output = tmp_path / "out"
    given = settings(data, "sft" if kind == "sft" else "pairs", output, "engine.layout.pp=3")
    status, out, err = dry_run(kind, *given)
    assert (status, err) == (0, "")
    for text in ("data: 640 ", ", 32 held out", "10 steps of 64 ", "model: 3 ranks, pp=3"):
        assert text in out
    assert ("reference: 3 ranks" in out) == (kind == "dpo")
    assert not output.exists()


@pytest.mark.parametrize(
    ("kind", "settings_", "message"),
    [
        ("sft", ["engine.layout.dp=3"], "engine.layout.dp=3 does not divide the 64 conversations"),
        ("dpo", ["loss=kto"], "loss='kto' is unknown; allowed: dpo, ipo, orpo, simpo"),
        ("dpo", ["loss_settings.gamma=1"], "loss_settings.gamma is no setting of loss='dpo'"),
        ("rm", ["data.margin_column=by"], "row 0 has no column 'by' (data.margin_column)"),
        ("rm", ["engine.layout.tp=3"], "engine.layout.tp=3 does not divide"),
        ("dpo", ["data.max_tokens=20"], "tokens; allowed: up to data.max_tokens=20"),
    ],
)
def test_bad_input_is_named(data, tmp_path, dry_run, kind, settings_, message):
    output = tmp_path / "out"
    given = settings(data, "sft" if kind == "sft" else "pairs", output, *settings_)
    status, _, err = dry_run(kind, *given)
    assert (status, message in err) == (2, True), err
    assert not output.exists()


@pytest.mark.nightly  # tests/unit/controller/test_torchrun.py has the check
def test_a_world_of_another_size_is_refused(data, tmp_path):
    given = settings(data, "pairs", tmp_path / "out", "engine.layout.dp=4")
    done = command("rm", *given)
    assert "torchrun has started 2 ranks, engine.layout has 8" in done.stderr
    assert not (tmp_path / "out").exists()
