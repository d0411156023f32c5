"""What a run that has ended says to do next: commands that are understood as they stand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mcore_rl.cli import chat, samples
from mcore_rl.cli.compose import compose_config
from mcore_rl.config.schema import DPOConfig, EvalConfig, RLConfig, RMConfig, SFTConfig
from mcore_rl.jobs.next_commands import list_next_commands


def commands(lines: list[str]) -> list[list[str]]:
    """As a shell splits what is pasted into it."""
    assert lines[0].startswith("next: ") and max(map(len, lines)) <= 80
    text = "\n".join([lines[0].removeprefix("next:"), *lines[1:]]).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines()]


def quickstart(folder: Path) -> RLConfig:
    (folder / "task").mkdir()
    (folder / "task" / "test.parquet").touch()
    (folder / "samples").mkdir()
    (folder / "samples" / "step_000001.parquet").touch()
    return compose_config(RLConfig, ["recipe=quickstart"])


def test_a_run_says_how_to_look_at_it_evaluate_it_and_talk_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("my run")
    folder.mkdir()
    shown, evaluated, talked = commands(list_next_commands(folder, quickstart(folder)))
    assert [line[:2] for line in (shown, evaluated, talked)] == [
        ["mcore-rl", "samples"], ["mcore-rl", "eval"], ["mcore-rl", "chat"]
    ]  # fmt: skip
    assert samples.build_parser().parse_args(shown[2:]).run == str(folder)
    config = compose_config(EvalConfig, evaluated[2:])
    assert config.model.path == str(folder)
    assert config.data.sets == {"test": str(folder / "task" / "test.parquet")}
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (64, 32)
    options = chat.build_parser().parse_args(talked[2:])
    assert (options.model, options.kv_cache_bytes) == (str(folder), 80 << 20)


def test_held_out_sets_and_what_differs_from_the_defaults_of_an_evaluation_are_named():
    settings = ["data.test_files={math: m.jsonl, code: c.jsonl}", "data.answer_column=solution"]
    config = compose_config(RLConfig, [*settings, "reward.name=math", "data.train_file=t.jsonl"])
    evaluated, _ = commands(list_next_commands(Path("out"), config))
    assert evaluated[3:] == [
        "data.sets.math=m.jsonl", "data.sets.code=c.jsonl", "data.answer_column=solution",
        "reward.name=math",
    ]  # fmt: skip


@pytest.mark.parametrize("setting", ["agent.loop=tools", "reward.terms.math={weight: 1.0}"])
def test_no_evaluation_is_named_that_would_be_another_one(setting):
    config = compose_config(RLConfig, [setting])
    assert [line[1] for line in commands(list_next_commands(Path("out"), config))] == ["chat"]


@pytest.mark.parametrize(
    ("config", "names"),
    [(SFTConfig(), ["eval", "chat"]), (DPOConfig(), ["eval", "chat"]), (RMConfig(), ["rl"])],
)
def test_training_on_examples_leaves_what_can_be_evaluated_or_what_rewards(config, names):
    found = commands(list_next_commands(Path("out"), config))
    assert [line[1] for line in found] == names
    assert names != ["rl"] or found[0][3] == "reward_model.model_path=out/checkpoint"
