"""Rules of models with servers of their own."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_rollout import (
    build_models_with_servers,
    build_served_models,
    validate_batches_on_device,
    validate_served_models,
)
from mcore_rl.config.schema import RLConfig


def config(loop: str = "user", **models: object) -> RLConfig:
    made = RLConfig(models=models)  # type: ignore[arg-type]
    made.agent.loop = loop
    return made


def test_a_model_has_the_defaults_of_servers_and_the_policys_context():
    made = config(user={"path": "m", "tp": 2, "max_tokens": 7, "temperature": 0}, judge={})
    made.data.max_prompt_tokens, made.rollout.max_response_tokens = 30, 12
    made.rollout.num_servers, made.rollout.temperature = 3, 0.5  # the policy's own
    validate_served_models(made)
    user, judge = build_served_models(made).values()
    assert (user.path, user.servers.tp, user.servers.max_response_tokens) == ("m", 2, 7)
    assert (user.servers.temperature, user.max_context) == (0, 42)
    assert (judge.path, judge.servers.num_servers, judge.servers.temperature) == ("", 1, 1.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"path": 3}, "models.user.path=3; allowed: text"),
        ({"tp": True}, "models.user.tp=True; allowed: a whole number"),
        ({"ep": 1}, "models.user.ep=1; allowed: true or false"),
        ({"tp": 0}, "models.user.tp=0; allowed: at least 1"),
        (
            {"layout": {}},
            "models.user.layout is unknown; allowed: path, adapter, backend, ",
        ),
        ({"top_p": 1.5}, "models.user.top_p=1.5; allowed: above 0, up to 1"),
        ({"top_p": 0}, "models.user.top_p=0.0; allowed: above 0"),
        ({"max_tokens": 0}, "models.user.max_tokens=0; allowed: at least 1"),
        ({"timeout_s": 0}, "models.user.timeout_s=0.0; allowed: above 0"),
        ({"codec": "own"}, "models.user.codec='own'; allowed: 'auto', 'renderers', 'template'"),
        ({"cores": "0|1"}, "models.user.cores='0|1' must list the cores of each of a node's 1"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "models.user.max_num_batched_tokens=8; allowed: at least models.user.max_num_seqs=9",
        ),
        ({"placement": "shared"}, "models.user.placement='shared': servers that leave their"),
        ({"temperature": float("nan")}, "models.user.temperature=nan; allowed: at least 0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(parts, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        validate_served_models(config(user=parts))


def test_a_single_turn_has_no_use_for_models():
    with pytest.raises(ConfigError, match=r"models=user: agent.loop='single_turn' talks to the"):
        validate_served_models(config("single_turn", user={}))
    validate_served_models(config("single_turn"))


def test_a_single_turn_may_have_the_models_that_rewards_ask():
    made = config("single_turn", judge={}, user={})
    made.reward.terms = {"clear": {"name": "judge", "settings": {"served_by": "judge"}}}
    with pytest.raises(ConfigError, match=r"^models=user: agent.loop='single_turn' talks to the"):
        validate_served_models(made)
    del made.models["user"]
    validate_served_models(made)


def adapter_config(**parts: object) -> RLConfig:
    made = config(user={"adapter": "earlier", **parts}, judge={})
    made.rollout.lora = "adapter"
    made.data.max_prompt_tokens, made.rollout.max_response_tokens = 30, 12
    return made


def test_an_adapter_is_a_model_without_servers():
    made = adapter_config(temperature=0.5, max_context=42)
    validate_served_models(made)
    model = build_served_models(made)["user"]
    assert (model.adapter, model.path, model.servers.temperature) == ("earlier", "", 0.5)
    assert [*build_models_with_servers(made)] == ["judge"]


@pytest.mark.parametrize("part", ["path", "num_servers", "kv_cache_bytes", "timeout_s"])
def test_settings_of_servers_are_refused_for_an_adapter(part):
    made = adapter_config(**{part: "m" if part == "path" else 2})
    with pytest.raises(ConfigError, match=rf"^models.user.{part}=.*: the policy's servers serve "):
        validate_served_models(made)


def test_an_adapter_is_refused_where_the_servers_base_model_changes():
    made = adapter_config()
    made.rollout.lora = "merged"
    message = r"^models.user.adapter='earlier' with rollout.lora='merged': .*; allowed: rollout.lo"
    with pytest.raises(ConfigError, match=message):
        validate_served_models(made)
    made = adapter_config()
    made.warm_start.num_steps = 3
    with pytest.raises(ConfigError, match=r"^models.user.adapter='earlier' with warm_start.num_st"):
        validate_served_models(made)


def test_the_policys_servers_take_the_longest_conversation_of_an_adapter():
    made = adapter_config(max_context=43)
    made.rollout.max_num_batched_tokens = 42
    made.models.pop("judge")
    validate_batches_on_device(made, "cuda")
    with pytest.raises(ConfigError, match=r"^rollout.max_num_batched_tokens=42: .* at least 43,"):
        validate_batches_on_device(made, "cpu")
