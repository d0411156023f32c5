"""Runs of the real loops over modelled ranks, with deaths, stops, joins and resumes by a seed.

Trainers, sampler, server pool, device sharing, weight sync, checkpoints and calls are those of a
job. Modelled are the ranks (mcore_rl/tools/simulate), the clock, and the store of samples, which
loses them with the node of a server. Models of ranks refuse what real ones cannot do: a server has
the states of `mcore_rl.inference.lifecycle`, and roles that share devices have them by turns.

A run that ends by a signal or a death goes on from its last checkpoint, in a new process.

Long because: models of ranks, of their devices and of the store check each other.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import OwnerDiedError

from mcore_rl.checkpoint.files import build_manifest, write_checkpoint_info
from mcore_rl.checkpoint.run_checkpoints import list_steps, read_checkpoint
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import are_colocated, get_staleness, resolve_for_device_type, validate_rl
from mcore_rl.config.schema import Layout, RLConfig, SampleLogConfig
from mcore_rl.controller import batch_ops, object_columns, simulated_group
from mcore_rl.controller.pending_call import WorkerError, gather_results
from mcore_rl.controller.process_cleanup import RunStopped, StopSignals
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.simulated_group import RankCall, SimulatedGroup
from mcore_rl.controller.worker_process import Failure, FailureKind, Reply
from mcore_rl.data.batch import IMAGES, NO_VERSION, Batch, Samples
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.data.sample import Sample
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.inference.lifecycle import TRANSITIONS, Call, State
from mcore_rl.inference.protocol import SamplingParams
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.rollout.buffer import GroupState
from mcore_rl.rollout.server_pool import ServerPool
from mcore_rl.rollout.weight_updater import connect
from mcore_rl.rollout.worker import RolloutWorker
from mcore_rl.tools.simulate.ranks import Ledger, SimulatedRanks, SimulatedServer
from mcore_rl.tools.simulate.times import ResponseLengths, StepTimes, Workload
from mcore_rl.tools.simulate.virtual_time import VirtualClock, VirtualExecutor, run_by_clock
from mcore_rl.trainers.base import RLTrainer, TrainerInputs, load_trainer
from mcore_rl.trainers.checkpointing import CheckpointManager
from mcore_rl.trainers.device_sharing import DeviceSharing
from mcore_rl.trainers.evaluation import build_test_sets
from mcore_rl.trainers.sample_log import SampleLog

MODES = ("sync", "one_step_off", "fully_async", "fully_async")
NUM_ROWS = 40  # of the data; every third has a picture
MAX_ATTEMPTS = 60
_LIMIT_S = 1e5  # of the clock
# What may end an attempt; a run goes on after all but the last two.
DEATHS = (
    r"rollout\.max_restarts=\d+\)$",
    r"^(actor|critic|reference|reward_model)\.\w+: rank 0 died",
    r"raised LostColumnsError",
    r"^a checkpoint needs the samples .* lost",
    r"^rollout-\d\.(prepare|start): rank 0 died",  # before the run
)
ENDS = (
    r"^reward\.on_error='drop': none of the \d+ responses of a step got a reward",
    r"^none of \d+ greedy responses got a reward",
    r"^step \d+: \d+ of \d+ groups have passed .*; allowed: .*if_short='train'$",
    r"^step \d+: algorithm\.filter\.group_filter='drop_uniform' has rejected .*if_short='train'$",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run, and how often its parts die.

    Attributes:
        server_death: Probability of a death in a call of a server.
        rank_death: The same of a training rank.
        node_death: Probability that a server that dies takes samples with it.
        stop: Probability of a signal in a step.
        change: Probability that other servers are wanted at a push.
        failed_groups: Share of groups of which every trajectory fails.
    """

    seed: int
    config: RLConfig
    server_death: float = 0.0
    rank_death: float = 0.0
    node_death: float = 0.0
    stop: float = 0.0
    change: float = 0.0
    failed_groups: float = 0.0


def draw_scenario(seed: int, folder: Path) -> Scenario:
    """Draw settings that are allowed, and probabilities."""
    rng, mode = np.random.default_rng([seed, 77]), MODES[seed % len(MODES)]
    while True:
        try:
            config = _draw_config(rng, folder, mode)
            break
        except ConfigError:  # settings that do not fit together
            continue
    can_fail = config.reward.on_error != "stop"
    return Scenario(
        seed,
        config,
        server_death=float(rng.choice([0.0, 0.02, 0.1])),
        rank_death=float(rng.choice([0.0, 0.0, 0.005])),
        node_death=float(rng.choice([0.0, 0.3])),
        stop=float(rng.choice([0.0, 0.3])),
        change=float(rng.choice([0.0, 0.4])),
        failed_groups=float(rng.choice([0.1, 0.6])) if can_fail else 0.0,
    )


def _draw_config(rng: np.random.Generator, folder: Path, mode: str) -> RLConfig:
    def choose(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    config = RLConfig(output_dir=str(folder))
    config.model.path = config.data.train_file = config.data.test_file = "modelled"
    config.seed = int(rng.integers(1000))
    trainer, algorithm = config.trainer, config.algorithm
    trainer.mode = mode
    trainer.num_steps, trainer.prompts_per_step = choose(3, 5, 6), choose(2, 3, 4)
    trainer.staleness = {"sync": None, "one_step_off": choose(0, 1, 1)}.get(
        trainer.mode, choose(0, 1, 2, 3)
    )
    trainer.save_every, trainer.eval_samples = choose(1, 2), 2
    if trainer.mode == "fully_async":
        trainer.asynchronous.max_groups = choose(0, 0, 2)
        trainer.asynchronous.oversampling = choose(0.0, 0.5) if trainer.staleness else 0.0
    algorithm.group_size, algorithm.num_mini_batches = 2, choose(1, 2, trainer.prompts_per_step)
    algorithm.advantage = choose("grpo", "grpo", "gae", "remax")
    if algorithm.advantage == "remax" and trainer.mode == "fully_async":
        algorithm.advantage = "grpo"
    algorithm.kl_coef = choose(0.0, 0.1)
    if choose(True, False):
        filters = algorithm.filter
        filters.group_filter, filters.max_rounds = "drop_uniform", choose(2, 6)
        filters.if_short = choose("train", "stop")
    if choose(True, False, False):
        algorithm.filter.replay.share, algorithm.filter.replay.max_age = 0.5, 5
        algorithm.correction.level = "token"
    config.data.curriculum.name = choose("", "", "learnability")
    config.reward.on_error = choose("stop", "zero", "drop")
    config.reward_model.model_path = choose("", "", "modelled")
    config.evaluation.before, config.evaluation.every = choose(True, False), choose(0, 1, 2)
    rollout = config.rollout
    rollout.num_servers, rollout.max_restarts = choose(1, 2, 3), choose(3, 1000)
    rollout.max_response_tokens, rollout.temperature = 64, 1.0
    rollout.load_format = choose("auto", "checkpoint", "dummy")
    for role in ("actor", "reference", "critic", "reward_model", "rollout"):
        setattr(config.placement, role, choose("shared", "own", "a"))
    if trainer.mode == "one_step_off":
        config.placement.rollout = "own"
    config.checkpoint.async_save = choose(True, False)
    if not are_colocated(config.placement, "actor", "rollout"):
        config.weight_sync.method = "disaggregated"
    validate_rl(config)
    return resolve_for_device_type(config, "cpu")


@dataclass(eq=False, slots=True)
class StoredObject:
    """An object of the store."""

    content: Any
    is_lost: bool = False


class ModelledStore:
    """Ray's object store, as far as batches by reference use it."""

    def __init__(self) -> None:
        self.made: list[StoredObject] | None = None  # collects what is stored

    def put(self, content: Any) -> StoredObject:
        stored = StoredObject(content)
        if self.made is not None:
            self.made.append(stored)
        return stored

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, StoredObject):
            return references.content
        if any(reference.is_lost for reference in references):
            raise OwnerDiedError("00", "", "")
        return [reference.content for reference in references]

    def nodes(self) -> list[Any]:
        return []

    def is_initialized(self) -> bool:
        return True


def _find_lost_rows(batches: Sequence[RemoteBatch]) -> list[np.ndarray[Any, Any]]:
    masks = []
    for batch in batches:
        mask = np.zeros(len(batch), bool)
        for column in batch.remote.values():
            lost = [n for n, ref in enumerate(column.locations.references) if ref.is_lost]
            mask |= np.isin(column.locations.objects, lost)
        masks.append(mask)
    return masks


@contextlib.contextmanager
def use_modelled_store() -> Iterator[ModelledStore]:
    """Replace Ray where the driver, and models of ranks, store and fetch columns."""
    store: Any = ModelledStore()
    replaced = [
        (object_columns, "ray", store),
        (simulated_group, "ray", store),
        (batch_ops, "ray", store),
        (batch_ops, "find_lost_rows", _find_lost_rows),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, substitute in replaced:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, substitute)
        yield store


class FuzzClock(VirtualClock):
    """A clock that ends: a loop that waits for ever is an error."""

    def schedule(self, delay_s: float, callback: Callable[[], None]) -> None:
        assert self.now_s < _LIMIT_S, "the run does not end"
        super().schedule(delay_s, callback)


@dataclass(slots=True)
class Occupancy:
    """The roles that have something on the devices of each pool."""

    config: RLConfig
    roles: list[str]
    models: dict[str, str] = field(default_factory=dict)  # "all" or "weights", by role
    servers: dict[int, FuzzServer] = field(default_factory=dict)  # alive, by number

    def list_others(self, role: str) -> list[str]:
        """Return the roles with something on the devices that a role shares."""
        placement = self.config.placement
        sharers = [r for r in self.models if r != role and are_colocated(placement, role, r)]
        if role == "rollout" or not are_colocated(placement, role, "rollout"):
            return sharers
        awake = [s for s in self.servers.values() if s.state not in (State.NEW, State.ASLEEP)]
        return sharers + [f"server {server.number}" for server in awake]


class FuzzServer(SimulatedServer):
    """A server that refuses calls that its state does not allow, and may die in any of them."""

    def __init__(self, fuzz: Attempt, number: int, restart: int) -> None:
        super().__init__(fuzz.clock, fuzz.workload, fuzz.ledger, number, 0)
        self.number, self.state, self._fuzz = number, State.NEW, fuzz
        self._restart_s = float(fuzz.rng.choice([0.0, 5.0, 60.0])) if restart else 0.0
        self._objects: list[StoredObject] = []
        self._images: dict[int, str] = {}  # by group, as the row of the data
        self._rows: dict[int, int] = {}
        fuzz.occupancy.servers[number] = self

    def _end(self, message: str) -> None:
        if self._is_dead:
            return
        if message and self._fuzz.draw(self._fuzz.scenario.node_death):
            for stored in self._objects:
                stored.is_lost = True
        super()._end(message)
        if self._fuzz.occupancy.servers.get(self.number) is self:
            del self._fuzz.occupancy.servers[self.number]

    def _take_call(self) -> None:
        if self._calls and self._current is None and not self._is_dead:
            fuzz = self._fuzz
            if fuzz.draw(fuzz.scenario.server_death / fuzz.number):
                fuzz.seen[f"server dies in {self._calls[0].method}"] += 1
                dying = [self]
                if fuzz.draw(0.3):  # a node, or a network, of all
                    dying = [*fuzz.occupancy.servers.values()]
                delay_s = 0.0 if fuzz.draw(0.5) else float(fuzz.rng.random())
                for server in dying:
                    self._clock.schedule(delay_s, server._die)
        super()._take_call()

    def _enter(self, call: Call) -> None:
        if (call, self.state) not in TRANSITIONS:
            raise AssertionError(f"server {self.number} cannot {call.value}: it {self.state.value}")
        self.state = TRANSITIONS[call, self.state]

    def _check_devices(self, what: str, allowed: Sequence[str] = ()) -> None:
        sharers = {*self._fuzz.occupancy.list_others("rollout")} - {*allowed}
        assert not sharers, f"server {self.number} {what} where {sorted(sharers)} are"

    def _check_no_requests(self, what: str) -> None:
        running = [group.group_id for group in self._groups.values() if group.num_left]
        assert not running, f"server {self.number} {what} with groups {running}"

    def _call_start(self, reads_weights: bool = True) -> None:
        self._check_devices("starts")
        self._enter(Call.START if reads_weights else Call.START_WITHOUT_WEIGHTS)
        super()._call_start(reads_weights)

    def _call_begin(self, prompts: Batch, sampling: SamplingParams, stream: str) -> None:
        self._enter(Call.GENERATE)
        ids = prompts.array("group_ids").tolist()
        assert not {(stream, i) for i in ids} & self._groups.keys()
        images = prompts.array(IMAGES) if IMAGES in prompts else [""] * len(ids)
        self._images |= dict(zip(ids, images, strict=True))
        self._rows |= dict(zip(ids, prompts.array("rows").tolist(), strict=True))
        super()._call_begin(prompts, sampling, stream)

    def _call_connect_weights(self, endpoint: Any, spec: Any, first_rank: int) -> None:
        self._enter(Call.CONNECT)
        self._spec = spec
        self._fuzz.connected.setdefault(id(spec), {})[first_rank] = self
        super()._call_connect_weights(endpoint, spec, first_rank)

    def _call_receive_weights(self, version: int, *options: bool) -> None:
        connected = self._fuzz.connected[id(self._spec)]
        assert sorted(connected) == [*range(self._spec.generation.dp)], "of the plan"
        if not any(options):
            self._check_no_requests("gets weights")
        self._enter(Call.UPDATE)
        super()._call_receive_weights(version, *options)

    def _call_sleep(self, keep: bool = False) -> None:
        if not keep:
            self._check_no_requests("sleeps")
        self._enter(Call.SLEEP)
        super()._call_sleep(keep)

    def _call_wake(self, tag: str) -> None:
        if tag == "weights":
            self._enter(Call.WAKE_WEIGHTS)
            holders = [r for r, part in self._fuzz.occupancy.models.items() if part == "weights"]
            self._check_devices("wakes", ["actor"] if "actor" in holders else [])
        else:
            self._enter(Call.WAKE_KV_CACHE)
            self._check_devices("wakes its cache")
        super()._call_wake(tag)

    def _make_samples(self, group: Any) -> Batch:
        batch, fuzz = super()._make_samples(group), self._fuzz
        num, rows = len(batch), self._rows[group.group_id]
        ids = batch.jagged("prompt_ids")
        batch = batch.with_columns(
            prompt_ids=ids.with_values(np.full(len(ids.values), rows)),
            statuses=np.full(num, "finished"),
        )
        rng = np.random.default_rng([fuzz.scenario.seed, 5, group.group_id + 2**32])
        if rng.random() < fuzz.scenario.failed_groups:
            failed = Sample(
                [rows], [], [], [], [], "abort", group.group_id, reward_error="no turn",
                status="failed",
            )  # fmt: skip
            made = Batch.collate([failed])
            batch = Batch(
                {
                    name: made[name] if name in made else np.full(1, NO_VERSION)
                    for name in batch.names
                }
            )
        if image := self._images[group.group_id]:
            batch = batch.with_columns(**{IMAGES: np.full(len(batch), image)})
        return batch

    def _answer(self, value: Any = None, after_s: float = 0.0) -> None:
        """Reply, and remember what the reply stores: it is on the node of this server."""
        store, delay_s = self._fuzz.store, after_s + self._workload.times.call_s
        self._clock.schedule(delay_s, lambda: setattr(store, "made", self._objects))
        super()._answer(value, after_s)
        self._clock.schedule(delay_s, lambda: setattr(store, "made", None))


class FuzzRanks(SimulatedRanks):
    """A rank of a model, which has a place on its devices, and weights that count updates."""

    def __init__(self, fuzz: Attempt, role: str) -> None:
        super().__init__(fuzz.clock, fuzz.workload, fuzz.ledger, Layout())
        self._fuzz, self._role = fuzz, role
        self.num_updates, self._pending = 0, ""

    def execute(self, calls: Sequence[RankCall]) -> None:
        for call in calls:
            if self._fuzz.draw(self._fuzz.scenario.rank_death / self._fuzz.number):
                self._fuzz.seen["rank dies"] += 1
                call.fail("it was killed")
                continue
            try:
                super().execute([call])
            except AssertionError:
                raise
            except Exception as error:  # noqa: BLE001 - as a worker replies
                kind = FailureKind.CONFIG if isinstance(error, ConfigError) else FailureKind.RAISED
                failure = Failure(kind, type(error).__name__, str(error), "")
                call.reply.set_result(Reply(failure=failure))

    def _run(self, call: RankCall) -> tuple[float, Any, Sequence[Batch]]:
        method, models = call.method, self._fuzz.occupancy.models
        if method in ("send_weights", "export"):
            models.setdefault(self._role, "weights")
            self._check_devices(method)
            return super()._run(call)
        if method == "to":
            (place,), parts = call.args, call.kwargs
            assert place == "host"
            if parts.get("model", True):
                models.pop(self._role, None)
            elif self._role in models:
                models[self._role] = "weights"
            return 0.0, None, ()
        if method not in ("apply", "open_weights", "connect_weights", "is_saved", "finish_save"):
            models[self._role] = "all"
            self._check_devices(method)
        return self._run_model(call)

    def _check_devices(self, what: str) -> None:
        sharers = self._fuzz.occupancy.list_others(self._role)
        if what == "send_weights":  # into servers beside it, which have room for weights
            sharers = [
                other
                for other in sharers
                if not other.startswith("server ")
                or self._fuzz.occupancy.servers[int(other.split()[1])].state
                not in (State.EMPTY, State.LOADED)
            ]
        assert not sharers, f"{self._role}.{what} where {sharers} are"

    def _run_model(self, call: RankCall) -> tuple[float, Any, Sequence[Batch]]:
        args, kwargs = call.fetch_arguments()
        inputs = [arg for arg in args if isinstance(arg, Batch)]
        match call.method:
            case "compute_values":
                ids = inputs[0].jagged("response_ids")
                values = ids.with_values(np.zeros(len(ids.values), np.float32))
                return 0.1, inputs[0].with_columns(values=values), inputs
            case "compute_scores":
                scores = np.zeros(len(inputs[0]), np.float32)
                return 0.1, inputs[0].with_columns(scores=scores), inputs
            case "update" | "update_with_scores":
                self._check_update(inputs[0], kwargs.get("sizes") or [len(inputs[0])])
                self.num_updates += 1
            case "save_checkpoint":
                self._pending = json.dumps([args[0], self.num_updates])
                return 0.1, "" if kwargs["in_background"] else self._write(), ()
            case "is_saved":
                return 0.0, not self._pending, ()
            case "finish_save":
                return 0.0, self._write(), ()
            case "load_checkpoint":
                self.num_updates = int((Path(args[0]) / "data").read_text())
                return 0.1, None, ()
        return super()._run(call)

    def _check_update(self, batch: Batch, sizes: Sequence[int]) -> None:
        assert sum(sizes) == len(batch) and min(sizes) > 0
        weights, start = [row.any() for row in batch.jagged("loss_weights")], 0
        for size in sizes:
            assert any(weights[start : start + size]), "a mini-batch has no token to train on"
            start += size
        if self._role == "actor":
            rows = [int(ids[0]) for ids in batch.jagged("prompt_ids")]
            images = batch.array(IMAGES).tolist() if IMAGES in batch else [""] * len(rows)
            assert images == [get_image(row) for row in rows]

    def _write(self) -> str:
        if not self._pending:
            return ""
        path, num = json.loads(self._pending)
        self._pending = ""
        Path(path).mkdir()
        (Path(path) / "data").write_text(str(num))
        write_checkpoint_info(Path(path), {}, build_manifest([Path(path) / "data"]))
        return ""


def get_image(row: int) -> str:
    """Return the picture of a row of the data."""
    return f"picture{row}" if row % 3 == 0 else ""


class CheckingLog(SampleLog):
    """Checks the samples of each step instead of writing them."""

    def __init__(self, fuzz: Attempt) -> None:
        silent = SampleLogConfig(every=0, num_shown=0, tokens=False)
        super().__init__(fuzz.folder, None, silent)  # type: ignore[arg-type]
        self._fuzz = fuzz

    def write_step(self, step: int, batch: Samples) -> None:
        fresh = np.ones(len(batch), bool)
        if "replayed" in batch:
            fresh = batch.array("replayed") == 0
        oldest, newest = (batch.array(f"{n}_versions")[fresh] for n in ("oldest", "newest"))
        chosen = oldest != NO_VERSION
        staleness = get_staleness(self._fuzz.scenario.config.trainer)
        assert (oldest[chosen] >= step - 1 - staleness).all(), f"step {step}: {oldest}"
        assert (newest[chosen] <= step - 1).all(), f"step {step}: {newest}"
        ids = np.unique(batch.array("group_ids")[fresh]).tolist()
        if "left_out" in batch:
            return
        earlier = {i for s, groups in self._fuzz.trained.items() if s < step for i in groups}
        assert not earlier & {*ids}, f"step {step} trains {sorted(earlier & {*ids})} again"
        self._fuzz.trained[step] = ids

    def write_evaluation(self, step: int, name: str, batch: Samples) -> None:
        for kind in ("oldest", "newest"):
            versions = batch.array(f"{kind}_versions")
            assert {*versions.tolist()} <= {step, NO_VERSION}, f"evaluation {step}: {versions}"
        self._fuzz.seen["evaluation"] += 1


class Attempt:
    """A process of a run: from its start, or its last checkpoint, to its end.

    Attributes:
        number: From 1. Parts die the less often the higher it is, so that a run ends.
        trained: Groups of each step so far, of earlier attempts, too.
    """

    def __init__(
        self, scenario: Scenario, folder: Path, number: int, trained: dict[int, list[int]]
    ) -> None:
        self.scenario, self.folder, self.number, self.trained = scenario, folder, number, trained
        self.rng = np.random.default_rng([scenario.seed, number])
        self.clock, self.ledger = FuzzClock(), Ledger()
        times = StepTimes(
            decode_s=0.05, decode_response_s=0.0, prefill_token_s=0.0, responses_per_server=8,
            reward_s=0.1, log_prob_s=0.1, log_prob_token_s=0.0, train_token_s=0.01,
            optimizer_s=0.5, weight_sync_s=0.5, call_s=0.01,
        )  # fmt: skip
        self.workload = Workload(
            times, ResponseLengths(15.0, 0.8), 1, tokens_per_entry=1, seed=scenario.seed
        )
        self.seen: Counter[str] = Counter()
        self.connected: dict[int, dict[int, FuzzServer]] = {}  # by spec and rank
        config = scenario.config
        self.plan = plan_run(config)
        self.roles = [role.name for role in self.plan]
        self.occupancy = Occupancy(config, self.roles)
        self.models: dict[str, FuzzRanks] = {}
        self.restarts: Counter[int] = Counter()
        self.stop = StopSignals()
        self.steps: list[int] = []

    def draw(self, probability: float) -> bool:
        """Return True with a probability."""
        return bool(self.rng.random() < probability)

    def run(self) -> RLTrainer:
        """Run to the end; raises what ends the run."""
        config = self.scenario.config
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(use_modelled_store())
            stack.enter_context(run_by_clock(self.clock))
            self.store = store
            devices = self._start_models(stack)
            trainer = self._build_trainer(devices)
            steps = list_steps(self.folder / "checkpoints")
            if not steps and config.rollout.load_format == "dummy":
                devices.offload_rollout()
                devices.update_weights(version=0)
            if not steps and trainer.evaluation.is_due(0):
                trainer.evaluation.run(0)
            if steps:
                path = self.folder / "checkpoints" / f"step_{steps[-1]:06}"
                trainer.checkpoints.restore(read_checkpoint(path))
                for step in [step for step in self.trained if step > steps[-1]]:
                    del self.trained[step]
            with self.stop.defer_to_step_end():
                trainer.run(self._report)
            for stream in ("train", "evaluation"):
                assert devices.servers.num_outstanding(stream) == 0
            return trainer

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        self.steps.append(step)
        if self.draw(self.scenario.stop / self.number):
            self.seen["stop"] += 1
            self.stop.requested = "SIGTERM"

    def _start_models(self, stack: contextlib.ExitStack) -> DeviceSharing:
        config, timeouts = self.scenario.config, self.scenario.config.timeouts

        def start_server(number: int) -> SimulatedGroup:
            server = FuzzServer(self, number, self.restarts[number])
            self.restarts[number] += 1
            return SimulatedGroup(
                f"rollout-{number}", RolloutWorker, Layout(), timeouts, server, self.clock.schedule
            )

        servers = stack.enter_context(
            ServerPool(
                start_server,
                config.rollout.num_servers,
                max_restarts=config.rollout.max_restarts,
                takes_turns=self.plan.servers_sleep,
                timeouts=timeouts,
                desired=self._draw_desired,
                load_format=config.rollout.load_format,  # type: ignore[arg-type]
            )
        )
        models: dict[str, Any] = {}
        for role in self.roles:
            ranks = self.models[role] = FuzzRanks(self, role)
            models[role] = SimulatedGroup(
                role, ModelWorker, Layout(), timeouts, ranks, self.clock.schedule
            )
            gather_results([models[role].submit(ModelWorker.initialize)])
            if self.plan.takes_turns(role):
                models[role].call(ModelWorker.to, "host")
        gather_results(servers.submit_prepare())
        gather_results(servers.submit_start())
        servers.mark_started()
        sync = connect(config, models["actor"], servers, 0)
        keeps = config.trainer.mode == "fully_async"
        return DeviceSharing(self.plan.pool_names, models, servers, sync, keeps)

    def _draw_desired(self) -> set[int]:
        num = self.scenario.config.rollout.num_servers
        if not self.draw(self.scenario.change):
            return {*range(num)}
        return {*self.rng.permutation(num)[: 1 + int(self.rng.integers(num))].tolist()}

    def _build_trainer(self, devices: DeviceSharing) -> RLTrainer:
        config = self.scenario.config

        def build_rows(first: int, num: int) -> PromptDataset:
            return PromptDataset(
                [
                    PromptRow([row], {}, images=(get_image(row),) if get_image(row) else ())
                    for row in range(first, first + num)
                ]
            )

        inputs = TrainerInputs(
            config=config,
            devices=devices,
            prompts=build_rows(0, NUM_ROWS),
            test_sets=build_test_sets({"held out": build_rows(NUM_ROWS, 2)}, 2),
            sample_log=CheckingLog(self),
            thread=VirtualExecutor(self.clock),
            record_evaluation=lambda *_: None,
            build_checkpoints=lambda states: CheckpointManager(
                config, self.folder, devices, states, dict, self.stop, 0
            ),
        )
        return load_trainer(config.trainer.mode)(inputs)


@dataclass(slots=True)
class FuzzResult:
    """The end of a run.

    Attributes:
        end: "" for its last step, else the error.
        seen: Number of events of each kind.
    """

    end: str
    attempts: int
    seen: Counter[str]
    trained: dict[int, list[int]]


def run_scenario(scenario: Scenario, folder: Path) -> FuzzResult:
    """Run until the last step, or an error after which no run goes on; check what holds."""
    trained: dict[int, list[int]] = {}
    seen: Counter[str] = Counter()
    for number in range(1, MAX_ATTEMPTS + 1):
        attempt = Attempt(scenario, folder, number, trained)
        if not list_steps(folder / "checkpoints"):
            trained.clear()
        try:
            trainer = attempt.run()
        except RunStopped:
            seen["stopped"] += 1
        except (WorkerError, ConfigError) as error:
            text = str(error)
            if any(re.search(pattern, text) for pattern in ENDS):
                return FuzzResult(text, number, seen + attempt.seen, trained)
            line = text.splitlines()[0]
            if not any(re.search(pattern, text, re.MULTILINE) for pattern in DEATHS):
                raise
            seen[re.sub(r"\d+", "N", line)] += 1
        else:
            seen += attempt.seen
            check_result(scenario, attempt, trainer)
            return FuzzResult("", number, seen, trained)
        seen += attempt.seen
    raise AssertionError(f"the run has not ended in {MAX_ATTEMPTS} attempts")


def check_result(scenario: Scenario, attempt: Attempt, trainer: RLTrainer) -> None:
    """Check that no group was lost, trained twice, or forgotten."""
    config, trained = scenario.config, attempt.trained
    ids = [i for step in sorted(trained) for i in trained[step]]
    assert len(ids) == len({*ids})
    policy = config.algorithm.filter
    is_complete = not policy.group_filter and scenario.failed_groups == 0
    generation: Any = getattr(trainer, "generation", None)
    if generation is not None and not generation._in_rounds:
        queue = generation.queue
        pending = {group.group_id for group in queue.groups(*GroupState)}
        pending -= {group.group_id for group in queue.groups(GroupState.TRAINED)}
        totals = queue.groups_total
        assert not pending & {*ids}
        assert totals["issued"] == totals["trained"] + totals["dropped"] + len(pending)
        drawn = {group for group, _ in trainer.prompts.state_dict()["drawn"]}
        assert drawn <= pending
    else:
        assert trainer.prompts.state_dict()["drawn"] == []
        if is_complete:
            assert sorted(ids) == ids == list(range(len(ids)))
    if is_complete and not policy.replay.share:
        per_step = config.trainer.prompts_per_step
        assert all(len(groups) == per_step for groups in trained.values())
        assert [*trained] == list(range(1, config.trainer.num_steps + 1))
        assert attempt.models["actor"].num_updates == config.trainer.num_steps
