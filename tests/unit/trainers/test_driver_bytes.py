"""Bytes of a step of the quickstart through the driver, with all of its own code, but Ray.

Two ranks of an actor and a server are in this process. What goes to them and what comes back is
pickled as Ray does it, and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle

from mcore_rl.agents.single_turn import Prompt, SingleTurnLoop
from mcore_rl.cli.compose import compose_config
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.controller import object_columns, worker_group
from mcore_rl.controller.pending_call import Timeout
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.controller.worker_process import MethodCall, WorkerProcess
from mcore_rl.data.datasets import PromptDataset, PromptRow, load_prompts
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.engine.base import ScoredStep
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.examples.tasks import last_digit
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.weight_updater import TransportSync
from mcore_rl.rollout.worker import (
    EventLoopThread,
    IdleTimer,
    RolloutWorker,
    RunningGroups,
    list_prompts,
)
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.sample_log import SampleLog
from tests.fakes import FakeServer, build_trainer
from tests.unit.controller.test_driver_work import Reference


class Ray:
    """Objects by reference, and actors that answer at once."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.num_bytes, self.calls = Counter[str](), Counter[str]()
        self.num_trained = 0  # samples, by both ranks, which share each

    def keep(self, value: Any) -> Reference:
        self.objects.append(value)
        return Reference(len(self.objects) - 1)

    def travels(self, method: str, value: Any) -> Any:
        """A copy of it."""
        pickled = cloudpickle.dumps(value)
        self.num_bytes[method] += len(pickled)
        return cloudpickle.loads(pickled)

    def put(self, value: Any) -> Reference:
        return self.keep(self.travels("put", value))

    def get(self, references: list[Reference], timeout: float | None = None) -> list[Any]:
        return [self.objects[reference.number] for reference in references]

    def is_initialized(self) -> bool:
        return False


class Reply(Reference):
    def __init__(self, number: int, value: Any) -> None:
        super().__init__(number)
        self._value = value

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._value)
        return future


class Actor:
    """A rank with this worker."""

    def __init__(self, ray: Ray, worker: Any) -> None:
        self._ray, self._host = ray, WorkerProcess.__new__(WorkerProcess)
        self._host._worker, self._host._fetch_timeout_s = worker, None
        self.call = SimpleNamespace(remote=self._call)
        remote = SimpleNamespace(remote=self._call_for_samples)
        self.call_for_samples = SimpleNamespace(options=lambda **_: remote)

    def _given(self, method: str, given: tuple[Any, ...]) -> list[Any]:
        self._ray.calls[method] += 1
        arguments = self._ray.travels(method, given)
        return [self._ray.get([v])[0] if isinstance(v, Reference) else v for v in arguments]

    def _reply(self, method: str, value: Any) -> Reply:
        value = self._ray.travels(method, value)
        return Reply(self._ray.keep(value).number, value)

    def _call(self, call: MethodCall, *stored: Any) -> Reply:
        method = call[0]
        return self._reply(method, self._host.call(*self._given(method, (call, *stored))))

    def _call_for_samples(self, call: MethodCall, *given: Any) -> list[Any]:
        method = call[0]
        reply, *columns = self._host.call_for_samples(*self._given(method, (call, *given)))
        return [self._reply(method, reply), *map(self._ray.keep, columns)]


class Engine:
    """Every token has a log-prob of -1 nat; an update reports as much as the quickstart's."""

    def __init__(self, ray: Ray) -> None:
        self._ray = ray

    def infer_batch(self, batch, **_):
        ids = batch.jagged("response_ids")
        column = ids.with_values(np.full(len(ids.values), -1.0, np.float32))
        return batch.with_columns(log_probs=column, entropy=column)

    def train_batch(self, batch, loss_function, *, temperature):
        lengths = batch.jagged("loss_weights").lengths
        assert lengths.tolist() == batch.jagged("advantages").lengths.tolist()
        self._ray.num_trained += len(batch)
        return {f"metric_{number}": 0.5 * number for number in range(12)}

    def train_batch_with_scores(self, batch, loss_function, *, temperature, bounds):
        assert "log_probs" not in batch and bounds["mean_logprob_gap"] == 1e-4
        scores = self.infer_batch(batch).select("log_probs", "entropy")
        metrics = self.train_batch(batch, loss_function, temperature=temperature)
        return ScoredStep(scores, {"mean_logprob_gap": 0.0}, metrics)

    def to(self, place, **_): ...

    def get_local_weights(self): ...


class Rank(ModelWorker):
    _replays_rollout = False

    def __init__(self, ray: Ray) -> None:
        self._engine, self._loss_function = Engine(ray), len
        self._transport = SimpleNamespace(send=lambda *_: None)
        self._is_offloaded = True


class Generator(FakeServer):
    """Each prompt is answered `apart_s` after the one before."""

    def __init__(self, apart_s: float) -> None:
        super().__init__()
        self._num_requests, self._apart_s = 0, apart_s

    async def submit(self, prompt_ids, sampling, *, request_id=""):
        self._num_requests += 1
        await asyncio.sleep(self._apart_s * self._num_requests)
        self._num_requests -= 1
        return [
            Completion([7] * length, [-1.0] * length, "stop", [self._version] * length)
            for length in range(12, 12 + sampling.n)
        ]

    async def update(self, version, **_):
        self._version = version

    async def nothing(self, *_, **__): ...

    sleep = wake = nothing


async def every_second_group_differs(samples, texts, max_tokens, where):
    for number, sample in enumerate(samples):
        sample.reward = float(sample.group_id % 2 == 0 and number % 3 == 0)
        sample.reward_parts = {"format": sample.reward}


class Server(RolloutWorker):
    def __init__(self, tokenizer: Any, apart_s: float) -> None:
        self._spec = SimpleNamespace(experts=None, timeout_s=60.0)
        self._server = Generator(apart_s)
        self._agent = SingleTurnLoop(self._server, tokenizer, every_second_group_differs)
        self._idle, self._wait = IdleTimer(), EventLoopThread(60.0).run
        self._streams = {"train": RunningGroups(self._idle)}


def group(ray: Ray, config: RLConfig, name: str, layout: Layout, make: Any) -> WorkerGroup:
    workers = [make() for _ in range(layout.world_size)]
    made = WorkerGroup.__new__(WorkerGroup)
    made._set_up(name, type(workers[0]), layout, config.timeouts, lambda: None)
    made._actors = [Actor(ray, worker) for worker in workers]
    return made


def pool_of(ray: Ray, config: RLConfig, make: Any, num_servers: int) -> ServerPool:
    def start(number: int) -> WorkerGroup:
        return group(ray, config, "rollout", Layout(), make)

    takes_turns = config.placement.rollout != "own"
    limits = {"max_restarts": 0, "takes_turns": takes_turns, "timeouts": config.timeouts}
    servers = ServerPool(start, num_servers, **limits)
    servers.mark_started()
    return servers


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(worker_group, "ray", made)
    # Of which the driver sees nothing.
    ranks = SimpleNamespace(put=made.keep, get=made.get, nodes=lambda: [])
    monkeypatch.setattr(object_columns, "ray", ranks)
    monkeypatch.setattr(object_columns, "_get_object_bytes", lambda: 128 << 20)
    return made


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return last_digit.prepare(tmp_path_factory.mktemp("task"), 0, 0.35)


def steps_of(
    ray: Ray, task: Any, folder: Path, *overrides: str, apart_s: float = 0.002
) -> dict[str, float]:
    """Metrics of the last step of the quickstart, of one where nothing else is said."""
    given = ["recipe=quickstart", "trainer.num_steps=1", f"output_dir={folder}", *overrides]
    config = compose_config(RLConfig, given)
    validate_rl(config)
    config = resolve_for_device_type(config, "cpu")
    tokenizer = load_tokenizer(task.model_dir)
    actor = group(ray, config, "actor", config.actor.layout, lambda: Rank(ray))

    servers = pool_of(ray, config, lambda: Server(tokenizer, apart_s), 1)
    sync = TransportSync(
        actor, servers, Timeout(60, "weight_sync.timeout_s"), config.rollout, config.weight_sync,
        _connected=servers.membership,
    )  # fmt: skip
    devices = DeviceSharing(plan_run(config).pool_names, {"actor": actor}, servers, sync)
    prompts = PromptDataset(load_prompts(task.train_file, config.data, tokenizer))
    last_metrics: dict[str, float] = {}
    with ThreadPoolExecutor(1) as thread:
        sample_log = SampleLog(folder, tokenizer, config.sample_log, actor)
        trainer = build_trainer(
            config, folder, devices, prompts=prompts, sample_log=sample_log, thread=thread
        )
        trainer.run(lambda step, metrics: last_metrics.update(metrics))
    return last_metrics


def test_a_step_of_the_quickstart_moves_few_bytes_a_sample_in_few_calls(ray, task, tmp_path):
    """256 of 512 samples are trained on, in 2 mini-batches: nobody learns of the others."""
    metrics = steps_of(ray, task, tmp_path)
    assert ray.num_trained == 2 * 256
    assert metrics["samples/passed"] == 0.5 and metrics["actor/metric_1"] == 0.5
    assert sum(ray.num_bytes.values()) / 256 <= 160, ray.num_bytes
    assert ray.calls == {
        "begin": 1, "collect": 1, "apply": 2, "compute_log_probs": 2, "update": 2,
        "sleep": 1, "wake": 2, "to": 2 * 2, "send_weights": 2, "receive_weights": 1,
    }  # fmt: skip
    assert metrics["driver/cpu_s"] > 0 and metrics["driver/cpu_share"] > 0


@pytest.mark.job
def test_more_mini_batches_take_no_other_call(ray, task, tmp_path):
    steps_of(ray, task, tmp_path, "algorithm.num_mini_batches=4")
    assert (ray.calls["update"], ray.calls["apply"]) == (2, 2)


@pytest.mark.job
@pytest.mark.parametrize(("axis", "num_trained"), [("tp", 2 * 256), ("dp", 256)])
def test_a_step_that_gives_its_own_log_probs_has_a_call_less_for_each_rank(
    ray, task, tmp_path, axis, num_trained
):
    """A third call of rank 0 makes the metrics of what the step gave."""
    layout = ["actor.layout.tp=1", "actor.layout.ep=1", f"actor.layout.{axis}=2"]
    metrics = steps_of(ray, task, tmp_path, "algorithm.num_mini_batches=1", *layout)
    assert ray.num_trained == num_trained
    assert sum(ray.num_bytes.values()) / 256 <= 176, ray.num_bytes
    assert ray.calls == {
        "begin": 1, "collect": 1, "apply": 3, "update_with_scores": 2,
        "sleep": 1, "wake": 2, "to": 2 * 2, "send_weights": 2, "receive_weights": 1,
    }  # fmt: skip
    assert metrics["actor/metric_1"] == 0.5 and metrics["actor/entropy"] == -1.0
    assert metrics["max_logprob_gap"] == 0.0 and metrics["mismatch/effective_sample_size"] == 1.0


@pytest.mark.job
def test_responses_that_advantages_compare_and_no_update_has_take_no_other_call(
    ray, task, tmp_path
):
    samples = ["keep_responses=3", "advantages_of=generated", "mask_truncated=true"]
    steps_of(ray, task, tmp_path, *(f"algorithm.filter.{setting}" for setting in samples))
    assert (ray.calls["update"], ray.calls["apply"]) == (2, 2)
    assert ray.num_trained == 2 * 256 * 3 / 8


@pytest.mark.job
def test_fully_asynchronous_steps_move_as_few_though_groups_come_one_by_one(ray, task, tmp_path):
    """Each step trains on 64 groups of 8, and the filter rejects as many: servers bunch them."""
    given = ["trainer.mode=fully_async", "trainer.staleness=2", "placement.rollout=own"]
    metrics = steps_of(ray, task, tmp_path, *given, "trainer.num_steps=2")
    assert metrics["queue/trained_total"] == 64 and metrics["queue/begun_total"] > 250
    assert sum(ray.num_bytes.values()) / (2 * 512) <= 256, ray.num_bytes
    assert ray.calls["collect"] < 64 and ray.calls["begin"] < 64, ray.calls  # of 256 groups


class RecordingWorker(RolloutWorker):
    """Records the prompts that it is to begin."""

    def __init__(self, recorded: list[Prompt]) -> None:
        self._recorded = recorded

    def begin(self, prompts, sampling, stream):
        self._recorded += list_prompts(prompts)


@pytest.mark.parametrize("num_tokens", [16, 300, 1000, 8000])
@pytest.mark.parametrize(("num_prompts", "at_once"), [(64, 64), (16, 1)])
def test_servers_get_prompts_of_any_length_for_few_bytes_a_sample(
    ray, num_tokens, num_prompts, at_once
):
    """To two servers, all at once or one by one; with a chat, and with a field as long."""
    rng, recorded = np.random.default_rng(0), list[Prompt]()
    rows = [
        PromptRow(
            rng.integers(0, 150_000, num_tokens).tolist(),
            {"answer": "é" * num_tokens},
            messages=[{"role": "user", "content": f"{row} " * num_tokens}],
        )
        for row in range(num_prompts)
    ]
    batches = PromptBatches(PromptDataset(rows), at_once, 0)
    servers = pool_of(ray, RLConfig(), lambda: RecordingWorker(recorded), 2)
    for _ in range(num_prompts // at_once):
        servers.begin(next(batches), SamplingParams(n=8, max_tokens=9))
    assert ray.num_bytes["begin"] / (num_prompts * 8) <= 256
    assert ray.calls["begin"] == max(num_prompts // at_once, 2)
    assert {prompt.group_id for prompt in recorded} == {*range(num_prompts)}
    for prompt in recorded:
        row = rows[prompt.row]
        expected = row.prompt_ids, row.fields, row.messages
        assert (prompt.content, prompt.fields, prompt.messages) == expected
