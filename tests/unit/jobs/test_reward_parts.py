"""Names of parts of the reward are checked before a run starts, where the parts are known."""

from __future__ import annotations

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.preflight import _check_choices
from mcore_rl.rewards.registry import get_parts, get_registry

FILTER = "algorithm.filter.group_filter_settings.of"
PARTS = "algorithm.advantage_settings.parts"
GDPO = "algorithm.advantage=gdpo"
TERMS = "reward.terms={right: {name: math}, brief: {name: overlong, settings: {buffer_tokens: 8}}}"
OF_TERMS = "right, right/answered, right/unchecked, brief$"
CURRICULUM = "data.curriculum.name=learnability"


@pytest.mark.parametrize(
    ("given", "told"),
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
def test_a_name_that_no_built_in_reward_returns_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        _check_choices(compose_config(RLConfig, ["recipe=quickstart", *given]))


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
    _check_choices(compose_config(RLConfig, ["recipe=quickstart", *given]))


@pytest.mark.parametrize("loop", ["environment", "verifiers"])
def test_a_loop_that_finds_rewards_itself_may_have_any_parts(loop):
    from mcore_rl.jobs.reward_parts import check_reward_parts

    given = ["recipe=quickstart", f"{FILTER}=anything", f"agent.loop={loop}"]
    check_reward_parts(compose_config(RLConfig, given))


ASKED = {
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
    """A judge asks a server: test_judge_reward.py. A server of http may return anything."""
    assert set(ASKED) == set(get_registry().names) - {"judge", "http"}
    for name, (text, fields, more) in ASKED.items():
        result = get_registry().bind(name, SETTINGS.get(name, {}))(text, fields, "stop", **more)
        assert {*result} - {"reward"} == {*get_parts("reward", name)}, name
    assert get_parts("reward", "judge") == ("parsed",) and get_parts("reward", "http") is None
