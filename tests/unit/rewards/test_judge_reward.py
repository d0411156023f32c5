"""The reward `judge`: what a judge is asked, and what is read from its verdicts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RewardConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards import remote
from mcore_rl.rewards.manager import RewardManager, check_columns, check_judge_models
from tests.unit.rewards.answering import Answering, answering, says
from tests.unit.rewards.judging import compute_rewards_with, response

TEMPLATE = "Q: {prompt}\nRight: {answer}\nA: {response}\nIn {{braces}} say Score: 0 to 10."
SETTINGS = {"model": "judge-8b", "template": TEMPLATE, "high": 10.0}


def completion(*verdicts: str | None) -> dict[str, Any]:
    """Build an answer with OpenAI's own types."""
    choices = [
        Choice(
            finish_reason="stop",
            index=n,
            message=ChatCompletionMessage(role="assistant", content=verdict),
        )
        for n, verdict in enumerate(verdicts)
    ]
    result = ChatCompletion(
        id="1", choices=choices, created=1, model="judge-8b", object="chat.completion"
    )
    return result.model_dump()


def send(
    verdicts: Sequence[str | None], text: str = "7", **overrides: Any
) -> tuple[Sample, Answering]:
    async def run() -> tuple[Sample, Answering]:
        async with asyncio.timeout(120), answering(says(completion(*verdicts))) as server:
            settings = {"url": server.url, **SETTINGS, **overrides}
            judge = RewardManager(RewardConfig("judge", settings, on_error="zero"))
            sample = response()
            sample.messages = [{"role": "user", "content": "3 + 4?"}]
            try:
                [result] = await compute_rewards_with(judge, [text], [sample])
            finally:
                await judge.close()
            return result, server

    return asyncio.run(run())


def test_a_judge_gets_the_template_and_its_score_is_scaled(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k-123")
    result, server = send(
        ["Hm. Score: 3? No. **Score:** 8"], "{prompt} {0}", api_key_env="JUDGE_KEY"
    )
    assert (result.reward, result.reward_parts, result.reward_error) == (0.8, {"parsed": 1.0}, "")
    assert server.lines == ["POST /score/chat/completions HTTP/1.1"]
    assert server.headers[0]["authorization"] == "bearer k-123"
    message = "Q: 3 + 4?\nRight: 7\nA: {prompt} {0}\nIn {braces} say Score: 0 to 10."
    assert server.requests == [
        {
            "model": "judge-8b",
            "messages": [{"role": "user", "content": message}],
            "temperature": 0.0,
            "max_tokens": 1024,
            "n": 1,
        }
    ]


def test_votes_are_averaged_and_those_without_a_score_left_out():
    # By hand: 2 and 6 of 0 to 10; 11 is no score, nor is silence.
    verdicts = ["Score: 2", "Score: 11", None, "Score = 6.0"]
    result, server = send(verdicts, votes=4, temperature=1.0)
    assert (result.reward, result.reward_parts) == (0.4, {"parsed": 0.5})
    assert server.requests[0]["n"] == 4
    result, _ = send(["Score: 2"], votes=2, temperature=1.0)
    assert "answered ['Score: 2']; asked for: 2 texts (n)" in result.reward_error
    result, _ = send(["Score: NaN", "none"], votes=2, temperature=1.0)
    assert "raised RemoteError: no score from 0.0 to 10.0 in ['Score: NaN'" in result.reward_error


@pytest.mark.parametrize(
    "verdict",
    [
        "Score: 4, since it is short. (Score: 0 to 10)",
        "Score: 4/10\n(Score: 0-10)",
        "Score: 0 \N{EN DASH} 10. Mine is Score: 4 - 2 steps are missing",
        "Score (0 to 10): 4",
        "**Score** (from 0 to 10): **4**",
        'As JSON: {"score": 4}',
        "Score: 1..10\nScore: 4.",
    ],
)
def test_the_scale_that_a_verdict_repeats_is_no_score(verdict):
    assert send([verdict])[0].reward == 0.4


@pytest.mark.parametrize(
    ("verdict", "scale", "score"),
    [
        ("Score: 7,5", {}, 7.5),
        ("Score: 7.5", {}, 7.5),
        ("Score: 6 / Maximum score: 10", {}, 6),
        ("Score: 6\nMax score: 10", {}, 6),
        ("Score: 6\n**Maximum Score:** 10", {}, 6),
        ('{"score": 6, "max_score": 10}', {}, 6),
        ('{"maxScore": 10, "score": 6}', {}, 6),
        ('{"score": 6, "maxScore": 10}', {}, 6),
        ("Score: 6. Highest possible score: 10", {}, 6),
        ("Score: 6. Minimum score: 0", {}, 6),
        ("Score: 4/5", {}, 8),
        ("Score: 4/5", {"high": 5.0}, 4),
        ("Score: 4/5", {"high": 1.0}, 0.8),
        ("Score: 4 / 10", {}, 4),
        ("Score: 4 out of 5", {}, 8),
        ("Score: 4 of 5", {}, 8),
        ("Score: 4/5", {"low": 1.0, "high": 5.0}, 4),
        ("Score: 4/10", {"low": 1.0, "high": 5.0}, None),
        ("**Score: 4**/5", {}, 8),
        ("Score: 8,000", {"high": 10000.0}, 8000),
        ("Score: 8,000", {}, None),
        ("Score: 0,500", {"high": 1.0}, 0.5),
        ("Score: 1e1", {}, 10),
        ("Score: 1E1", {}, 10),
        ("Score: 5e-1", {"high": 1.0}, 0.5),
        ("Score: 80%", {}, 8),
        ("Score: 80%", {"high": 100.0}, 80),
        ("Score: 80 %", {"high": 1.0}, 0.8),
        ("Score: 7, which is good", {}, 7),
        ("Score: 7. Good", {}, 7),
        ("Score: 7, 5 steps", {}, 7),
        ("Score: 3,4,5", {}, None),
        ("Score: 0 to 10. Score: 4", {}, 4),
        ("Score: -1", {"low": -1.0}, -1),
        ("Score: 11", {}, None),
        ("Score: 4/0", {}, None),
        ("Score: 5/4", {}, None),
        ("Score: 12/10", {}, None),
        ("Total score: 7", {}, 7),
        ("Score: 7/10 (Maximum score 10)", {}, 7),
        ("Final score = 9,5/10", {}, 9.5),
    ],
)
def test_numbers_of_a_verdict_are_read_as_they_are_written(verdict, scale, score):
    result, _ = send([verdict], **scale)
    if score is None:
        assert "no score from" in result.reward_error
        return
    low, high = scale.get("low", 0.0), scale.get("high", 10.0)
    assert (result.reward, result.reward_error) == (pytest.approx((score - low) / (high - low)), "")


def test_the_thoughts_of_a_judge_are_no_verdict():
    assert send(["<think>Score: 9? No.</think>Score: 4"])[0].reward == 0.4
    assert "no score from" in send(["<think>Score: 9?"])[0].reward_error


def test_a_verdict_with_a_scale_alone_has_no_score():
    assert "no score from 0.0 to 10.0" in send(["Give a Score: 0 to 10."])[0].reward_error


def test_labels_and_a_function_of_ones_own_read_verdicts(tmp_path):
    yes_no = {"pattern": r"\[\[(\w+)\]\]", "labels": "Yes=1, no=-1", "low": -1.0, "high": 1.0}
    assert send(["[[No]] or rather [[YES]]"], **yes_no)[0].reward == 1.0
    assert send(["[[no]]"], **yes_no)[0].reward == 0.0
    assert "no score" in send(["[[maybe]]"], **yes_no)[0].reward_error
    source = "def stars(verdict):\n    return verdict.count('*') if verdict else 1 / 0\n"
    (tmp_path / "own.py").write_text(source)
    parser = {"parser": f"{tmp_path}/own.py:stars", "high": 5.0}
    assert send(["****"], **parser)[0].reward == 0.8
    assert "'judge' raised ZeroDivisionError" in send([""], **parser)[0].reward_error


def test_a_function_that_never_ends_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_PARSER_S", 0.3)
    (tmp_path / "own.py").write_text("import time\ndef never(verdict):\n    time.sleep(600)\n")
    result, _ = send(["Score: 1"], parser=f"{tmp_path}/own.py:never")
    assert "to read the verdict 'Score: 1' took longer than 0.3 s" in result.reward_error


def test_a_prompt_of_several_messages_has_their_roles_and_a_template_may_be_a_file(tmp_path):
    (tmp_path / "judge.txt").write_text("{prompt}|{response}")

    async def run() -> Answering:
        async with answering(says(completion("Score: 1"))) as server:
            settings = {"url": server.url, "model": "j", "template_file": f"{tmp_path}/judge.txt"}
            judge = RewardManager(RewardConfig("judge", settings))
            sample = response()
            sample.messages = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "3 + 4?"},
            ]
            await compute_rewards_with(judge, ["7"], [sample])
            await judge.close()
            return server

    [message] = asyncio.run(run()).requests[0]["messages"]
    assert message["content"] == "system: Be brief.\n\nuser: 3 + 4?|7"


def test_a_pattern_that_takes_years_keeps_nobody_waiting():
    # The event loop goes on, and the verdict is an error of its sample.
    ticks = []

    async def run() -> Sample:
        async def tick() -> None:
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.05)

        async with answering(says(completion("a" * 5000))) as server:
            ticking = asyncio.create_task(tick())
            settings = {"url": server.url, **SETTINGS, "pattern": r"(a+)+b"}
            judge = RewardManager(RewardConfig("judge", settings, on_error="zero"))
            sample = response()
            sample.messages = [{"role": "user", "content": "3 + 4?"}]
            [result] = await compute_rewards_with(judge, ["7"], [sample])
            ticking.cancel()
            await judge.close()
            return result

    result = asyncio.run(run())
    assert "'judge' raised TimeoutError" in result.reward_error
    assert len(ticks) > 5


@pytest.mark.parametrize(
    "answer", [{"choices": [{}]}, {"error": "overloaded"}, {"choices": [{"message": None}]}]
)
def test_an_answer_of_another_form_is_an_error_of_its_sample(answer):
    async def run() -> Sample:
        async with answering(says(answer)) as server:
            judge = RewardManager(
                RewardConfig("judge", {"url": server.url, **SETTINGS}, on_error="zero")
            )
            sample = response()
            sample.messages = [{"role": "user", "content": "3 + 4?"}]
            [result] = await compute_rewards_with(judge, ["7"], [sample])
            await judge.close()
            return result

    assert "raised RemoteError: http://127.0.0.1:" in asyncio.run(run()).reward_error


WRONG = {
    "model=''; allowed: what the server at url calls": {"model": ""},
    "template='' and template_file=''; allowed: one of them": {"template": ""},
    "template has no {response}": {"template": "{prompt}"},
    "template has the field ''": {"template": "{} {response}"},
    "template has the field 'answer.__class__'": {"template": "{answer.__class__} {response}"},
    "template: Single '}' encountered in format string; a brace": {"template": "} {response}"},
    "template_file='/nowhere/judge.txt':": {"template": "", "template_file": "/nowhere/judge.txt"},
    "pattern='[': ": {"pattern": "["},
    "pattern='(a)(b)' has 2 groups; allowed: one": {"pattern": "(a)(b)"},
    "labels='yes'; allowed: LABEL=SCORE": {"labels": "yes"},
    "labels: yes=11.0; allowed: 0.0 to 10.0": {"labels": "yes=11"},
    "labels='a=1' is of pattern, and there is a parser": {"labels": "a=1", "parser": "a:b"},
    "parser='nothing:here': 'nothing' cannot be imported": {"parser": "nothing:here"},
    "high-low=0.0; allowed: above 0": {"high": 0.0},
    "votes=2 with temperature=0: all would be the same": {"votes": 2},
    "temperature=-1.0; allowed: at least 0": {"temperature": -1},
    "api_key_env names the environment variable 'NOT_SET', which": {"api_key_env": "NOT_SET"},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_is_refused_before_a_run(message):
    settings = {"url": "http://host/v1", **SETTINGS, **WRONG[message]}
    given = {name: value for name, value in settings.items() if value is not ...}
    with pytest.raises(ConfigError) as raised:
        RewardManager(RewardConfig("judge", given))
    assert str(raised.value).startswith(f"reward.settings.{message}")


def test_a_column_that_the_data_lacks_is_refused_before_a_run():
    settings = {**SETTINGS, "url": "http://host/v1", "template": "{rubric} {response}"}
    with pytest.raises(ConfigError, match=r"reward.terms.x.settings.template has {rubric}; allo"):
        check_columns(RewardConfig(terms={"x": {"name": "judge", "settings": settings}}), ["a"])
    check_columns(RewardConfig("judge", settings), ["answer", "rubric"])
    check_columns(RewardConfig("math"), ["a"])


def test_a_judge_is_at_a_url_or_a_frozen_model_of_the_run():
    def config(**settings: object) -> RewardConfig:
        return RewardConfig(terms={"clear": {"name": "judge", "settings": settings}})

    template = {"template": "{response}"}
    with pytest.raises(ConfigError, match="url='' and served_by=''; allowed: one of them"):
        RewardManager(config(**template))
    with pytest.raises(ConfigError, match="model=''; allowed: what the server at url calls"):
        RewardManager(config(url="http://here", **template))
    with pytest.raises(ConfigError, match=r"timeout_s=3.0 is of a server at url; models.big has"):
        RewardManager(config(served_by="big", timeout_s=3.0, **template))
    result = config(served_by="big", **template)
    RewardManager(result)
    check_judge_models(result, ["big"])
    message = (
        r"reward.terms.clear.settings.served_by='big'; allowed: none, as the run has no frozen"
    )
    with pytest.raises(ConfigError, match=message):
        check_judge_models(result, ())
