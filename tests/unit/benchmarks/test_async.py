"""The benchmark of training loops: what it counts, and how much faster asynchronous ones are."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from mcore_rl.benchmarks.async_loops import SETUPS, WorkloadSettings, _average_used, run_setup
from mcore_rl.benchmarks.async_model import Clock, Servers, Workload
from mcore_rl.cli import main as cli
from mcore_rl.cli.bench import main
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.trainers.base import RLTrainer
from tests.pages import of_kind

LOAD = Workload(median=100, sigma=0.0, slots=2, tokens_per_s=10.0, push_s=3.0)  # 10 s each


def make_prompts(*groups: int) -> Batch:
    return Batch(
        {"group_ids": np.array(groups), "prompt_ids": Jagged.pack([[1]] * len(groups), np.int64)}
    )


def test_the_command_of_the_page(monkeypatch, capsys, tmp_path):
    """Faster than the synchronous loop by as much as is claimed; bounds of age hold."""
    [command] = of_kind("bench async")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*command.text.split(), "--steps", "6"])
    assert cli.main() == 0
    report = json.loads(capsys.readouterr().out)
    over = report["over sync"]
    assert over["one step off"] >= 1.25 and over["fully async"] >= 1.8
    assert report["over sync, by turns"]["fully async, by turns"] >= 1.6
    ages = {name: run["max_age"] for name, run in report["setups"].items()}
    assert ages["sync"] == ages["sync, by turns"] == 0 and ages["one step off"] == 1
    assert 0 < ages["fully async"] <= 2 and 0 < ages["fully async, by turns"] <= 2
    assert all(run["abandoned"] == 0 for run in report["setups"].values())
    picture = ElementTree.parse(tmp_path / "async.svg").getroot()
    texts = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert set(SETUPS) <= texts


def test_a_step_of_sync_takes_what_its_parts_take():
    """Compare with the longest response, log-probs and an update of all tokens, and a push."""
    load = Workload(median=1000, sigma=0.0, slots=512, push_s=7.0)
    run = run_setup(SETUPS["sync"], WorkloadSettings(num_steps=2, load=load))
    tokens = 512 * 32 * 32  # a token of a batch stands for 32: 1000 of them are 31.25, and one
    assert run.step_s == pytest.approx(1000 / 50 + tokens / 30_000 + tokens / 10_000 + 7)
    assert run.trainer_waits_s == pytest.approx(20)
    assert run.servers_idle_s == pytest.approx(tokens / 30_000 + tokens / 10_000)
    assert run.slots_used == pytest.approx(20 / run.step_s)


def test_responses_wait_for_a_slot_and_stand_still_for_a_push_and_a_sleep():
    clock = Clock()
    servers = Servers(clock, LOAD, slots=2)
    servers.begin(make_prompts(0, 1, 2), SamplingParams(n=1, max_tokens=100), "train")
    clock.now_s = 4.0
    servers.push(1)  # to 7 s
    [batch] = servers.collect("train", 100.0)
    assert clock.now_s == 13.0 and batch.array("group_ids").tolist() == [0, 1]
    servers.sleep(keep=True)
    clock.now_s = 50.0
    servers.wake("kv_cache")
    assert servers.collect("train", 5.0) == [] and clock.now_s == 55.0
    [batch] = servers.collect("train", 100.0)
    assert clock.now_s == pytest.approx(60.0) and batch.array("group_ids").tolist() == [2]


@pytest.mark.parametrize("sleeps", [False, True])
def test_servers_idle_without_a_response_a_push_and_sleep(sleeps):
    """Take a response of 10 s with a push of 3 in its middle; then nothing, and a push."""
    clock = Clock()
    servers = Servers(clock, LOAD, slots=2)
    clock.now_s = 2.0
    servers.begin(make_prompts(0), SamplingParams(n=1, max_tokens=100), "train")
    clock.now_s = 6.0
    servers.push(1)
    servers.collect("train", 100.0)
    assert clock.now_s == 15.0
    clock.now_s = 20.0
    assert servers.idle_s() == pytest.approx([2 + 5])
    if sleeps:
        servers.sleep(keep=True)
        clock.now_s += 30.0
        assert servers.idle_s() == pytest.approx([0])
    servers.push(2)
    servers.wake("kv_cache")
    clock.now_s += 4.0
    assert servers.idle_s() == pytest.approx([4])
    assert servers.all_idle_s == pytest.approx(2 + 5 + 4)


@pytest.mark.parametrize("mode", ["fully async", "one step off"])
def test_servers_idle_while_the_last_step_trains_whatever_a_push_takes(monkeypatch, mode):
    """Run batches of 100 s each, without a pause between them; log-probs and an update take less.

    With fully async the first push comes in the middle of the second batch, else after it. While
    that is trained on, no server has anything to do. The metric of the loop says so of each step.
    """
    idle_s, real = [], RLTrainer.run

    def run(self, report):
        def record(step, metrics):
            idle_s.append(metrics["time/servers_idle_s"])
            report(step, metrics)

        real(self, record)

    monkeypatch.setattr(RLTrainer, "run", run)
    load = Workload(median=1000, sigma=0.0, slots=512, tokens_per_s=10.0, push_s=7.0)
    run = run_setup(SETUPS[mode], WorkloadSettings(num_steps=2, load=load))
    trained_s = 512 * 32 * 32 * (1 / 30_000 + 1 / 10_000)
    assert trained_s < 100
    assert run.step_s == pytest.approx((2 * 100 + 7 + trained_s + 7) / 2)
    assert idle_s == pytest.approx([0, trained_s])
    assert run.servers_idle_s == pytest.approx(trained_s / 2)


def test_tokens_have_the_version_at_their_time():
    clock, load = Clock(), Workload(median=320, sigma=0.0, tokens_per_s=32.0, push_s=0.0)
    servers = Servers(clock, load, slots=1)
    servers.begin(make_prompts(7), SamplingParams(n=1, max_tokens=100), "train")
    clock.now_s = 4.5  # of the 10 s, a token of the batch each second
    servers.push(1)
    [batch] = servers.collect("train", 100.0)
    assert batch.jagged("weight_versions")[0].tolist() == [0] * 5 + [1] * 6


def test_the_picture_has_means_of_slots():
    edges = np.array([0.0, 10.0, 20.0])
    assert _average_used([(0.0, 2), (5.0, 4), (15.0, 0), (20.0, 0)], edges).tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "0"], "--steps=0"), (["--staleness", "-1"], "--staleness=-1")],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(["async", *arguments])
