"""The loop `verifiers` with a scripted process in place of verifiers, against the endpoint."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.runner import AgentRunner, check_agent, try_out
from mcore_rl.agents.session import Turn, VersionSpan
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.agents.verifiers.loop import RecordMismatchError, check_record
from mcore_rl.agents.verifiers.process import BridgeError, BridgeProcess, VerifiersSettings
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.rewards.registry import RewardError
from tests.notebook import run_in_cell
from tests.unit.agents.served import Policy
from tests.unit.agents.test_loops import MESSAGES, TOKENIZER, text_of
from tests.unit.agents.test_program import assert_gone

SCRIPT = Path(__file__).with_name("scripted_bridge.py")


@pytest.fixture
def scripted(tmp_path):
    """Settings with the script as their interpreter."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SCRIPT}"\n')
    program.chmod(0o755)

    def build_settings(environment: str, **settings: Any) -> dict[str, Any]:
        return {"environment": environment, "interpreter": str(program), **settings}

    return build_settings


def run(
    settings: dict[str, Any], tasks: list[list[str]], *, stops: bool = True, **config: Any
) -> list[list[Sample]]:
    """Return the samples of each batch of tasks, by one process."""

    async def work() -> list[list[Sample]]:
        policy = Policy(["42"] * 10)
        agent = AgentConfig(loop="verifiers", settings=settings, **config)
        runner = AgentRunner(policy, TOKENIZER, None, agent, 4096, stops_on_error=stops)
        try:
            async with asyncio.timeout(50):
                return [
                    await runner.run_all(
                        [
                            Prompt([], i, {"task": task}, row=7, messages=MESSAGES)
                            for i, task in enumerate(batch)
                        ],
                        SamplingParams(n=1, max_tokens=1000),
                    )
                    for batch in tasks
                ]
        finally:
            await runner.close()

    return asyncio.run(work())


def test_rollouts_at_the_same_time_are_samples_of_their_own_sessions(scripted):
    [samples] = run(scripted("good"), [["one", "two", "three"]])
    assert [text_of(s.prompt_ids).split("\n")[1] for s in samples] == [
        "one<|im_end|>",
        "two<|im_end|>",
        "three<|im_end|>",
    ]
    for sample in samples:
        assert (sample.reward, sample.status, sum(sample.response_mask)) == (1.5, "finished", 3)
        assert sample.reward_parts == {"right": 1.0, "short": 0.5, "metrics/length": 3.0}


def test_other_turns_than_the_endpoint_recorded_are_an_error_with_both(scripted):
    message = (
        r"RecordMismatchError: verifiers counts 1 turns with the tokens \(prompt, answer\) "
        r"\[\((\d+), 4\)\]; the endpoint has recorded 1: \[\(\1, 3\)\]; it was asked about row 7"
    )
    with pytest.raises(RewardError, match=message):
        run(scripted("lies"), [["one"]])


def test_other_tokens_of_as_many_are_an_error_with_both():
    spans = (VersionSpan(0, 0, 2),)
    turn = Turn("s", "0", "", (1, 2, 3), (4, 5), (-1.0, -1.0), spans, "stop")
    check_record([turn], [{"prompt": 3, "token_ids": [4, 5]}], [[3, 2]])
    with pytest.raises(RecordMismatchError, match=re.escape("[(3, (4, 6))]; recorded: [(3, (4, 5")):
        check_record([turn], [{"prompt": 3, "token_ids": [4, 6]}], [[3, 2]])
    with pytest.raises(RecordMismatchError, match=r"counts 0 turns .* has recorded 1"):
        check_record([turn], None, [])


def test_a_rollout_that_fails_is_an_error_of_its_trajectory(scripted):
    with pytest.raises(RewardError, match="RolloutFailedError: TaskError: no such city"):
        run(scripted("fails"), [["one"]])
    [[sample]] = run(scripted("fails"), [["one"]], stops=False)
    assert (sample.status, sample.reward) == ("failed", 0.0)
    assert "no such city" in sample.reward_error


def test_a_rollout_that_the_environment_cut_off_by_time_keeps_its_reward(scripted):
    [[sample]] = run(scripted("late"), [["one"]])
    assert (sample.status, sample.reward) == ("aborted", 1.5)


def test_a_trajectory_that_takes_too_long_is_cancelled_and_the_process_goes_on(scripted):
    [cut_off], [next_one] = run(scripted("waits"), [["waits"], ["one"]], timeout_s=3)
    assert (cut_off.status, cut_off.reward) == ("aborted", 0.0)
    assert next_one.reward == 2.5  # it has heard of one that was cancelled


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (
            "dies",
            {"max_restarts": 1},
            r"'dies' ended with status -9; it said: no memory is left\n\n"
            r"\(It is not started again: agent\.settings\.max_restarts=1\)$",
        ),
        (
            "hangs",
            {"answer_timeout_s": 0.4, "max_restarts": 0},
            r"(?s)hangs: .* in 0.4 s .* in hang_here\n",
        ),
        ("refused", {}, r"cannot load its environment: ModuleNotFoundError: no such taskset$"),
        ("old", {}, r"has verifiers 0\.3\.1; allowed: 0\.4\.x$"),
        ("silent", {"start_timeout_s": 0.4}, r"has not loaded its environment in 0.4 s"),
    ],
)
def test_a_failure_after_restarts_ends_the_run_with_the_stderr(
    scripted, environment, options, message
):
    """Also where an error of a trajectory does not."""
    with pytest.raises(BridgeError, match=message):
        run(scripted(environment, **options), [["one"]], stops=False)


async def played_through_a_kill(
    policy: Policy, config: AgentConfig, prompts: list[Prompt], limit_s: float
) -> list[Sample]:
    """Return samples whose process is killed when each prompt has asked the policy once."""
    runner = AgentRunner(policy, TOKENIZER, None, config, 4096, stops_on_error=True)
    sampling = SamplingParams(n=1, max_tokens=1000, seed=5)
    try:
        async with asyncio.timeout(limit_s):
            running = asyncio.create_task(runner.run_all(prompts, sampling))
            while len(policy.requests) < len(prompts):
                await asyncio.sleep(0.01)
            os.kill(runner._loop._process._process.pid, signal.SIGKILL)
            return await running
    finally:
        await runner.close()


def test_a_process_that_is_killed_in_mid_rollout_is_started_again_with_the_same_seeds(
    scripted, capsys
):
    policy = Policy(["42"] * 6, waits={number: asyncio.Event() for number in range(3)})
    config = AgentConfig(loop="verifiers", settings=scripted("good"))
    prompts = [
        Prompt([], i, {"task": task}, row=7, messages=MESSAGES)
        for i, task in enumerate(["one", "two", "three"])
    ]
    samples = asyncio.run(played_through_a_kill(policy, config, prompts, 50))
    assert [(s.group_id, s.status, s.reward) for s in samples] == [
        (group, "finished", 1.5) for group in range(3)
    ]
    assert [sum(sample.response_mask) for sample in samples] == [3] * 3
    requests = sorted((prompt, sampling.seed) for prompt, sampling, _ in policy.requests)
    assert requests[::2] == requests[1::2] and len({seed for _, seed in requests}) == 3
    assert sorted(policy.cancelled) == [0, 1, 2]
    message = "ended with status -9. It is started again: 1, agent.settings.max_restarts=3\n"
    assert capsys.readouterr().out == f"the process of the verifiers environment 'good' {message}"


def test_what_the_process_has_started_ends_with_it(scripted):
    async def work() -> str:
        process = BridgeProcess(VerifiersSettings(**scripted("leaves")), 8)
        await process.start()
        while "child" not in process._stderr:
            await asyncio.sleep(0.01)
        await process.close()
        with pytest.raises(BridgeError, match="was closed"):
            await process.ask("ping")
        return process._stderr

    assert_gone(int(asyncio.run(work()).split()[-1]))


def test_an_environment_is_tried_out_before_a_run(scripted):
    config = AgentConfig(loop="verifiers", settings=scripted("good"))
    try_out(config, {"task": "{}"})
    run_in_cell(lambda: try_out(config, {"task": "{}"}))
    with pytest.raises(ConfigError, match=r"needs the column 'task', .*; the row has answer"):
        try_out(config, {"answer": "4"})
    config.settings = scripted("refused")
    with pytest.raises(ConfigError, match=r"^agent\.settings\.environment: .* no such taskset"):
        try_out(config, {"task": "{}"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": ""}, "agent.settings.environment=''"),
        ({"interpreter": "no/python"}, "`bash launch/setup_env.sh verifiers` makes"),
        ({"args": "[1]"}, "agent.settings.args='[1]'; allowed: a JSON object, or a .toml file"),
        ({"args": "{"}, "agent.settings.args='{' cannot be read"),
        ({"args": "no.toml"}, "No such file"),
        ({"variables": "NO_SUCH_ONE"}, "agent.settings.variables='NO_SUCH_ONE'"),
        ({"folders": "no/folder"}, "there is no folder 'no/folder'"),
        ({"answer_timeout_s": 0}, "agent.settings.answer_timeout_s=0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(scripted, options, message):
    config = AgentConfig(loop="verifiers", settings=scripted("good") | options)
    with pytest.raises(ConfigError) as caught:
        check_agent(config, TOKENIZER)
    assert message in str(caught.value)


@pytest.mark.parametrize("variables", ["", "HF_TOKEN"])
def test_the_process_gets_few_variables_and_those_that_settings_name(
    variables, scripted, tmp_path, monkeypatch
):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "secret")
    settings, output = scripted("good", variables=variables), tmp_path / "told"
    program = Path(settings["interpreter"])
    program.write_text(program.read_text().replace("exec", f"env -0 > {output}\nexec"))
    [[sample]] = run(settings, [["one"]])
    assert sample.status == "finished"
    names = {line.partition("=")[0] for line in output.read_text().split("\0")}
    assert names & {"HF_TOKEN", "WANDB_API_KEY", "VIRTUAL_ENV"} == {*filter(None, [variables])}
    assert {"PATH", "PYTHONPATH", "NO_PROXY"} <= names


def test_args_may_be_the_file_that_verifiers_reads(scripted, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[env.taskset]\nsplit = "train"\n[env.agent.runtime]\ntype = "docker"\n')
    settings = VerifiersSettings(**scripted("good", args=str(file)))
    assert settings.parse_args() == {
        "taskset": {"split": "train"},
        "agent": {"runtime": {"type": "docker"}},
    }
