"""Resuming runs: checkpoints, settings and data that must be unchanged, output folders."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mcore_rl.checkpoint.files import write_checkpoint_info
from mcore_rl.checkpoint.run_checkpoints import ACTOR, RunCheckpoint, RunCheckpoints
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig, Layout, RLConfig
from mcore_rl.data.sample_tables import get_table_path, list_tables, write_table
from mcore_rl.jobs.output import RunOutput, lock_run_dir
from mcore_rl.jobs.resume import (
    _check_settings,
    check_critic,
    check_data,
    find_checkpoint_to_resume,
    get_end_step,
    prepare_settings,
    remove_warm_start,
)
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.observability.activity import Stopwatch
from mcore_rl.observability.expert_load import EXPERT_LOAD_FILE, ExpertLoad, read_expert_load
from mcore_rl.observability.metrics import read_metrics
from mcore_rl.observability.timeline import read_timeline


def saved(config: RLConfig, folder: Path, step: int, **changes: object) -> Path:
    checkpoints = RunCheckpoints(folder / "checkpoints")
    engine = checkpoints.begin(step) / ACTOR
    engine.mkdir()
    write_checkpoint_info(engine, {}, {})
    results = {"evaluation": {"before": {"test": {"reward": 0.25}}}}
    state = {"settings": asdict(config), "results": results, "weight_version": step, "parts": {}}
    return checkpoints.publish(step, {**state, "best": None} | changes)


def config(folder: Path, resume: str = "auto", **changes) -> RLConfig:
    made = RLConfig(output_dir=str(folder), resume=resume, seed=3)
    return replace(made, **changes)


def with_steps(rl_config: RLConfig, num_steps: int) -> RLConfig:
    return replace(rl_config, trainer=replace(rl_config.trainer, num_steps=num_steps))


def test_never_takes_none_and_auto_the_newest(tmp_path):
    rl_config = config(tmp_path)
    saved(rl_config, tmp_path, 2)
    newest = saved(rl_config, tmp_path, 4)
    assert find_checkpoint_to_resume(config(tmp_path, "never"), tmp_path) is None
    checkpoint = find_checkpoint_to_resume(rl_config, tmp_path)
    assert checkpoint is not None and (checkpoint.path, checkpoint.step, checkpoint.run) == (
        newest,
        4,
        tmp_path,
    )


def test_a_path_is_taken_from_another_run_and_of_this_one_only_the_newest(tmp_path):
    rl_config = config(tmp_path)
    older = saved(rl_config, tmp_path, 2)
    newest = saved(rl_config, tmp_path, 4)
    for path, folder in ((older, tmp_path / "other"), (newest, tmp_path)):
        checkpoint = find_checkpoint_to_resume(config(folder, str(path)), folder)
        assert checkpoint is not None and checkpoint.path == path
    with pytest.raises(ConfigError, match="output_dir has a newer one, of step 4; allowed: 'auto'"):
        find_checkpoint_to_resume(config(tmp_path, str(older)), tmp_path)
    with pytest.raises(ConfigError, match=r"^resume='.*/nowhere' does not exist$"):
        find_checkpoint_to_resume(config(tmp_path, str(tmp_path / "nowhere")), tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} is no training checkpoint"):
        find_checkpoint_to_resume(config(tmp_path, str(tmp_path)), tmp_path)


def test_a_run_with_a_critic_goes_on_only_from_a_checkpoint_with_one(tmp_path):
    rl_config = config(tmp_path)
    saved(rl_config, tmp_path, 2)
    checkpoint = find_checkpoint_to_resume(rl_config, tmp_path)
    check_critic(plan_run(rl_config), checkpoint, "grpo")
    rl_config.algorithm.advantage = "gae"
    with pytest.raises(ConfigError, match=r"has no critic, which algorithm.advantage='gae' needs"):
        check_critic(plan_run(rl_config), checkpoint, "gae")


def test_a_run_does_not_go_on_with_samples_of_another_age(tmp_path):
    rl_config = config(tmp_path)
    saved(rl_config, tmp_path, 2)
    rl_config.trainer.mode, rl_config.trainer.staleness = "one_step_off", 1
    message = (
        r"trainer.mode='one_step_off', there 'sync'; trainer.staleness=1, there None; allowed: "
    )
    with pytest.raises(ConfigError, match=message):
        find_checkpoint_to_resume(rl_config, tmp_path)


def test_a_run_does_not_go_on_with_another_engine(tmp_path):
    rl_config = config(tmp_path)
    saved(rl_config, tmp_path, 2)
    rl_config.actor.backend = "engine.py:BACKEND"
    message = r"actor.backend='engine.py:BACKEND', there 'megatron'; allowed: the same"
    with pytest.raises(ConfigError, match=message):
        find_checkpoint_to_resume(rl_config, tmp_path)


def test_a_run_does_not_go_on_with_another_date_in_its_prompts(tmp_path):
    rl_config = config(tmp_path)
    saved(rl_config, tmp_path, 2)
    rl_config.model.chat_date = "2025-03-09"
    message = r"model.chat_date='2025-03-09', there '2024-07-26'; allowed: the same"
    with pytest.raises(ConfigError, match=message):
        find_checkpoint_to_resume(rl_config, tmp_path)


def test_a_setting_that_the_program_has_had_only_since_is_no_other_run(tmp_path, capsys):
    rl_config = config(tmp_path)
    settings = asdict(rl_config)
    del settings["warm_start"]["optimizer"]["max_skipped_steps"]
    _check_settings(rl_config, RunCheckpoint(tmp_path, 2, {"settings": settings}))
    assert "warm_start.optimizer.max_skipped_steps=0 (was None)" in capsys.readouterr().out


def test_a_run_goes_on_with_a_column_that_has_its_usual_name_or_none(tmp_path, capsys):
    usual, unnamed, other = config(tmp_path), config(tmp_path), config(tmp_path)
    usual.data.prompt_column, usual.data.answer_column = "messages", "answer"
    other.data.prompt_column = "prompt"
    for saved_config, resumed in ((usual, unnamed), (unnamed, usual)):
        _check_settings(resumed, RunCheckpoint(tmp_path, 2, {"settings": asdict(saved_config)}))
        assert "settings that differ" not in capsys.readouterr().out
    for saved_config, resumed in ((other, unnamed), (unnamed, other), (other, usual)):
        with pytest.raises(ConfigError, match=r"data\.prompt_column=.*; allowed: the same"):
            _check_settings(resumed, RunCheckpoint(tmp_path, 2, {"settings": asdict(saved_config)}))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("algorithm.kl_in", "algorithm.kl_placement"),
        ("algorithm.samples", "algorithm.filter"),
        ("samples", "sample_log"),
        ("trainer.asynchronous.over_issue", "trainer.asynchronous.oversampling"),
    ],
)
def test_a_checkpoint_with_the_old_name_of_a_setting_is_resumed(tmp_path, capsys, old, new):
    resumed = config(tmp_path)
    resumed.algorithm.kl_placement, resumed.sample_log.every = "reward", 7
    resumed.algorithm.filter.max_rounds, resumed.trainer.asynchronous.oversampling = 3, 0.25
    settings = asdict(resumed)
    *groups, name = old.split(".")
    group = settings
    for part in groups:
        group = group[part]
    group[name] = group.pop(new.rpartition(".")[2])
    _check_settings(resumed, RunCheckpoint(tmp_path, 2, {"settings": settings}))
    out = capsys.readouterr().out
    assert "going on after step 2" in out and "settings that differ" not in out
    assert name in group  # the checkpoint itself is left as it is


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_version": None}, "weight_version is None; allowed: a whole number"),
        ({"parts": []}, r"parts is \[\]; allowed: an object, as a run writes it"),
        ({"settings": "x"}, "settings is 'x'; allowed: an object"),
        ({"results": 7}, "results is 7; allowed: an object"),
        ({"best": [1]}, r"best is \[1\]; allowed: an object or null"),
        ({"best": {"step": 2}}, "best lacks metric, value"),
        ({"settings": "long" * 100}, r"settings is 'long.{60,80}long'; allowed"),
    ],
)
def test_a_state_without_what_a_run_goes_on_from_is_refused(tmp_path, changes, message):
    rl_config = config(tmp_path)
    path = saved(rl_config, tmp_path, 2, **changes)
    for resume in ("auto", str(path)):
        with pytest.raises(ConfigError, match=f"^{path}/state.json: {message}"):
            find_checkpoint_to_resume(config(tmp_path, resume), tmp_path)


def test_resume_refuses_settings_of_another_run_and_prints_other_changes(tmp_path, capsys):
    rl_config = config(tmp_path)
    saved(rl_config, tmp_path, 2)
    other = config(tmp_path, seed=4, task=replace(rl_config.task, name="last_digit"))
    with pytest.raises(ConfigError) as raised:
        find_checkpoint_to_resume(other, tmp_path)
    message = (
        "is of another run: seed=4, there 3; task.name='last_digit', there ''; allowed: the same"
    )
    assert str(raised.value).endswith(message)
    longer = config(tmp_path, trainer=replace(rl_config.trainer, num_steps=7))
    find_checkpoint_to_resume(longer, tmp_path)
    assert "settings that differ: trainer.num_steps=7 (was 100)\n" in capsys.readouterr().out


class Rows:
    def __init__(self, *digests: str):
        self.digests = list(digests)


@pytest.mark.parametrize(
    ("data", "digests", "named"),
    [
        ({"train_file": "a", "test_file": "t"}, ["1", "2"], []),
        ({"train_file": "a", "test_file": "t"}, ["9", "2"], ["data.train_file='a'"]),
        ({"train_file": "a", "test_file": "t"}, ["1", "9"], ["data.test_file='t'"]),
        ({"train_files": ["a", "b"], "test_file": "t"}, ["1", "9", "3"],
         ["data.train_files[1]='b'"]),
        ({"train_file": "a", "test_files": {"x": "t", "y": "u"}}, ["8", "2", "9"],
         ["data.train_file='a'", "data.test_files.y='u'"]),
    ],
)  # fmt: skip
def test_a_run_does_not_go_on_with_other_rows_behind_the_same_path(tmp_path, data, digests, named):
    config, num = DataConfig(**data), len(data.get("train_files", ["a"]))
    saved_digests = [str(number) for number in range(1, len(digests) + 1)]
    saved = check_data(None, config, Rows(*saved_digests[:num]), map(Rows, saved_digests[num:]))
    assert list(saved.values()) == saved_digests
    checkpoint = RunCheckpoint(tmp_path / "step_000002", 2, {"data": saved})
    rows = Rows(*digests[:num]), [Rows(digest) for digest in digests[num:]]
    if not named:
        assert check_data(checkpoint, config, *rows) == saved
        return
    with pytest.raises(ConfigError) as raised:
        check_data(checkpoint, config, *rows)
    sources = ", ".join(named)
    message = f"{checkpoint.path} is of a run with other rows in {sources}; allowed: the rows that"
    assert str(raised.value).startswith(message)
    earlier = RunCheckpoint(checkpoint.path, 2, {})  # of a version that wrote no digests
    assert list(check_data(earlier, config, *rows).values()) == digests


def test_a_run_that_goes_on_has_the_weights_of_its_warm_start_and_makes_none(tmp_path):
    rl_config = config(tmp_path, warm_start=replace(RLConfig().warm_start, num_steps=5))
    checkpoint = RunCheckpoint(saved(rl_config, tmp_path, 2), 2, {})
    with pytest.raises(ConfigError, match="warm_start is missing"):
        prepare_settings(rl_config, tmp_path, checkpoint)
    (tmp_path / "warm_start").mkdir()
    prepared = prepare_settings(rl_config, tmp_path, checkpoint)
    assert prepared.model.path == str(tmp_path / "warm_start")
    assert prepared.warm_start.num_steps == 0


def test_a_run_that_has_gone_on_from_another_has_the_warm_start_of_that_one(tmp_path):
    rl_config = config(tmp_path / "b", warm_start=replace(RLConfig().warm_start, num_steps=5))
    (tmp_path / "a" / "warm_start").mkdir(parents=True)
    path = saved(rl_config, tmp_path / "b", 4)
    checkpoint = RunCheckpoint(path, 4, {"made_in": str(tmp_path / "a")})
    prepared = prepare_settings(rl_config, tmp_path / "b", checkpoint)
    assert prepared.model.path == str(tmp_path / "a" / "warm_start")


def test_logs_that_a_launch_script_has_begun_are_no_run(tmp_path, monkeypatch):
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match="is not empty"),
        lock_run_dir(str(tmp_path), "never"),
    ):
        pass
    monkeypatch.setenv("MCORE_RL_ATTEMPT", "1")
    with lock_run_dir(str(tmp_path), "never") as run_lock:
        assert run_lock.folder == tmp_path


def test_a_run_that_began_from_another_and_saved_nothing_yet_begins_from_it_again(tmp_path):
    path = saved(config(tmp_path / "a"), tmp_path / "a", 4)
    (tmp_path / "b").mkdir()
    for resume in (str(path), "auto", "auto"):
        rl_config = config(tmp_path / "b", resume)
        checkpoint = find_checkpoint_to_resume(rl_config, tmp_path / "b")
        assert checkpoint is not None and checkpoint.path == path
        RunOutput(tmp_path / "b", rl_config, checkpoint)


def test_a_run_that_goes_on_has_not_ended_any_more(tmp_path):
    rl_config = config(tmp_path)
    checkpoint = RunCheckpoint(saved(rl_config, tmp_path, 100), 100, {"results": {}})
    (tmp_path / "summary.json").touch()
    (tmp_path / "checkpoint").mkdir()
    RunOutput(tmp_path, rl_config, checkpoint)
    assert not get_end_step(rl_config, checkpoint, tmp_path)
    assert not (tmp_path / "checkpoint").exists()


def test_the_layout_of_a_warm_start_that_is_over_may_change(tmp_path):
    rl_config = config(tmp_path)
    saved(rl_config, tmp_path, 2)
    warm = replace(rl_config.warm_start, layout=Layout(dp=2))
    assert find_checkpoint_to_resume(config(tmp_path, warm_start=warm), tmp_path) is not None


def test_a_run_has_ended_when_its_last_step_is_saved_and_its_summary_written(tmp_path):
    rl_config = config(tmp_path)
    checkpoint = RunCheckpoint(saved(rl_config, tmp_path, 100), 100, {})
    assert not get_end_step(rl_config, checkpoint, tmp_path)
    (tmp_path / "summary.json").touch()
    assert get_end_step(rl_config, checkpoint, tmp_path) == 100
    assert not get_end_step(with_steps(rl_config, 101), checkpoint, tmp_path)
    assert not get_end_step(rl_config, checkpoint, tmp_path / "other")
    assert not get_end_step(rl_config, None, tmp_path)


def test_end_step_of_a_run_with_fewer_steps_than_it_trained_is_the_trained_one(tmp_path):
    rl_config = config(tmp_path)
    checkpoint = RunCheckpoint(saved(rl_config, tmp_path, 100), 100, {})
    (tmp_path / "summary.json").touch()
    assert get_end_step(with_steps(rl_config, 60), checkpoint, tmp_path) == 100


@pytest.mark.parametrize(
    ("held", "resume", "message"),
    [
        (["config.json", "checkpoints"], "never", "not empty; allowed: a new folder, or resume='a"),
        (["mine"], "auto", "holds no run: it has no config.json"),
        (["config.json", "checkpoint"], "auto", "that has left no training checkpoints"),
        (["config.json", "checkpoint", "checkpoints"], "auto", "that has left no training check"),
        (["config.json", "checkpoints"], "auto", ""),
        (["config.json", "logs", "warm_start"], "auto", ""),
        (["logs", "task", ".task.partial"], "auto", ""),  # killed before it had started
        (["checkpoints"], "{}/checkpoints/step_000002", ""),
        (["config.json"], "/elsewhere/checkpoints/step_000002", "not empty"),
    ],
)
def test_a_folder_that_holds_something_is_for_a_run_that_goes_on_in_it(
    tmp_path, held, resume, message
):
    for name in held:
        (tmp_path / name).mkdir()
    resume = resume.format(tmp_path)
    if message:
        with pytest.raises(ConfigError) as raised, lock_run_dir(str(tmp_path), resume):
            pass
        assert message in str(raised.value)
    else:
        with pytest.raises(ConfigError, match="later"), lock_run_dir(str(tmp_path), resume):
            raise ConfigError("later")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(held)


def test_what_a_run_left_before_its_first_checkpoint_is_replaced_or_goes(tmp_path):
    for name in ("logs", "task", "warm_start", "hf"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes").touch()
    remove_warm_start(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "logs", "notes", "task"]


def test_an_output_dir_that_one_stands_in_is_no_exception(tmp_path, monkeypatch):
    (tmp_path / "mine").touch()
    monkeypatch.chdir(tmp_path)
    for resume in ("never", "auto"):
        with pytest.raises(ConfigError, match="is not empty"), lock_run_dir(".", resume):
            pass


def test_rows_up_to_the_step_stay_and_rewards_and_results_go_on(tmp_path):
    rl_config = config(tmp_path)
    first = RunOutput(tmp_path, rl_config)
    with first.progress("warm_start", 9) as report:
        report(9, {"loss": 1.0})
    with first.progress("training", 9) as report:
        for step in (1, 2, 3):
            first.record_expert_load(ExpertLoad(step, "actor", [0], [[step, 1]]))
            with Stopwatch(step)("update"):
                pass
            report(step, METRICS_FILE | {"reward": step / 4, "max_logprob_gap": step / 4})
    for step in (1, 2, 3):
        write_table(get_table_path(tmp_path, step), {}, 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # a disk that was full
    state = {"results": {"max_logprob_gap": 0.5}}
    checkpoint = RunCheckpoint(saved(rl_config, tmp_path, 2), 2, state)
    second = RunOutput(tmp_path, rl_config, checkpoint)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("reward")) for row in rows] == [(9, None), (1, 0.25), (2, 0.5)]
    assert (second._rewards, second.results) == ([0.25, 0.5], {"max_logprob_gap": 0.5})
    assert list(list_tables(tmp_path)) == [1, 2]
    timeline = read_timeline(tmp_path / "timeline.jsonl")
    assert [(line.step, line.spans[0].name) for line in timeline] == [(1, "update"), (2, "update")]
    loads = read_expert_load(tmp_path / EXPERT_LOAD_FILE)
    assert [load.tokens for load in loads] == [[[1, 1]], [[2, 1]]]
    RunOutput(tmp_path / "other", rl_config, checkpoint)
    assert list(list_tables(tmp_path / "other")) == [1, 2]
    assert read_expert_load(tmp_path / "other" / EXPERT_LOAD_FILE) == loads
    RunOutput(tmp_path, rl_config)  # it had no checkpoint and begins anew
    assert list(list_tables(tmp_path)) == []
    assert not (tmp_path / EXPERT_LOAD_FILE).exists()


METRICS_FILE = dict.fromkeys(
    ("response_tokens", "time/generate_s", "time/log_probs_s", "time/update_s",
     "time/weight_sync_s", "tokens_per_s"),
    1.0,
)  # fmt: skip
