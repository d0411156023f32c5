"""Recipes and overrides become typed settings; a wrong key or value is explained in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_rl.cli import recipes
from mcore_rl.cli.compose import compose_config, format_recipe
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import (
    EvalConfig,
    Layout,
    OptimizerConfig,
    RLConfig,
    RolloutConfig,
    SFTConfig,
)
from mcore_rl.jobs.run_plan import plan_run
from tests.nightly import nightly


@pytest.mark.parametrize("recipe", recipes.list_recipes())
def test_every_recipe_composes_and_resolves(recipe):
    config = compose_config(RLConfig, [f"recipe={recipe}"])
    assert isinstance(config, RLConfig)
    if not config.task.name:  # model and data are the user's
        files = ("model.path", "data.train_file", "data.test_file")
        config = compose_config(RLConfig, [f"recipe={recipe}", *(f"{f}={f}" for f in files)])
    validate_rl(config)


def test_overrides_win_over_the_recipe_and_keep_their_types():
    config = compose_config(
        RLConfig, ["recipe=quickstart", "seed=7", "actor.layout.ep=1", "output_dir=/x"]
    )
    assert (config.seed, config.output_dir) == (7, "/x")
    assert config.actor.layout == Layout(tp=2, ep=1)


def test_without_a_recipe_the_defaults_stand():
    assert compose_config(RLConfig, []) == RLConfig()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.layot.tp=2", "unknown setting 'actor.layot.tp'; did you mean actor.layout.tp"),
        ("learning_speed=1", "unknown setting 'learning_speed'; --help lists them all"),
        ("trainer.num_step=1", "did you mean trainer.num_steps"),
        ("lr=1", "unknown setting 'lr'; did you mean warm_start.optimizer.lr or actor.optimizer"),
        ("recipe=a.yaml", "recipe is given 2 times: quickstart, a.yaml"),
        ("seed=abc", "seed='abc'; allowed: a whole number"),
        ("seed=", "seed=''; allowed: a whole number"),
        ("seed=1,2", "seed='1,2'; allowed: a whole number"),
        ("rollout.ep=3x", "rollout.ep='3x'; allowed: true, false"),
        ("actor.lora.targets=linear_qkv", r"actor.lora.targets=.*; allowed: a list such as \["),
        (
            "data.train_files=a.jsonl",
            r"train_files='a.jsonl'; allowed: a list such as \[a,b\]",
        ),
        ("data.train_weights=[x]", r"data.train_weights=.*; allowed: a list such as \[1,2.5\]"),
        ("actor.layout=3", "actor.layout is a group of settings; set one of: actor.layout.tp"),
        ("+new=1", r"\+new=1: settings cannot be added or removed"),
        ("~seed", "~seed: settings cannot be added or removed"),
        ("a b", "'a b' is no key=value"),
        ("seed", "'seed' is no key=value; did you mean seed=VALUE"),
        ("quickstart", "'quickstart' is no key=value; did you mean recipe=quickstart"),
        ("output_dir=${nope}", "output_dir: Interpolation key 'nope' not found"),
        ("output_dir=${", "output_dir='\\${'; allowed: text"),
    ],
)
def test_a_wrong_override_is_one_clear_error(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compose_config(RLConfig, ["recipe=quickstart", override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/ö/x(1)#a=b,c", "a b", "null", "~/x", "it's", "3", "[a]"])
def test_a_text_is_taken_as_it_stands_in_quotes_or_without(path):
    for text in (path, f'"{path}"', f"'{path}'"):
        assert compose_config(RLConfig, [f"model.path={text}"]).model.path == path


@pytest.mark.parametrize("text", ["accuracy,format=0.5", "yes=1, no=0", "(a|b)+$", "think,answer"])
def test_a_setting_of_a_function_may_be_a_text_with_commas_and_equals_signs(text):
    for quoted in (text, f'"{text}"'):
        config = compose_config(RLConfig, [f"algorithm.advantage_settings.parts={quoted}"])
        assert config.algorithm.advantage_settings == {"parts": text}
    config = compose_config(RLConfig, [f"reward.terms.a.settings.tags={text}"])
    assert config.reward.terms == {"a": {"settings": {"tags": text}}}
    with pytest.raises(ConfigError, match=r"settings.parts='\[a,'; allowed: a value"):
        compose_config(RLConfig, ["algorithm.advantage_settings.parts=[a,"])


def test_files_are_a_list_and_may_be_functions():
    files = "data.train_files=[/x/a.parquet,b-1.jsonl,my/own.py:rows]"
    config = compose_config(RLConfig, [files, "data.train_weights=[3,.5,1]"])
    assert config.data.train_files == ["/x/a.parquet", "b-1.jsonl", "my/own.py:rows"]
    assert config.data.train_weights == [3.0, 0.5, 1.0]


def recipe(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return f"recipe={folder / name}"


def test_a_recipe_may_be_a_file_and_start_from_another(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    recipe(tmp_path, "recipe: quickstart\nseed: 7\nactor: {layout: {ep: 1}}\n", "base.yml")
    given = recipe(tmp_path, "recipe: ../base.yml\nseed: 8\n", "sub/a b.yaml")
    config = compose_config(RLConfig, [given, "trainer.num_steps=3"])
    assert (config.seed, config.trainer.num_steps) == (8, 3)
    assert config.actor.layout == Layout(tp=2, ep=1)
    assert config.task.name == "last_digit"
    monkeypatch.chdir(tmp_path / "sub")
    assert compose_config(RLConfig, ["recipe=../base.yml"]).seed == 7


RENAMED_SETTINGS = {
    "algorithm.kl_in=reward": ("algorithm.kl_in", "algorithm.kl_placement=reward"),
    "algorithm.samples.max_rounds=4": ("algorithm.samples", "algorithm.filter.max_rounds=4"),
    "algorithm.samples.replay.share=0.5": ("algorithm.samples", "algorithm.filter.replay.share=.5"),
    "algorithm.samples.group_filter_settings.of=answer": (
        "algorithm.samples",
        "algorithm.filter.group_filter_settings.of=answer",
    ),
    "samples.every=7": ("samples", "sample_log.every=7"),
    "trainer.asynchronous.over_issue=0.25": (
        "trainer.asynchronous.over_issue",
        "trainer.asynchronous.oversampling=0.25",
    ),
}


@pytest.mark.parametrize("kind", ["override", "recipe", "base of a recipe"])
@pytest.mark.parametrize("override", RENAMED_SETTINGS)
def test_the_old_name_of_a_setting_works_with_one_warning(tmp_path, capsys, override, kind):
    old, current = RENAMED_SETTINGS[override]
    expected = compose_config(RLConfig, [current])
    assert expected != RLConfig() and capsys.readouterr().err == ""
    arguments = [override, override]
    if kind != "override":
        key, _, value = override.partition("=")
        parts = key.split(".")
        text = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(parts))
        arguments = [recipe(tmp_path, f"{text.rstrip()} {value}\n")]
    if kind == "base of a recipe":
        arguments = [recipe(tmp_path, "recipe: mine.yaml\n", "next.yaml"), override]
    assert compose_config(RLConfig, arguments) == expected
    new = current.partition("=")[0]
    new = {"algorithm.samples": "algorithm.filter", "samples": "sample_log"}.get(old, new)
    warning = (
        f"mcore-rl: warning: {old} is now called {new}; the next release refuses the old name\n"
    )
    assert capsys.readouterr().err == warning


def test_what_refers_to_an_old_name_gets_the_setting_of_today(tmp_path, capsys):
    text = "samples: {every: 5}\nevaluation: {every: '${samples.every}'}\n"
    replaced = "recipe: base.yaml\nreplace: [algorithm.samples.group_filter_settings]\n"
    recipe(
        tmp_path, f"{text}algorithm: {{samples: {{group_filter_settings: {{a: 1}}}}}}", "base.yaml"
    )
    config = compose_config(
        RLConfig, [recipe(tmp_path, replaced), "trainer.save_every=${samples.every}"]
    )
    assert (config.evaluation.every, config.trainer.save_every) == (5, 5)
    assert config.algorithm.filter.group_filter_settings == {}
    assert capsys.readouterr().err.count("warning") == 2


def test_a_setting_under_both_names_in_one_file_is_refused(tmp_path):
    message = "mine.yaml: samples is now called sample_log, and both are given; allowed: sample_log"
    with pytest.raises(ConfigError, match=message):
        compose_config(
            RLConfig, [recipe(tmp_path, "samples: {every: 1}\nsample_log: {every: 2}\n")]
        )


def test_the_old_name_of_a_setting_of_another_job_is_unknown():
    with pytest.raises(ConfigError, match=r"unknown setting 'samples\.every'"):
        compose_config(SFTConfig, ["samples.every=1"])


BAD_RECIPES = {
    "seed: x": "mine.yaml: seed='x'; allowed: a whole number",
    "actor: {layot: {tp: 2}}": "unknown setting 'actor.layot'; did you mean actor.layout",
    "actor: 3": "mine.yaml: actor is a group of settings",
    "actor.layout.tp: 2": r"actor.layout.tp as one key; .* as in actor: \{layout: \{tp",
    "- seed": "mine.yaml is a list",
    "a: [": "mine.yaml is not valid YAML in line 1, column 5",
    "seed: 1\nseed: 2": "mine.yaml is not valid YAML in line 2, column 1: found duplicate key seed",
    "7": "mine.yaml cannot be read: it must contain settings",
    "recipe: mine.yaml": "mine.yaml: recipe: .*mine.yaml starts from this file itself",
    "recipe: nope": "mine.yaml: recipe='nope'; allowed: .*, quickstart, quickstart_fsdp, ",
    "recipe: ./nope.yaml": "mine.yaml: recipe='./nope.yaml' does not exist",
    "recipe: [1]": r"mine.yaml: recipe=\[1\]; allowed: a name or a path",
    "output_dir: ${nope}": "mine.yaml: output_dir: Interpolation key 'nope' not found",
    "output_dir: ${": "mine.yaml: output_dir: ",
    "\0": "mine.yaml is not valid YAML",
}


@pytest.mark.parametrize(("text", "message"), BAD_RECIPES.items())
def test_an_error_in_a_recipe_names_its_file(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        compose_config(RLConfig, [recipe(tmp_path, text)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "nope",
            f"recipe='nope'; allowed: {', '.join(recipes.list_recipes())}, or the path of a YAML",
        ),
        ("quickstrat", "did you mean quickstart"),
        ("mine", "did you mean mine.yaml"),
        ("./nope.yaml", "recipe='./nope.yaml' does not exist"),
        (".yaml/", "recipe='.yaml/' does not exist"),
        ("./", "recipe='./' is a folder"),
    ],
)
def test_a_recipe_that_there_is_not_is_named(tmp_path, monkeypatch, given, message):
    recipe(tmp_path, "seed: 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        compose_config(RLConfig, [f"recipe={given}"])


@pytest.mark.parametrize(
    "text",
    [
        "root:x:0:0:root:/root:/bin/bash\nme:x:1:1::/home/me:/bin/sh\n",
        "127.0.0.1 localhost\n",
        "SECRET_KEY=abc\nOTHER=def\n",
        "-----BEGIN KEY-----: x\nroot: y\n",
        "a b c: 1\n",
        "7: 1\n",
        "A" * 200 + ": 1\n",
    ],
)
def test_a_file_that_is_no_recipe_is_not_shown(tmp_path, text):
    given = recipe(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        compose_config(RLConfig, [given])
    path = given.partition("=")[2]
    message = f"{path} is no recipe; allowed: settings, one a line as key: value"
    assert str(raised.value) == message


def test_a_long_value_of_a_recipe_is_cut(tmp_path):
    with pytest.raises(
        ConfigError, match=r"seed='xxx.*\.\.\..*x'; allowed: a whole number"
    ) as raised:
        compose_config(RLConfig, [recipe(tmp_path, f"seed: {'x' * 10_000}")])
    assert len(str(raised.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("path", ["/" + "a" * 300, "b" * 300 + ".yaml", "/a" * 3000])
def test_a_recipe_and_a_model_with_too_long_a_path_are_one_line(path):
    with pytest.raises(ConfigError, match=r"^recipe='.* is too long: \d+ bytes"):
        compose_config(RLConfig, [f"recipe={path}"])
    config = compose_config(RLConfig, ["task.name=last_digit", f"model.path={path}"])
    with pytest.raises(ConfigError, match=r"^model.path='.* is too long: \d+ bytes"):
        validate_rl(config)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C"])).map(str.strip)


@pytest.mark.parametrize("count", [8, nightly(100)])
def test_a_printed_config_is_a_recipe_of_the_same_config(tmp_path, count):
    @settings(max_examples=count)
    @given(TEXTS, st.floats(allow_nan=False), st.lists(TEXTS), st.none() | st.integers())
    def check(text, lr, names, layers):
        assume("\\" not in text and not any("\\" in name for name in names))
        config = RLConfig(output_dir=text, rollout=RolloutConfig(cores="1e-6", ep=True))
        config.actor.optimizer = OptimizerConfig(lr=lr)
        config.actor.recompute.modules = names
        config.actor.layout.first_stage_layers = layers
        printed = recipe(tmp_path, format_recipe(config))
        assert compose_config(RLConfig, [printed]) == config

    check()


@pytest.mark.parametrize(
    "text",
    [
        "null", "yes", "0x1F", "1_000", "${now:%Y}", "\\${now:%Y}", "\\\\${now:%Y}", "a: b", "#",
        "~", "",
    ],
)  # fmt: skip
def test_texts_that_yaml_would_take_for_something_else_come_back(tmp_path, text):
    config = RLConfig(output_dir=text)
    assert compose_config(RLConfig, [recipe(tmp_path, format_recipe(config))]) == config


def test_the_recipe_for_one_gpu_is_the_quickstart_with_one_rank_a_role():
    config = compose_config(RLConfig, ["recipe=quickstart_one_gpu", "output_dir=/x"])
    validate_rl(config)
    resolved = resolve_for_device_type(config, "cuda")
    assert resolved.actor.layout == resolved.warm_start.layout == Layout()
    assert resolved.model.dtype == "bfloat16" and resolved.task.name == "last_digit"
    assert plan_run(resolved).num_devices == 1


def test_settings_of_a_function_are_given_one_by_one_or_as_a_mapping(tmp_path):
    given = ["reward.settings={a: 1, b: x}", "algorithm.loss_settings.clip_ratio_low=0.1"]
    composed = compose_config(RLConfig, [*given, "algorithm.loss_settings.of_mine=[1,2]"])
    assert composed.reward.settings == {"a": 1, "b": "x"}
    assert composed.algorithm.loss_settings == {"clip_ratio_low": 0.1, "of_mine": [1, 2]}
    (tmp_path / "again.yaml").write_text(format_recipe(composed))
    assert compose_config(RLConfig, [f"recipe={tmp_path / 'again.yaml'}"]) == composed


def test_a_recipe_adds_to_the_settings_of_a_function_and_an_empty_mapping_clears_them(tmp_path):
    for name, text in {
        "first": "algorithm: {loss_settings: {low: 0.1, high: 0.3}}",
        "second": "recipe: first.yaml\nalgorithm: {loss_settings: {high: 0.2}}",
        "third": "recipe: second.yaml\nalgorithm: {loss_settings: {}}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    names = [
        compose_config(RLConfig, [f"recipe={tmp_path / name}.yaml"]).algorithm.loss_settings
        for name in ("second", "third")
    ]
    assert names == [{"low": 0.1, "high": 0.2}, {}]


@pytest.mark.parametrize(
    ("schema", "argument", "message"),
    [
        (RLConfig, "learning_rate=1e-6", "which is TRL's; did you mean actor.optimizer.lr?"),
        (RLConfig, "num_generations=8", "which is TRL's; did you mean algorithm.group_size?"),
        (RLConfig, "rollout.n=8", "which is verl's; did you mean algorithm.group_size?"),
        (
            RLConfig,
            "actor_rollout_ref.actor.optim.lr=1",
            "verl's; did you mean actor.optimizer.lr?",
        ),
        (RLConfig, "actor_rollout_ref.actor.new=1", "verl's; docs/from_verl_and_trl.md has ours"),
        (RLConfig, "trainer.logger=wandb", "which is verl's; did you mean trainer.trackers?"),
        (RLConfig, "epsilon=0.2", "did you mean algorithm.loss_settings.clip_ratio_low?"),
        (SFTConfig, "learning_rate=1e-6", "which is TRL's; did you mean engine.optimizer.lr?"),
        (SFTConfig, "num_generations=8", "which is TRL's; docs/from_verl_and_trl.md has ours"),
    ],
)
def test_a_setting_of_another_framework_is_refused_with_ours(schema, argument, message):
    with pytest.raises(ConfigError) as raised:
        compose_config(schema, [argument])
    assert str(raised.value).startswith(
        f"unknown setting {argument.partition('=')[0]!r}, which is "
    )
    assert str(raised.value).endswith(message)


def test_a_recipe_with_groups_of_another_framework_is_refused_by_a_whole_name(tmp_path):
    given = recipe(tmp_path, "actor_rollout_ref: {rollout: {n: 8}}")
    message = (
        r"mine.yaml: unknown setting 'actor_rollout_ref.rollout.n', which is verl's; did you m"
    )
    with pytest.raises(ConfigError, match=message):
        compose_config(RLConfig, [given])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("mine.yaml", "recipe=mine.yaml"),
        ("mine", "recipe=mine.yaml"),
        ("runs/other.yml", "recipe=runs/other.yml"),
        ("quickstart", "recipe=quickstart"),
        ("quickstrat", "recipe=quickstart"),
        ("trainer.num_steps", "trainer.num_steps=VALUE"),
    ],
)
def test_a_word_alone_is_taken_for_a_recipe_where_it_can_be_one(tmp_path, monkeypatch, word, meant):
    recipe(tmp_path, "seed: 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        compose_config(RLConfig, [word])
    assert str(raised.value) == f"{word!r} is no key=value; did you mean {meant}?"


def test_a_recipe_replaces_mappings_of_its_base_by_their_names(tmp_path):
    for name, text in {
        "first": "reward: {terms: {math: {}, short: {weight: 2}}}\nseed: 3\n"
        "algorithm: {loss_settings: {clip_ratio_low: 0.1, clip_ratio_high: 0.3}}\n"
        "data: {test_files: {a: a.jsonl}}",
        "second": "recipe: first.yaml\nreplace: [reward.terms, algorithm.loss_settings]\n"
        "reward: {terms: {code: {}}}\nalgorithm: {loss_settings: {clip_ratio_high: 0.2}}\n"
        "data: {test_files: {b: b.jsonl}}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    config = compose_config(RLConfig, [f"recipe={tmp_path / 'second.yaml'}"])
    assert config.reward.terms == {"code": {}}
    assert config.algorithm.loss_settings == {"clip_ratio_high": 0.2}
    assert config.data.test_files == {"a": "a.jsonl", "b": "b.jsonl"} and config.seed == 3


@pytest.mark.parametrize("keys", ["reward.terms", "[reward]", "[seed]", "[reward.term]", "[3]"])
def test_what_a_recipe_cannot_replace_is_refused(tmp_path, keys):
    with pytest.raises(ConfigError, match=r"replace=.*; allowed: a list of mappings such as "):
        compose_config(RLConfig, [recipe(tmp_path, f"replace: {keys}")])


def test_terms_of_a_reward_are_given_by_a_recipe_and_changed_one_by_one(tmp_path):
    recipe = tmp_path / "terms.yaml"
    recipe.write_text("reward: {terms: {math: {}, short: {name: a.py:b, settings: {x: 1}}}}")
    changes = ["reward.terms.math.weight=3", "reward.terms.short.settings.x=2"]
    terms = compose_config(RLConfig, [f"recipe={recipe}", *changes]).reward.terms
    assert terms == {"math": {"weight": 3}, "short": {"name": "a.py:b", "settings": {"x": 2}}}
    given = ["reward.terms={math: {weight: 0.5}}", "reward.terms.mine.name=a.py:b"]
    made = compose_config(RLConfig, given)
    assert made.reward.terms == {"math": {"weight": 0.5}, "mine": {"name": "a.py:b"}}
    (tmp_path / "again.yaml").write_text(format_recipe(made))
    assert compose_config(RLConfig, [f"recipe={tmp_path / 'again.yaml'}"]) == made


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("reward.terms=[math]", r"reward.terms=\['math'\]; allowed: terms by name, as in {math"),
        ("reward.terms.math=0.5", r"reward.terms.math=0.5; allowed: a value; for a term of rewa"),
        ("reward.terms={math: 0.5}", r"reward.terms={'math': 0.5}; allowed: terms by name"),
        ("algorithm.loss_settings=3", r"loss_settings=3; allowed: settings of a function, as in"),
        ("algorithm.clip_ratio_low=0.1", r"did you mean algorithm.loss_settings.clip_ratio_low\?"),
        ("algorithm.loss_settings.a.b=1", r"unknown setting 'algorithm.loss_settings.a.b'"),
        ("optimizer_settings.a=1", r"unknown setting 'optimizer_settings.a'"),
    ],
)
def test_what_is_no_setting_of_a_function_is_refused(argument, message):
    with pytest.raises(ConfigError, match=message):
        compose_config(RLConfig, [argument])


@pytest.mark.parametrize("schema", [RLConfig, SFTConfig, EvalConfig])
def test_the_time_to_start_grows_with_the_model_unless_it_is_set(tmp_path, schema):
    (tmp_path / "of: ${a} model").mkdir()
    model = f"model.path={tmp_path}/of: \\${{a}} model"

    def start_s(*arguments: str) -> float:
        return compose_config(schema, arguments).timeouts.start_s

    assert start_s() == start_s(model) == 600.0
    for number in (1, 2):
        with (tmp_path / "of: ${a} model" / f"{number}.safetensors").open("wb") as file:
            file.truncate(50 * 10**9)
    (tmp_path / "of: ${a} model" / "3.safetensors").symlink_to("nowhere")
    assert start_s(model) == 1100.0
    assert start_s(model, "timeouts.start_s=600") == 600.0
    (tmp_path / "mine.yaml").write_text("timeouts: {start_s: 600}")
    assert start_s(model, f"recipe={tmp_path}/mine.yaml") == 600.0
