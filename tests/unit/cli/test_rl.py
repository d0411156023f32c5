"""Help, printed settings and warnings of `mcore-rl rl`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.job import _REGISTRIES, JOB_COMMANDS, SCHEMAS, list_choices
from mcore_rl.cli.main import main
from mcore_rl.config.describe import (
    FUNCTION_SETTINGS,
    list_setting_groups,
    list_setting_names,
)
from mcore_rl.config.rules import list_warnings
from mcore_rl.config.schema import RLConfig

HEAVY = ("torch", "ray", "vllm", "transformers", "megatron", "numpy")
LIGHT = [
    "--help", "--version", "-h", "rl --help", "rl -h actor", "rl --list-recipes",
    "rl recipe=quickstart --print-config", "convert --help", "completion bash",
    "completion words|mcore-rl rl act", "completion words|mcore-rl convert ", "rl sed=3", "rll",
    "sft --help", "dpo -h data", "rm --print-config", "completion words|mcore-rl dpo refe",
    "samples --help", "completion words|mcore-rl samples --h",
]  # fmt: skip


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mcore-rl", *arguments])
    status = main()
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_what_only_prints_imports_none_of_the_large_libraries():
    """Run all in one process: an import of one would be there for the next."""
    program = """if True:
    import contextlib, io, sys
    from mcore_rl.cli.main import main
    for line in sys.argv[1:]:
        sys.argv = ["mcore-rl", *line.split("\\t")]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                main()
            except SystemExit as end:
                assert not end.code, line
        heavy = [n for n in %r if n in sys.modules]
        assert not heavy, (line, heavy)
    """
    lines = [
        "\t".join([*line.partition("|")[0].split(), *filter(None, [line.partition("|")[2]])])
        for line in LIGHT
    ]
    done = subprocess.run(
        [sys.executable, "-c", program % (HEAVY,), *lines], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_setting_with_its_default_and_meaning(monkeypatch, capsys, option):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = command(monkeypatch, capsys, "rl", option)
    assert (status, err) == (0, "")
    assert out.startswith("usage: mcore-rl rl [recipe=NAME|PATH] [key=value ...]")
    for part in (
        "\n  quickstart          GRPO on a",
        "--dry-run ",
        "recipe=mine.yaml",
        "rollout.top_p=1.0\n",
    ):
        assert part in out
    assert [name for name in list_setting_names(RLConfig) if f"\n  {name}=" not in out] == []
    meaning = "prompts of a step, with algorithm.group_size samples each (at least 1)"
    assert f"trainer.prompts_per_step=64\n      {meaning}" in out


def test_every_setting_has_a_meaning():
    for schema in SCHEMAS.values():
        assert [
            s.key for g in list_setting_groups(schema()) for s in g.settings if not s.meaning
        ] == []


def test_help_of_a_group_has_that_group_only(monkeypatch, capsys):
    status, out, _ = command(monkeypatch, capsys, "rl", "--help", "actor.optimizer")
    keys = [line.strip().partition("=")[0] for line in out.splitlines() if line[2:3].strip()]
    names = list_setting_names(RLConfig)
    assert status == 0
    assert [k for k in keys if k in names] == [n for n in names if n.startswith("actor.optimizer.")]


def test_help_of_one_setting_and_of_none(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "rl", "-h", "reward.name")[1].startswith(
        '  reward.name="final_number"\n      name in the reward registry'
    )
    status, out, err = command(monkeypatch, capsys, "rl", "--help", "acter")
    assert (status, out) == (2, "")
    assert "'acter'; did you mean actor" in err


def test_help_of_a_setting_lists_the_names_in_its_registry(monkeypatch, capsys):
    for key, name in (("algorithm.loss", "gspo"), ("algorithm.kl_estimator", "k3+")):
        assert f" {name}, " in command(monkeypatch, capsys, "rl", "--help", key)[1]
    assert "one of" not in command(monkeypatch, capsys, "rl", "--help", "algorithm.group_size")[1]


def test_choices_and_settings_of_functions_are_those_of_the_registries():
    from mcore_rl.algorithms.advantages import ADVANTAGES
    from mcore_rl.algorithms.losses import LOSSES

    groups = [*list_setting_groups(RLConfig()), *list_setting_groups(SCHEMAS["dpo"]())]
    settings = [setting for group in groups for setting in group.settings]
    names = {setting.key: list_choices(setting) for setting in settings}
    assert names["algorithm.loss"] == LOSSES.names and "ipo" in names["loss"]
    assert "math" in names["reward.name"] and "uniform" in names["algorithm.filter.replay.priority"]
    kinds = {
        registry.get_settings_class(name)
        for registry in (ADVANTAGES, LOSSES)
        for name in registry.names
    }
    assert {kind for group in FUNCTION_SETTINGS.values() for kind in group} <= kinds
    keys = [name for schema in SCHEMAS.values() for name in list_setting_names(schema)]
    ends = {".".join(key.split(".")[-count:]) for key in keys for count in (1, 2)}
    assert {*_REGISTRIES} <= ends
    assert names["actor.recompute.modules"][:2] == ("core_attn", "mlp")
    assert names["placement.actor"] == ("shared", "own")
    assert "" not in names["task.name"]


def test_the_printed_config_runs_again_as_a_recipe(monkeypatch, capsys, tmp_path):
    given = ["recipe=quickstart", "seed=7", "rollout.cores=0|1"]
    _, out, _ = command(monkeypatch, capsys, "rl", *given, "--print-config")
    assert out.startswith("# mcore-rl rl recipe=quickstart seed=7 'rollout.cores=0|1'\nseed: 7\n")
    file = tmp_path / "again.yaml"
    file.write_text(out)
    again = compose_config(RLConfig, [f"recipe={file}"])
    assert (again.seed, again.rollout.cores, again.task.name) == (7, "0|1", "last_digit")
    _, second, _ = command(monkeypatch, capsys, "rl", f"recipe={file}", "--print-config")
    assert second.partition("\n")[2] == out.partition("\n")[2]


def test_recipes_are_listed_with_their_first_comment(monkeypatch, capsys):
    _, out, _ = command(monkeypatch, capsys, "rl", "--list-recipes")
    assert "\nquickstart          GRPO on a 1.4 M-parameter Qwen3-MoE" in out
    assert out.startswith("dsv3_671b           DeepSeek-V3 671B, GRPO on 256 H100 (32 nodes of 8)")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--dryrun", "unknown option '--dryrun'; did you mean --dry-run"),
        ("--seed=3", "--seed=3: settings have no dashes; use seed=VALUE"),
        ("--recipe=x", "--recipe=x: settings have no dashes; use recipe=VALUE"),
        ("-x", "unknown argument '-x'"),
        ("--gpus-per-node=8", "--gpus-per-node is an option of --dry-run"),
        ("--num-nodes=8", "--num-nodes is an option of --dry-run"),
    ],
)
def test_an_option_that_there_is_not_is_named(monkeypatch, capsys, flag, message):
    status, out, err = command(monkeypatch, capsys, "rl", flag, "recipe=quickstart")
    assert (status, out) == (2, "")
    assert message in err


def test_without_any_setting_the_next_step_is_named(monkeypatch, capsys):
    status, out, err = command(monkeypatch, capsys, "rl")
    assert (status, out) == (2, "")
    assert "try recipe=quickstart, or see mcore-rl rl --help" in err


DOUBTFUL = {
    "data.train_file=a data.test_file=a": "data.test_file='a' is data.train_file",
    "data.train_files=[b,a] data.test_file=a": "data.test_file='a' is in data.train_files",
    "warm_start.train_file=a": "warm_start.train_file='a' is not read",
    "reward.shuffle=true": "reward.shuffle=true: a control",
    "trainer.num_steps=4 actor.optimizer.warmup_steps=4": "actor.optimizer.warmup_steps=4: all 4",
    "warm_start.num_steps=3 warm_start.optimizer.warmup_steps=9": "warm_start.optimizer.warmup_st",
    "checkpoint.async_save=true": "checkpoint.async_save=True: trainer.save_every=0 writes no",
    "resume=auto": "resume='auto': trainer.save_every=0 writes no training checkpoints",
    "actor.optimizer.min_lr=1e-7": "actor.optimizer.min_lr=1e-07 has no effect with",
}


@pytest.mark.parametrize(("settings", "warning"), DOUBTFUL.items())
def test_doubtful_settings_are_warned_of(settings, warning):
    [text] = list_warnings(compose_config(RLConfig, settings.split()))
    assert text.startswith(warning)


@pytest.mark.parametrize("settings", ["", "recipe=quickstart", "recipe=quickstart seed=7"])
def test_usual_settings_are_not(settings):
    assert list(list_warnings(compose_config(RLConfig, settings.split()))) == []


def test_warnings_come_before_the_run(monkeypatch, capsys):
    from mcore_rl.jobs import rl as job

    monkeypatch.setattr(job, "run", lambda config: print("runs", config.seed))
    JOB_COMMANDS["rl"].main(["seed=3", "reward.shuffle=true", "task.name=last_digit"])
    out, err = capsys.readouterr()
    assert re.fullmatch(r"starting \.\.\.\nstarting: \d+\.\d s\nruns 3\n", out)
    assert err.startswith("mcore-rl rl: warning: reward.shuffle=true")
