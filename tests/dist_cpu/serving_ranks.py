"""vLLM engines for several models after another in the same processes, one rank in each.

Starting processes for each of the models and layouts of a test would take many minutes. Here every
rank has an engine around its own worker, and all engines decide alike, as under vLLM's
`external_launcher`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from live_bytes import LiveBytes

WAIT_S = 120.0
IMPORTED = ["vllm", "vllm.v1.worker.cpu_worker", "mcore_rl.inference.vllm.worker"]
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 30]]


@dataclass(frozen=True)
class Order:
    """Load `path`, take two versions of each sync, and compare with what `exported` loads as."""

    path: Path
    exported: Path
    syncs: dict[str, tuple[str, ...]]  # the servers that take part, which may be of other worlds
    servers: dict[str, bool]  # those of this world by name: whether ranks share experts
    is_measured: bool = False  # then the memory of each update is told, and nothing is compared
    dtype: str = "float32"
    num_drafts: int = 0  # tokens that servers draft at a time


Tokens = list[list[int]]  # by prompt
State = dict[str, torch.Tensor]  # all that a model computes with


@dataclass(frozen=True)
class Answers:
    """Samples and scores of a server."""

    before: Tokens  # with the weights it started with
    after: Tokens  # with those of the last version of a sync
    exported: Tokens  # as a server that was started with the export of that version


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of an update, and of the largest module's parameters as they arrive."""

    model: str
    peak: int
    module: int


@dataclass(frozen=True)
class Report:
    """Results of one rank."""

    complaints: list[str] = field(default_factory=list)  # there should be none
    answers: dict[str, Answers] = field(default_factory=dict)  # by "sync-server"
    memory: list[Memory] = field(default_factory=list)


def serve(
    rank: int,
    world: int,
    name: str,
    folder: Path,
    orders: Sequence[Order],
    pipe: Connection,
) -> None:
    """The body of a process: sends a Report. `name` is that of its server."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)  # sockets that outlive a killed process
    report = Report()
    try:
        from mcore_rl.inference.vllm.worker import ServerName

        server = pickle.loads(pickle.dumps(ServerName(name)))  # which makes the process a worker's
        for order in orders:
            _Rank(rank, world, server, folder, report).run(order)
    except BaseException:  # noqa: BLE001 (told to the test)
        report.complaints.append(f"vLLM rank {rank} of {world}: {traceback.format_exc()}")
    pipe.send(report)


_SERVERS: list[Any] = []  # one that ends takes the process groups of all along


@dataclass(frozen=True)
class _Rank:
    rank: int
    world: int
    name: Any  # ServerName
    folder: Path
    report: Report

    def run(self, order: Order) -> None:
        most_begun = _watch_modules()
        servers = {n: self._server(order, order.path, ep) for n, ep in order.servers.items()}
        before = {name: _generated(server) for name, server in servers.items()}
        after: dict[str, tuple[State, Tokens]] = {}
        for sync, takers in order.syncs.items():
            taking = {name: server for name, server in servers.items() if name in takers}
            for name, server in taking.items():
                self._join(sync, name, _worker(server))
            for version in (1, 2):
                for name, server in taking.items():
                    self._update(order, sync, name, _worker(server), version)
            for name, server in taking.items():
                state = {n: tensor.clone() for n, tensor in _tensors(_worker(server)).items()}
                after[f"{sync}-{name}"] = state, _generated(server)
        if set(most_begun) != {1}:
            self.report.complaints.append(f"modules: {order.path.name}, {most_begun} at a time")
        for name, ep in () if order.is_measured else order.servers.items():
            _wait_for(order.exported)
            exported = self._server(order, order.exported, ep)
            expected, tokens = _tensors(_worker(exported)), _generated(exported)
            for key in (f"{sync}-{name}" for sync, of in order.syncs.items() if name in of):
                state, generated = after[key]
                lines = _differences(state, expected)
                self.report.complaints.extend(f"{key}, rank {self.rank}: {n}" for n in lines)
                self.report.answers[key] = Answers(before[name], generated, tokens)

    def _join(self, sync: str, name: str, worker: Any) -> None:
        fields, spec = _meeting(self.folder / f"{sync}-{name}.json")
        info = {"endpoint": fields, "spec": spec, "first_rank": 0}
        if error := worker.attempt("init_weight_transfer_engine", {"init_info": info}):
            self.report.complaints.append(f"{sync}-{name}, joining, rank {self.rank}: {error}")

    def _update(self, order: Order, sync: str, name: str, worker: Any, version: int) -> None:
        """The second version after a sleep: where memory was freed, nothing of before is left."""
        sleeps = version == 2 and not order.is_measured
        if sleeps:
            worker.sleep(level=2)
            if (asleep_bytes := worker.measure_memory()) != (0, 0):
                self.report.complaints.append(f"{sync}-{name}: asleep it has {asleep_bytes}")
            worker.wake_up(["weights"])
        with LiveBytes() if order.is_measured else contextlib.nullcontext() as memory:
            for method, arguments in (
                ("start_weight_update", {}),
                ("update_weights", {"update_info": {"version": version}}),
                ("finish_weight_update", {}),
            ):
                if error := worker.attempt(method, arguments):
                    about = f"{sync}-{name}, version {version}, rank {self.rank}"
                    self.report.complaints.append(f"{about}: {error}")
        if sleeps:
            worker.wake_up(["kv_cache"])
        if memory is not None:
            module = _largest_module_bytes(worker)
            self.report.memory.append(Memory(order.path.name, memory.peak, module))

    def _server(self, order: Order, path: Path, ep: bool) -> Any:
        from mcore_rl.config.schema import RolloutConfig
        from mcore_rl.inference.vllm import engine_arguments

        os.environ |= engine_arguments.QUIET_ENVIRONMENT
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.distributed.parallel_state import destroy_model_parallel
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        from mcore_rl.inference.vllm import drafts as vllm_drafts
        from mcore_rl.inference.vllm import worker as vllm_worker
        from mcore_rl.inference.vllm.images import RequestImages

        meeting = (f"file://{self.folder}/{self.name}", self.rank, self.rank)

        class OneRank(ExecutorWithExternalLauncher):
            def _distributed_args(self) -> tuple[str, int, int]:
                return meeting

        rollout = RolloutConfig(tp=self.world, ep=ep)
        arguments = vllm_worker.build_device_arguments(rollout, self.name, 64, eager=True)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        destroy_model_parallel()  # a model without experts has one group less
        server = LLM(
            model=str(path),
            dtype=order.dtype,
            max_model_len=64,
            kv_cache_memory_bytes=8 << 20 if order.dtype == "bfloat16" else 1 << 20,
            tensor_parallel_size=self.world,
            enable_expert_parallel=ep,
            distributed_executor_backend=OneRank,
            skip_tokenizer_init=True,
            weight_transfer_config=WeightTransferConfig(backend=vllm_worker.BACKEND),
            **vllm_worker.build_cache_arguments(str(path)),
            **RequestImages(str(path), "").build_arguments(1),
            **vllm_drafts.build_draft_arguments(order.num_drafts, arguments),
            **arguments,
        )
        _SERVERS.append(server)
        return server


def _worker(server: Any) -> Any:
    return server.llm_engine.model_executor.driver_worker.worker


def _generated(server: Any) -> Tokens:
    """The most likely continuations, of weights that may have changed."""
    from vllm import SamplingParams

    server.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    parameters = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = server.generate(prompts, parameters, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in outputs]


def _largest_module_bytes(worker: Any) -> int:
    sizes: dict[str, int] = {}
    from mcore_rl.inference.vllm.weights import read_worker_layout

    layout = read_worker_layout(worker.model_runner.get_model())
    for name, (shape, dtype) in layout.parameters.items():
        module = name.rpartition(".")[0]
        itemsize = getattr(torch, dtype).itemsize
        sizes[module] = sizes.get(module, 0) + math.prod(shape) * itemsize
    return max(sizes.values())


def _watch_modules() -> list[int]:
    """Filled with how many modules have begun and are not complete, each time that one begins."""
    from mcore_rl.inference.vllm import weights as vllm_weights

    begun: set[Any] = set()
    num_open: list[int] = []
    materialize, process = vllm_weights.materialize_layer, vllm_weights._layerwise_process

    def begin(layer: Any, info: Any) -> None:
        begun.add(layer)
        num_open.append(len(begun))
        materialize(layer, info)

    def finish(layer: Any, info: Any) -> None:
        process(layer, info)
        begun.discard(layer)

    vllm_weights.materialize_layer, vllm_weights._layerwise_process = begin, finish
    return num_open


def _differences(actual: State, expected: State) -> list[str]:
    if actual.keys() != expected.keys():
        return [f"{sorted(actual.keys() ^ expected.keys())} only on one side"]
    return [name for name, tensor in expected.items() if not _same_bits(actual[name], tensor)]


def _tensors(worker: Any) -> State:
    """Return all that the model computes with, also W_UV and W_UK_T, which MLA derives."""
    from mcore_rl.inference.vllm.drafts import join_models

    model = join_models(worker.model_runner)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def _meeting(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    _wait_for(file)
    endpoint, spec = json.loads(file.read_text())
    return endpoint, spec


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.01)
