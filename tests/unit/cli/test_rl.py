"""What `mcore-rl rl` prints instead of running, and warns of before it runs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mcore_rl.cli import rl
from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.job import SCHEMAS
from mcore_rl.cli.main import main
from mcore_rl.config.describe import CHOICES, OF_FUNCTIONS, groups, setting_names
from mcore_rl.config.schema import RLConfig
from mcore_rl.config.warnings import warnings_of

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
    """In one process: what one of them imported the next would have, too."""
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
    assert [name for name in setting_names(RLConfig) if f"\n  {name}=" not in out] == []
    assert (
        "trainer.prompts_per_step=64\n      a step has this times algorithm.group_size samples"
        in out
    )


def test_every_setting_has_a_meaning():
    for schema in SCHEMAS.values():
        assert [s.key for g in groups(schema()) for s in g.settings if not s.meaning] == []


def test_help_of_a_group_has_that_group_only(monkeypatch, capsys):
    status, out, _ = command(monkeypatch, capsys, "rl", "--help", "actor.optimizer")
    keys = [line.strip().partition("=")[0] for line in out.splitlines() if line[2:3].strip()]
    names = setting_names(RLConfig)
    assert status == 0
    assert [k for k in keys if k in names] == [n for n in names if n.startswith("actor.optimizer.")]


def test_help_of_one_setting_and_of_none(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "rl", "-h", "reward.name")[1].startswith(
        '  reward.name="final_number"\n      a name in the reward registry'
    )
    status, out, err = command(monkeypatch, capsys, "rl", "--help", "acter")
    assert (status, out) == (2, "")
    assert "'acter'; did you mean actor" in err


def test_names_of_registries_are_those_that_are_registered():
    from mcore_rl.algorithms.advantages import ADVANTAGES
    from mcore_rl.algorithms.aggregation import AGGREGATIONS
    from mcore_rl.algorithms.kl import KL_ESTIMATORS
    from mcore_rl.algorithms.losses import LOSSES
    from mcore_rl.algorithms.preference import PREFERENCE_LOSSES
    from mcore_rl.rewards.registry import get_registry

    assert (
        list(CHOICES["reward.name"]) == get_registry().names
    )  # docs/rewards.md has their settings
    registries = (ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES)
    for registry in registries:
        assert list(CHOICES[registry.setting]) == registry.names
        kinds = [registry.get_settings_class(name) for name in registry.names]
        assert set(OF_FUNCTIONS.get(registry.settings_key, ())) <= set(kinds)
    assert set(OF_FUNCTIONS) <= {registry.settings_key for registry in registries}
    assert list(CHOICES["loss"]) == PREFERENCE_LOSSES.names
    without_length = {*AGGREGATIONS.names} - {"sequence_sum_fixed_length"}
    assert set(CHOICES["loss_aggregation"]) == without_length
    settings = [name for schema in SCHEMAS.values() for name in setting_names(schema)]
    ends = {".".join(name.split(".")[-2:]) for name in settings}
    assert set(CHOICES) <= ends


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
    [found] = warnings_of(compose_config(RLConfig, settings.split()))
    assert found.startswith(warning)


@pytest.mark.parametrize("settings", ["", "recipe=quickstart", "recipe=quickstart seed=7"])
def test_usual_settings_are_not(settings):
    assert list(warnings_of(compose_config(RLConfig, settings.split()))) == []


def test_warnings_come_before_the_run(monkeypatch, capsys):
    from mcore_rl.jobs import rl as job

    monkeypatch.setattr(job, "run", lambda config: print("runs", config.seed))
    rl.main(["seed=3", "reward.shuffle=true"])
    out, err = capsys.readouterr()
    assert re.fullmatch(r"starting \.\.\.\nstarting: \d+\.\d s\nruns 3\n", out)
    assert err.startswith("mcore-rl rl: warning: reward.shuffle=true")
