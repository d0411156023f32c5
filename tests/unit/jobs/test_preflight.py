"""Preflight of RL and supervised runs: what is refused before any process starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import (
    ConversationsConfig,
    Layout,
    ModelConfig,
    RewardConfig,
    RLConfig,
    SFTConfig,
    StepsConfig,
)
from mcore_rl.data.examples import ExampleFiles
from mcore_rl.data.routed_experts import ExpertLayers
from mcore_rl.examples.tasks import tiny_model
from mcore_rl.jobs import preflight
from mcore_rl.jobs.placement import list_replayed_experts
from mcore_rl.jobs.preflight import (
    check_inputs,
    check_layouts,
    check_reward_parts,
    load_prompt_files,
)
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.jobs.supervised_preflight import _check_train_rows
from mcore_rl.rewards.registry import get_parts, get_registry
from tests.unit.agents.families import tokenizer_of


@pytest.mark.parametrize(
    "setting", ["model.path", "critic.model_path", "reward_model.model_path", "models.user.path"]
)
def test_another_quantisation_than_float8_blocks_is_refused_by_its_path(tmp_path: Path, setting):
    """Dry runs check this too: config.json suffices."""
    source = find_published("DeepSeek-V3") / "config.json"
    made = json.loads(source.read_text())
    for name, method in (("float8", "fp8"), ("other", "awq")):
        made["quantization_config"]["quant_method"] = method
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(made))
    paths = {"model.path": str(tmp_path / "float8"), setting: str(tmp_path / "other")}
    if setting == "reward_model.model_path":
        made["architectures"] = ["DeepseekV3ForSequenceClassification"]
        (tmp_path / "other" / "config.json").write_text(json.dumps(made))
    config = compose_config(
        RLConfig,
        ["recipe=dsv3_671b", "algorithm.advantage=gae", *(f"{k}={v}" for k, v in paths.items())],
    )
    message = (
        rf"^{setting}='{tmp_path}/other': .*quant_method='awq' is not supported; allowed: 'fp8'"
    )
    with pytest.raises(ConfigError, match=message):
        check_layouts(config, plan_run(config))


@pytest.mark.parametrize(
    ("device_type", "method", "message"),
    [
        ("cuda", "colocated", "expandable segments cannot be shared"),
        ("cuda", "full_export", "model.path='/nowhere' does not exist"),
        ("cpu", "colocated", "model.path='/nowhere' does not exist"),
    ],
)
def test_gpu_memory_that_servers_cannot_map_is_refused_before_a_run(
    monkeypatch, device_type, method, message
):
    monkeypatch.setattr(preflight, "detect_device_type", lambda: device_type)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    config = RLConfig(model=ModelConfig(path="/nowhere"))
    config.weight_sync.method = method
    with pytest.raises(ConfigError, match=message):
        check_inputs(config, plan_run(config))


TESTS = '{"asserts": ["assert f()"]}'


@pytest.mark.parametrize(
    ("reward", "answers", "loop", "message"),
    [
        ("final_number", ["7", "1/2"], "single_turn", "'1/2'; allowed with .* a number such as"),
        ("math", ["1/2", r"\frac{1}{2"], "tools", r"what can be in a \\boxed\{\}"),
        ("choice", ["A", "Paris"], "program", "'Paris'; allowed with .* one of A, B, C, D"),
        ("code", [TESTS, "7"], "user", "'7'; code needs an object"),
        ("final_number", ["7", "1/2"], "environment", ""),  # which rewards by itself
        ("math", ["7", "1/2"], "single_turn", ""),
    ],
)
def test_an_answer_that_no_response_of_a_run_can_earn_is_refused(
    tmp_path: Path, reward, answers, loop, message
):
    messages = [{"role": "user", "content": "How much?"}]
    lines = [json.dumps({"messages": messages, "answer": answer}) for answer in answers]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    tokenizer = tiny_model.train_tokenizer(["user\nHow much?", "assistant\n"] * 20)
    config = RLConfig(reward=RewardConfig(terms={"own": {"name": reward}}))
    config.agent.loop = loop
    files = {"data.train_file": f"{tmp_path}/rows.jsonl"}
    if message:
        with pytest.raises(ConfigError, match=f"data.train_file=.* row 1 has an .* {message}"):
            load_prompt_files(files, config, tokenizer)
    else:
        assert len(load_prompt_files(files, config, tokenizer)) == 2


@pytest.mark.parametrize(
    ("advantage", "warmup_steps", "expected"),
    [("gae", 0, 20), ("gae", 4, 12), ("gae", 10, 2), ("gae", 12, 2), ("grpo", 4, 20)],
)
def test_the_schedule_of_an_actor_has_the_steps_that_it_takes(
    tmp_path: Path, advantage: str, warmup_steps: int, expected: int
):
    """While only the critic trains it takes none, and the decay would end too high."""
    qwen = str(find_published("Qwen3-30B-A3B"))
    config = RLConfig(model=ModelConfig(path=qwen, dtype="bfloat16"))
    config.algorithm.advantage, config.algorithm.num_mini_batches = advantage, 2
    config.trainer.num_steps, config.critic.warmup_steps = 10, warmup_steps
    assert plan_run(config)["actor"].spec.total_steps == expected
    config.actor.optimizer.schedule = "wsd"
    config.actor.optimizer.wsd_decay_steps = expected
    check_layouts(config, plan_run(config))
    if expected < 20:
        config.actor.optimizer.wsd_decay_steps += 1
        message = rf"actor\.optimizer\.wsd_decay_steps={expected + 1}: {expected} steps"
        with pytest.raises(ConfigError, match=message):
            check_layouts(config, plan_run(config))


def test_the_layout_of_a_critic_has_to_fit_the_model_that_it_begins_with(tmp_path: Path):
    qwen = str(find_published("Qwen3-30B-A3B"))
    config = RLConfig(model=ModelConfig(path=qwen, dtype="bfloat16"))
    config.critic.layout = Layout(tp=3)
    assert (
        check_layouts(config, plan_run(config))["num_hidden_layers"] == 48
    )  # without a critic nobody reads it
    config.algorithm.advantage = "gae"
    with pytest.raises(ConfigError, match=r"critic\.layout\.tp=3 does not divide"):
        check_layouts(config, plan_run(config))


def published(folder: Path, name: str, **changes: object) -> RLConfig:
    """Build settings with router replay of a published model."""
    source = find_published(name) / "config.json"
    made = json.loads(source.read_text()) | changes
    (folder / "config.json").write_text(json.dumps(made))
    config = RLConfig(model=ModelConfig(path=str(folder), dtype="bfloat16"))
    config.actor.moe.router_replay = "rollout"
    return config


def test_experts_are_not_replayed_where_the_servers_cannot_record_them(tmp_path: Path):
    config = published(tmp_path, "DeepSeek-V3", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"router_replay='rollout': vLLM on a CPU records no"):
        check_layouts(config, plan_run(config))


def test_each_pipeline_rank_replays_its_own_layers_with_experts(tmp_path: Path):
    """GLM-4.5 has one dense layer and 91 with experts, of which a token takes 8."""
    config = published(tmp_path, "GLM-4.5", num_hidden_layers=8, first_k_dense_replace=3)
    config.actor.layout = Layout(pp=2, vpp=2)
    assert list_replayed_experts(config) == ExpertLayers(stages=((4, 5), (3, 6, 7)), topk=8)
    config.actor.layout = Layout(pp=2, first_stage_layers=2)
    assert list_replayed_experts(config) == ExpertLayers(stages=((), (3, 4, 5, 6, 7)), topk=8)
    config.actor.moe.router_replay = "record"
    assert list_replayed_experts(config) is None


@pytest.mark.parametrize("role", ["human", "developer", "function"])
def test_a_role_that_loops_do_not_know_is_refused_with_its_row_before_a_run(
    tmp_path: Path, role: str
):
    """Use a chat template that accepts any role."""
    rows = [[{"role": name, "content": "Hi."}] for name in ("user", role)]
    text = "".join(json.dumps({"messages": row, "answer": 1}) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    files = {"data.train_file": str(tmp_path / "rows.jsonl")}
    config, tokenizer = RLConfig(), tokenizer_of("chatml")
    assert len(load_prompt_files(files, config, tokenizer)) == 2
    config.agent.loop = "tools"
    message = (
        rf"rows.jsonl': row 1 of column 'messages' .*: message 0 has the role '{role}'; allowed"
    )
    with pytest.raises(ConfigError, match=message):
        load_prompt_files(files, config, tokenizer)


FILTER = "algorithm.filter.group_filter_settings.of"
PARTS = "algorithm.advantage_settings.parts"
GDPO = "algorithm.advantage=gdpo"
TERMS = "reward.terms={right: {name: math}, brief: {name: overlong, settings: {buffer_tokens: 8}}}"
OF_TERMS = "right, right/answered, right/unchecked, brief$"
CURRICULUM = "data.curriculum.name=learnability"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([f"{FILTER}=nothing"], f"{FILTER} names 'nothing', .* allowed: reward, format$"),
        ([GDPO, f"{PARTS}=format,x=2"], f"{PARTS} names 'x', .* allowed: format$"),
        ([GDPO, f"{PARTS}=reward"], f"{PARTS} names 'reward', .* allowed: format$"),
        ([GDPO, f"{PARTS}=model"], f"{PARTS} names 'model', "),
        ([TERMS, f"{FILTER}=answered"], f"{FILTER} names 'answered', .*: reward, {OF_TERMS}"),
        ([TERMS, GDPO, f"{PARTS}=right,math"], f"{PARTS} names 'math', .* allowed: {OF_TERMS}"),
        (
            ["reward.name=substring", GDPO, f"{PARTS}=right"],
            "allowed: none, as the reward has no parts",
        ),
        (
            [CURRICULUM, "data.curriculum.success=passed"],
            "data.curriculum.success names 'passed', .* allowed: reward, format",
        ),
    ],
)
def test_a_name_that_no_built_in_reward_returns_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        check_reward_parts(compose_config(RLConfig, ["recipe=quickstart", *given]))


@pytest.mark.parametrize(
    "given",
    [
        [FILTER + "=format", CURRICULUM, "data.curriculum.success=reward"],
        [TERMS, GDPO, f"{PARTS}=right,brief=0.5", f"{FILTER}=right/answered"],
        [GDPO, f"{PARTS}=format,model", "reward_model.model_path=/x"],
        [f"{FILTER}=anything", "reward.name={own}"],
        [f"{FILTER}=anything", "reward.name=http", "reward.settings.url=http://x"],
        [f"{FILTER}=own/anything", "reward.terms={math: {}, own: {name: '{own}'}}"],
    ],
)
def test_names_of_parts_that_there_are_or_may_be_pass(given, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def f(text, fields, finish_reason):\n    return {'reward': 0.0}\n")
    given = [text.replace("{own}", f"{file}:f") for text in given]
    check_reward_parts(compose_config(RLConfig, ["recipe=quickstart", *given]))


@pytest.mark.parametrize("loop", ["environment", "verifiers"])
def test_a_loop_that_finds_rewards_itself_may_have_any_parts(loop):
    from mcore_rl.jobs.preflight import check_reward_parts

    given = ["recipe=quickstart", f"{FILTER}=anything", f"agent.loop={loop}"]
    check_reward_parts(compose_config(RLConfig, given))


REWARD_CALLS = {
    "choice": ("A", {"answer": "A"}, {}),
    "code": ("no block", {"answer": '{"asserts": ["assert True"]}'}, {}),
    "cosine": ("x", {}, {"num_tokens": 1, "max_tokens": 4, "rewards": {"a": 1.0}}),
    "final_number": ("#### 7", {"answer": "7"}, {}),
    "format": ("<a></a>", {}, {}),
    "math": ("\\boxed{7}", {"answer": "7"}, {}),
    "overlong": ("x", {}, {"num_tokens": 1, "max_tokens": 4}),
    "pattern": ("x", {}, {}),
    "substring": ("7", {"answer": "7"}, {}),
}
SETTINGS = {
    "cosine": {"term": "a"},
    "format": {"tags": "a"},
    "overlong": {"buffer_tokens": 2},
    "pattern": {"pattern": "x"},
}


def test_the_parts_that_rewards_declare_are_those_that_they_return():
    """Except judge (test_judge_reward.py) and http, whose server may return anything."""
    assert set(REWARD_CALLS) == set(get_registry().names) - {"judge", "http"}
    for name, (text, fields, more) in REWARD_CALLS.items():
        result = get_registry().bind(name, SETTINGS.get(name, {}))(text, fields, "stop", **more)
        assert {*result} - {"reward"} == {*get_parts("reward", name)}, name
    assert get_parts("reward", "judge") == ("parsed",) and get_parts("reward", "http") is None


def check(sizes: list[int], weights: list[float], batch_size: int) -> None:
    files = [f"{number}.jsonl" for number in range(len(sizes))]
    data = ConversationsConfig(train_files=files, train_weights=weights)
    config = SFTConfig(data=data, trainer=StepsConfig(batch_size=batch_size))
    _check_train_rows(config, ExampleFiles(*(["row"] * size for size in sizes)))


def test_a_step_takes_no_row_twice():
    check([3, 5], [], 8)
    check([3, 5], [1.0, 1.0], 6)
    message = "trainer.batch_size=9: data.train_files[0] and data.train_files[1] has 8 rows"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check([3, 5], [], 9)
    message = "trainer.batch_size=8 takes 4 of this file: data.train_files[0] has 3 rows"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check([3, 5], [1.0, 1.0], 8)
