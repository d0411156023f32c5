"""Ranks of a spawn: real engines on gloo, all cases of one world size in one go."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import inspect
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from mcore_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
)
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.observability.process import exempt_imports_from_gc, skip_gc_at_exit
from mcore_rl.parallel.rendezvous import RendezvousEndpoint, RendezvousServer
from mcore_rl.trainers.policy_loss import PolicyLoss

Result = dict[str, Any]  # tensors, numbers and containers of them: what torch.load takes safely
Job = Callable[[], Result]
Settings = Mapping[str, Any]  # of the engine
World = tuple[int, RendezvousEndpoint | None]  # how many ranks, and where they meet

LOSS = PolicyLoss(AlgorithmConfig(kl_coef=0.1))


class RankFunction:
    """A function of a test file whose calls run on ranks, as `spawn_on_ranks` decorates it."""

    def __init__(self, body: Callable[..., Result], size: int | None) -> None:
        self._body, self._size = body, size
        self._signature = inspect.signature(body)
        functools.update_wrapper(self, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_rank:
            return self._body(*args, **kwargs)
        key = pickle.dumps((self.__module__, self.__name__, args, kwargs))
        if key not in _RESULTS:
            given = self._signature.bind(*args, **kwargs).arguments
            size = self._size or given["layout"].world_size
            _RESULTS[key] = spawn(size, {"": partial(self, *args, **kwargs)})[""]
        return _RESULTS[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_from_module, (self.__module__, self.__name__)


def _load_from_module(module: str, name: str) -> RankFunction:
    function: RankFunction = getattr(importlib.import_module(module), name)
    return function


_RESULTS: dict[bytes, list[Result]] = {}  # by function and arguments
_is_rank = False  # this process


def spawn_on_ranks(size: int | None = None) -> Callable[[Callable[..., Result]], RankFunction]:
    """Decorate a function that ranks run: a call returns the results of all ranks, by rank.

        @spawn_on_ranks(2)
        def exported(path: Path, layout: Layout) -> Result:
            engine = start_engine(build_engine_spec(path, layout))
            return dict(engine.get_per_tensor_param())

    It runs on `size` ranks, or without it on as many as the argument `layout` has. A failed
    assertion in it fails the test. Tests of one file share results: a call with equal arguments
    does not run again, and no test may change a result. On a rank a call runs the function itself.
    """
    return lambda body: RankFunction(body, size)


def forget_results() -> None:
    """Drop the results of functions on ranks."""
    _RESULTS.clear()


def build_engine_spec(path: Path, layout: Layout, dtype: str = "float32") -> EngineSpec:
    settings = EngineConfig(
        layout=layout,
        optimizer=OptimizerConfig(lr=1e-3, beta2=0.98, weight_decay=0.01, warmup_steps=2),
        max_tokens_per_micro_batch=132,  # two micro-batches of the whole batch, and of half of it
        logprob_chunk_bytes=32 << 10,
    )
    model = ModelConfig(path=str(path), dtype=dtype)
    return EngineSpec(model, settings, seed=3, total_steps=6)


_STARTED: list[MegatronEngine] = []


def start_engine(spec: EngineSpec, kind: Callable[..., Any] = MegatronEngine) -> Any:
    """Start an engine, which is closed when the job ends."""
    engine = kind(spec)
    engine.initialize()
    _STARTED.append(engine)
    return engine


def start_engine_with(path: Path, layout: Layout, settings: Settings) -> MegatronEngine:
    """Start an engine with other settings than the usual ones, by dotted name."""
    spec = build_engine_spec(path, layout)
    for key, value in settings.items():
        config: Any = spec.engine
        *groups, leaf = key.split(".")
        for group in groups:
            config = getattr(config, group)
        setattr(config, leaf, value)
    engine: MegatronEngine = start_engine(spec)
    return engine


def list_rows(engine: MegatronEngine, batch: Batch) -> list[int]:
    """Return this rank's rows: an uneven share, so that ranks differ in samples and tokens."""
    dp, rank = engine.layout.dp, engine.mesh.get_coordinate(engine.world_rank).dp_rank
    cuts = np.linspace(0, len(batch), dp + 1).astype(int)
    cuts[1:-1] += 1
    return list(range(cuts[rank], cuts[rank + 1]))


def read_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return gradients by Hugging Face name: their layout is that of the weights."""
    parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros(()))
        by_name = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
        for parameter, weight in zip(parameters, before, strict=True):
            parameter.copy_(weight)
    return by_name


@spawn_on_ranks()
def run_parity(path: Path, layout: Layout, batch: Batch, dtype: str = "float32") -> Result:
    """Return scores, logits, the export, and two optimizer steps with the weights after them."""
    engine = start_engine(build_engine_spec(path, layout, dtype))
    rows = list_rows(engine, batch)
    share = batch.take(rows)
    scored = engine.infer_batch(share)
    return {
        "rows": rows,
        "log_probs": [torch.from_numpy(r.copy()) for r in scored.jagged("log_probs")],
        "entropy": [torch.from_numpy(r.copy()) for r in scored.jagged("entropy")],
        "logits": compute_full_logits(engine, share),
        "exported": dict(engine.get_per_tensor_param()),
        "steps": [engine.train_batch(share, LOSS) for _ in range(2)],
        "trained": dict(engine.get_per_tensor_param()),
    }


def compute_full_logits(engine: MegatronEngine, batch: Batch) -> torch.Tensor:
    """Return [response tokens, vocabulary] of the batch; the engine itself never makes them."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from mcore_rl.engine.megatron.heads import select_hidden_states
    from mcore_rl.engine.megatron.packing import build_packed_seq_params, read_pack_split
    from mcore_rl.engine.megatron.step import get_context_group
    from mcore_rl.engine.packing import pack_samples
    from mcore_rl.engine.steps import gather_column

    split, rows = read_pack_split(), list(range(len(batch)))
    [micro] = pack_samples(batch, [rows], split, engine.device)
    [model] = engine.chunks
    with torch.no_grad():
        params = build_packed_seq_params(micro)
        output = model(micro.input_ids, micro.position_ids, None, packed_seq_params=params)
        states = select_hidden_states(model.config, output, micro.hidden_rows)
        logits = states @ model.head_weight.t()
        group = parallel_state.get_tensor_model_parallel_group()
        all_logits = gather_from_tensor_model_parallel_region(logits, group=group)
    all_logits = all_logits[:, : engine.hf_config["vocab_size"]]
    logits = gather_column(micro, all_logits, get_context_group())
    lengths = batch.jagged("response_ids").lengths[micro.rows].tolist()
    by_row = dict(zip(micro.rows, logits.split(lengths), strict=True))
    return torch.cat([by_row[row] for row in sorted(by_row)])


@spawn_on_ranks()
def resume(path: Path, layout: Layout, batch: Batch, folder: Path) -> Result:
    """Take four steps in one engine, and the last two again in a new one from a checkpoint."""
    engine = start_engine(build_engine_spec(path, layout))
    share = batch.take(list_rows(engine, batch))
    steps = [engine.train_batch(share, LOSS) for _ in range(2)]
    engine.save_checkpoint(folder / "checkpoint")
    steps += [engine.train_batch(share, LOSS) for _ in range(2)]
    trained = dict(engine.get_per_tensor_param())
    other = start_engine(build_engine_spec(path, layout))
    other.load_checkpoint(folder / "checkpoint")
    resumed = [other.train_batch(share, LOSS) for _ in range(2)]
    return {
        "steps": steps,
        "resumed": resumed,
        "trained": trained,
        "trained_after_resume": dict(other.get_per_tensor_param()),
    }


def _run_all(jobs: Mapping[str, Job]) -> Result:
    results = {}
    for name, job in jobs.items():
        results[name] = job()
        while _STARTED:
            _STARTED.pop().close()
    return results


def _import_engine() -> None:
    """Import all that engines need before the first starts: the collector runs at each layout."""
    device.install(1)
    from mcore_rl.engine.megatron import (  # noqa: F401
        lora,
        model,
        optimizer,
        router_replay,
        step,
        training_state,
        weights,
    )


def _serve(rank: int, orders: Connection) -> None:
    """Run the jobs that this rank is sent, until one fails or the parent closes the connection."""
    global _is_rank
    _is_rank = True
    skip_gc_at_exit()
    with exempt_imports_from_gc():
        _import_engine()
    world: World | None = None
    while True:
        gc.collect()  # engines of the order before: what is left then counts as long-lived
        with exempt_imports_from_gc():  # an order imports what its jobs are made of
            order = orders.recv()
        if order is None:
            break
        next_world, jobs, file = order
        if next_world != world:
            _leave_world()
            _set_environment(rank, next_world)
            world = next_world
        try:
            torch.save(_run_all(jobs), file)
        except BaseException:
            orders.send(f"rank {rank}:\n{traceback.format_exc()}")
            raise
        orders.send(None)
    _leave_world()


def _set_environment(rank: int, world: World) -> None:
    size, endpoint = world
    assert endpoint is not None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= endpoint.to_environment()


def _leave_world() -> None:
    """Leave the groups of the last world, which other ranks leave too."""
    if torch.distributed.is_initialized():
        from mcore_rl.parallel.groups import leave_groups  # imports Megatron

        leave_groups()
        torch.distributed.destroy_process_group()


class _Rank:
    """A process that is the same rank of every world. It stays: starting one takes seconds."""

    def __init__(self, rank: int) -> None:
        context = mp.get_context("spawn")
        self.orders, connection = context.Pipe()
        self.process = context.Process(target=_serve, args=(rank, connection))
        self.process.start()
        connection.close()

    def receive_report(self) -> str | None:
        """Wait for the end of the jobs; return the error, None for none."""
        try:
            report: str | None = self.orders.recv()
        except EOFError:
            self.process.join(5)
            return f"a rank ended without a word, exit status {self.process.exitcode}"
        return report


_RANKS: list[_Rank] = []
_rendezvous: list[RendezvousServer] = []  # of the last world
_world: World = (0, None)


def spawn(size: int, jobs: Mapping[str, Job]) -> dict[str, list[Result]]:
    """Run every job on `size` ranks; return the results of each job by rank.

    Raises AssertionError with the report of the first rank that fails.
    """
    global _world
    while len(_RANKS) < size:
        _RANKS.append(_Rank(len(_RANKS)))
    if _world[0] != size:
        _close_rendezvous()
        _rendezvous.append(RendezvousServer("127.0.0.1"))
        _world = size, _rendezvous[0].endpoint
    try:
        by_rank = _collect_results(_RANKS[:size], jobs)
    except BaseException:  # the other ranks may wait for ever
        dismiss(kill=True)
        raise
    return {name: [results[name] for results in by_rank] for name in jobs}


def _collect_results(by_rank: Sequence[_Rank], jobs: Mapping[str, Job]) -> list[Result]:
    """Send jobs to ranks; return the results of all jobs, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.pt") for rank in range(len(by_rank))]
        for rank, file in zip(by_rank, files, strict=True):
            rank.orders.send((_world, dict(jobs), file))
        waiting = {rank.orders: rank for rank in by_rank}
        while waiting:
            for orders in wait(list(waiting)):
                assert isinstance(orders, Connection)
                if report := waiting.pop(orders).receive_report():
                    raise AssertionError(report)
        return [torch.load(file, weights_only=True) for file in files]


class Results(dict[str, list[Result]]):
    """Results of jobs by name, then by rank. A job runs when somebody first asks for its results.

    So what no selected test looks at does not run.
    """

    def __init__(
        self, jobs: Mapping[int, Mapping[str, Job]], needs: Mapping[str, str] | None = None
    ) -> None:
        """`jobs` by number of ranks; `needs` names the job whose files another one reads."""
        super().__init__()
        self._needs = needs or {}
        self._jobs = {name: (size, job) for size, of in jobs.items() for name, job in of.items()}

    def __missing__(self, name: str) -> list[Result]:
        if name in self._needs:
            _ = self[self._needs[name]]
        size, job = self._jobs[name]
        self |= spawn(size, {name: job})
        return self[name]


def dismiss(*, kill: bool = False) -> None:
    """End the processes."""
    global _world
    for rank in _RANKS:
        if kill:
            rank.process.kill()
        else:
            rank.orders.send(None)
    while _RANKS:
        _RANKS.pop().process.join()
    _close_rendezvous()
    _world = 0, None


def _close_rendezvous() -> None:
    while _rendezvous:
        _rendezvous.pop().close()


atexit.register(dismiss)  # or they would be waited for


def make_job(function: Callable[..., Result], *args: Any) -> Job:
    return partial(function, *args)
