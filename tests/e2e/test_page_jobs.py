"""The commands of the pages that start ranks and servers: jobs, cut short, and parity."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.test_resume import ONE_RANK
from tests.nightly import nightly
from tests.pages import ROOT, Command, list_commands, select_commands
from tests.unit.repo.test_docs import write_recipes

BIN = Path(sys.executable).parent
SHORT = (
    "trainer.num_steps=2", "trainer.prompts_per_step=8", "trainer.eval_samples=8",
    "actor.optimizer.warmup_steps=0", "algorithm.filter.group_filter=''",
)  # fmt: skip
# Of a model that has not learned to stop.
SHORT_RESPONSES = ("rollout.max_response_tokens=32",)
SHORT_START = ("warm_start.num_steps=2", "warm_start.optimizer.warmup_steps=0")


def job_of(command: Command) -> tuple[str, ...]:
    """Return its settings; the script of the quickstart is set-up and then a recipe."""
    words = shlex.split(command.text)
    settings = words[2:] if words[0] == "mcore-rl" else ["recipe=quickstart", *words[2:]]
    return tuple(word for word in settings if not word.startswith("output_dir="))


JOBS = {job_of(command): command for command in select_commands("training")}  # each once


@pytest.mark.nightly
@pytest.mark.parametrize("settings", JOBS, ids=" ".join)
def test_a_job_of_a_page_trains(settings, user_task_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {name: value for name, _, value in (s.partition("=") for s in user_task_settings)}
    Path("here").mkdir()
    Path("here", "examples").symlink_to(ROOT / "examples")
    write_recipes((ROOT / JOBS[settings].page).read_text(), tmp_path)
    for name in ("train", "test"):
        Path("here", f"{name}.parquet").symlink_to(given[f"data.{name}_file"])
    model = str(_longer(given["model.path"]))
    overrides = [s.replace("/models/Qwen3-0.6B", model) for s in settings]
    is_of_recipe = any(setting.startswith("recipe=") for setting in overrides)
    short = SHORT + (SHORT_START if is_of_recipe else SHORT_RESPONSES)
    names = {setting.partition("=")[0] for setting in short}
    page_settings = [setting for setting in overrides if setting.partition("=")[0] not in names]
    done = subprocess.run(
        [BIN / "mcore-rl", "rl", *page_settings, *short, f"output_dir={tmp_path / 'out'}"],
        cwd="here",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "reward" in row]) == 2
    assert Path("out/checkpoint/model.safetensors").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("page", [command.page for command in select_commands("tutorials")])
def test_a_tutorial_raises_its_reward_from_an_empty_folder(page, tmp_path):
    write_recipes((ROOT / page).read_text(), tmp_path)
    for command in list_commands(ROOT / page):
        if command.needs:
            continue
        program, *words = shlex.split(command.text)
        done = subprocess.run(
            [BIN / program, *words], cwd=tmp_path / "here", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + done.stdout
    metrics = tmp_path / "here/outputs/mine/metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert rewards[-1] > rewards[0] + 0.1


# test_kill.py has a job with losses and advantages in files of the user.
@pytest.mark.parametrize("with_job", [False, nightly(True)])
def test_an_algorithm_in_a_file_of_the_user_runs_as_its_page_says(
    user_task_settings, tmp_path, with_job
):
    # Its commands in their order; the job is cut short, without a warm start, on one rank.
    text = (ROOT / "docs/new_algorithm.md").read_text()
    write_recipes(text, tmp_path)
    folder = tmp_path / "here"
    code = (folder / "ranked.py").read_text().splitlines()[1:]
    assert len([line for line in code if line.strip()]) < 30
    given = dict(setting.split("=", 1) for setting in user_task_settings)
    (folder / "last_digit").symlink_to(Path(given["model.path"]).parent)
    short = (*SHORT, *ONE_RANK, "warm_start.num_steps=0", "warm_start.train_file=''")
    for command in select_commands("new algorithm"):
        words = shlex.split(command.text)
        is_job = words[1] == "rl" and "--dry-run" not in words
        if is_job and not with_job:
            continue
        line = [BIN / words[0], *words[1:], *(short if is_job else ())]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
    if not with_job:
        return
    rows = [json.loads(row) for row in (folder / "outputs/ranked/metrics.jsonl").open()]
    rows = [row for row in rows if "reward" in row]  # the others are of evaluations
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward"] >= row["reward/right"]
        assert row["actor/ratio"] == pytest.approx(1, abs=0.05)
        assert "actor/approx_kl" not in row  # which is of ppo_clip
        assert row["actor/grad_norm"] > 0


@pytest.mark.nightly
def test_the_tutorial_of_a_laptop_is_followed_from_an_empty_folder(user_task_settings, tmp_path):
    write_tutorial(tmp_path / "saved", user_task_settings)
    clone, lines = tmp_path / "clone", []
    clone.mkdir()
    (clone / ".venv").symlink_to(sys.prefix)
    for command in select_commands("laptop"):
        lines.append(command.text)
        if command.text.startswith("mkdir"):
            lines.append('[ -z "$(ls)" ] && cp ../saved/*.py .')
    done = subprocess.run(
        ["bash", "-euxc", "\n".join(lines)], cwd=clone, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "sums"
    assert (folder / "runs/first/report.html").is_file() and (folder / "both.html").is_file()
    temperatures, advantages = [], []
    for name in ("first", "warmer", "own"):
        rows = [json.loads(row) for row in (folder / "runs" / name / "metrics.jsonl").open()]
        assert [row["step"] for row in rows if "reward/alone" in row] == [1, 2]
        config = json.loads((folder / "runs" / name / "config.json").read_text())
        temperatures.append(config["rollout"]["temperature"])
        advantages.append(config["algorithm"]["advantage"])
    assert temperatures == [1.0, 1.2, 1.0]
    assert advantages[:2] == ["grpo", "grpo"] and advantages[2].endswith(":compare")
    assert "model.safetensors" in done.stdout


def write_tutorial(folder: Path, user_task_settings: list[str]) -> dict[str, str]:
    """Write the files of docs/tutorial_laptop.md, for two steps of a tiny model; return them."""
    model = next(s for s in user_task_settings if s.startswith("model.path=")).partition("=")[2]
    text = (ROOT / "docs/tutorial_laptop.md").read_text()
    [name] = re.findall(r'^MODEL = "(.*)"$', text, re.MULTILINE)
    assert text.count('"trainer.num_steps": 20') == 1
    text = text.replace(name, model).replace('"trainer.num_steps": 20', '"trainer.num_steps": 2')
    files = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    folder.mkdir()
    for file, code in files.items():
        (folder / file).write_text(code)
    return files


def _longer(model: str) -> Path:
    """A copy that takes prompts as long as those that pages allow."""
    copy = Path(shutil.copytree(model, "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return copy.absolute()


@pytest.fixture(scope="module")
def models(user_task_settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model and a checkpoint of it, as the commands of parity name them."""
    folder = tmp_path_factory.mktemp("models")
    given = next(s for s in user_task_settings if s.startswith("model.path=")).partition("=")[2]
    model = shutil.copytree(given, folder / "model")  # for its tokenizer
    config = AutoConfig.from_pretrained(model, num_hidden_layers=4)  # two stages of two
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    for name in ("hf", "Qwen3-30B-A3B", "DIR", "converted", "original", "base", "exported"):
        (folder / name).symlink_to(model)
    (folder / "prompts.txt").write_text("Start with 5.\nAdd 2.\n")
    (folder / "run").mkdir()
    words = ("convert", "hf-to-mcore", "--model", "base", "--output", "run/step_100")
    subprocess.run([BIN / "mcore-rl", *words], cwd=folder, check=True)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("command", select_commands("parity"), ids=str)
def test_a_command_of_parity_passes(command, models):
    words = shlex.split(command.text)
    done = subprocess.run([BIN / words[0], *words[1:]], cwd=models, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout  # every pair is within the tolerance
    assert "megatron~hf" in done.stdout
