"""Examples of docs/rewards.md work, and its tables have every reward with its settings."""

import asyncio
import json
import re
from dataclasses import MISSING, fields

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.schema import RewardConfig, RLConfig
from mcore_rl.rewards.manager import RewardManager, check_columns
from mcore_rl.rewards.registry import get_registry
from tests.pages import FENCE, ROOT
from tests.unit.rewards.answering import answering, says
from tests.unit.rewards.judging import compute_rewards, compute_rewards_with, response

PAGE = (ROOT / "docs" / "rewards.md").read_text()
BLOCKS = FENCE.findall(PAGE)
TABLES = PAGE.partition("## Mathematics")[0]
ROWS = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) ?\|$", TABLES, re.MULTILINE))


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("name", get_registry().names)
def test_the_tables_have_the_settings_of_each_reward_and_their_defaults(name):
    kind = get_registry().get_settings_class(name)
    expected = [
        field.name + ("" if field.default is MISSING else f"={shown(field.default)}")
        for field in fields(kind or RewardConfig)
    ]
    assert re.findall("`(.*?)`", ROWS[name]) == (expected if kind else [])


@pytest.mark.parametrize("block", [text for language, text in BLOCKS if language == "yaml"])
def test_the_recipes_are_of_rewards_that_there_are(block, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    (tmp_path / "mine.yaml").write_text(block)
    config = compose_config(RLConfig, [f"recipe={tmp_path / 'mine.yaml'}"])
    validate_rl(config)
    RewardManager(config.reward, config.rollout.max_response_tokens)
    check_columns(config.reward, ["answer"])


def test_the_functions_are_rewards(tmp_path):
    block, more = [text for language, text in BLOCKS if language == "python"]
    file = tmp_path / "own.py"
    file.write_text(f"{block}\n\nasync def ask_my_service(answer, text):\n    return 0.25\n")
    texts, samples = ["two, please", "no"], [response(num_tokens=n) for n in (4, 8)]
    result = {}
    for name in ("polite", "rate", "batched"):
        config = RewardConfig(f"{file}:{name}")
        result[name] = [sample.reward for sample in compute_rewards(config, texts, samples)]
    assert result == {"polite": [1.0, 0.0], "rate": [0.25, 0.25], "batched": [1.0, 0.5]}
    sample = response()
    sample.turn_texts, sample.turn_token_ids = ["a call", "7"], [[1], [2]]
    [result] = compute_rewards(RewardConfig(f"{file}:calls"), ["7"], [sample])
    assert (result.reward, result.turn_rewards) == (1.1, [0.1, 1.0])
    file = tmp_path / "more.py"
    file.write_text(more.replace('"sympy"', '"json"'))  # which takes no seconds
    for name in ("checked", "remembered"):
        result = compute_rewards(RewardConfig(f"{file}:{name}"), ["no", "no"])
        assert [sample.reward for sample in result] == [1.0, float(name == "checked")]


def test_the_server_of_the_page_works():
    sent, answered = [json.loads(text) for language, text in BLOCKS if language == "json"][-2:]
    sample = response(num_tokens=5)
    [sample.response_ids] = sent["turn_token_ids"]
    sample.messages = sent["messages"]

    async def run() -> dict[str, object]:
        async with answering(says(answered)) as server:
            judge = RewardManager(RewardConfig("http", {"url": server.url}))
            [result] = await compute_rewards_with(judge, [sent["text"]], [sample])
            await judge.close()
            assert (result.reward, result.reward_parts) == (0.5, {"steps": 3.0})
            return server.requests[0]

    assert asyncio.run(run()) == sent
