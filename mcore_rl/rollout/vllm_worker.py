"""Settings of a lane, patches of vLLM, the watchdog.

The server process takes its settings from here. Engine and worker processes enter through
`ServerName` as they are spawned, or through `owned_processes` as they are forked; workers get
`WorkerExtension` (vLLM's `worker_extension_cls`) besides.
Upstream lines are those of vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import select
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils import system_utils
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.observability.garbage import leave_garbage_at_exit
from mcore_rl.observability.stacks import answer_signals
from mcore_rl.parallel.gloo import guard_gloo
from mcore_rl.parallel.rendezvous import interface_of, use_interface_towards
from mcore_rl.rollout import vllm_float8, vllm_sleep, vllm_weights
from mcore_rl.rollout.vllm_nodes import meet_at_our_rendezvous
from mcore_rl.rollout.vllm_trace import TraceTaker
from mcore_rl.rollout.vllm_weights import make_reloadable, repack_output_heads

BACKEND = "mcore_rl"  # the name of our engine in vLLM's registry of weight transfer engines
START_METHOD = {"cpu": "fork", "cuda": "spawn"}  # of engine and worker processes
_LOOK_S = 1.0  # how often a call looks whether its engine lives


class ServerName(str):
    """A server as `<pid>-<random>`: its death ends its processes, its name is on their memory.

    It travels in vLLM's config, which each process that vLLM spawns unpickles first of all: that is
    where the process is made ours, before it can hang or allocate anything. It is the whole of
    `additional_config`, which vLLM's key of compiled graphs asks for its hash (config/vllm.py:549):
    servers of different names share what one of them compiled.
    """

    @classmethod
    def new(cls) -> ServerName:
        return cls(f"{os.getpid()}-{secrets.token_hex(4)}")

    @property
    def pid(self) -> int:
        return int(self.partition("-")[0])

    def compute_hash(self) -> str:
        return "mcore_rl"

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter_process, (str(self),)


class _Fork:
    """While it lives, multiprocessing has each process that it forks enter through it."""

    def __init__(self, server: ServerName) -> None:
        self._server = server
        register_after_fork(self, _Fork.enter)

    def enter(self) -> None:
        _enter_process(str(self._server))
        _take_place()


@contextlib.contextmanager
def owned_processes(server: ServerName) -> Iterator[None]:
    """Inside, vLLM forks its processes on the CPU lane, and each becomes ours before all else.

    A forked process need not import vLLM, which takes longer than all else that it does. CUDA must
    not be forked: on the GPU lane processes are spawned. Enter in a thread that has not computed: a
    process forked by one that has, in parallel, hangs when it does so too, for libgomp keeps the
    names of helpers that a fork does not copy.
    """
    # vLLM itself spawns on the CPU (platforms/cpu.py:413), and in an actor of Ray, that its
    # processes may find Ray (utils/system_utils.py:130): ours have no business there.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = START_METHOD[current_platform.device_type]
    system_utils.is_in_ray_actor = lambda: False
    _end_calls_with_their_engine()
    fork = _Fork(server)  # multiprocessing keeps no reference
    try:
        yield
    finally:
        del fork


def lane_arguments(
    config: RolloutConfig, name: ServerName, max_model_tokens: int, eager: bool
) -> dict[str, Any]:
    """The engine arguments of this lane and of `WorkerExtension`. `eager`: compile no graphs.

    Also sets the environment that engine and worker processes inherit; it stays, for a server owns
    its process.
    """
    # Workers are on this machine and their rendezvous is a file
    # (v1/executor/multiproc_executor.py:143), but their gloo groups would listen where the host
    # name points (distributed/parallel_state.py:509).
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1"))
    # NCCL reads its variable once, so the group of the weights, which may be over several machines,
    # has the interface of the workers' own groups.
    if host := os.environ.get("RENDEZVOUS_HOST"):
        use_interface_towards(host, int(os.environ["RENDEZVOUS_PORT"]))
    guard_gloo()  # in the server's process, which may be the worker's; others enter by _correct
    arguments: dict[str, Any] = {
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
        "enforce_eager": eager,
        "additional_config": name,
        # None: as `vllm serve` would (engine/arg_utils.py:2894).
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    if not current_platform.is_cpu():
        # What a server takes is rollout.kv_cache_bytes and the model. This share of the GPU is only
        # asked whether it is free (v1/worker/utils.py:716), which of a shared one it is not.
        # Experts by Triton, vLLM's own choice on Hopper. On Blackwell that is FlashInfer's TRTLLM
        # (fused_moe/oracle/unquantized.py:73), which routes inside its kernel, where no trace sees
        # it, and reorders and pads weights that a trainer writes again each step (line 462).
        return arguments | {"gpu_memory_utilization": 0.01, "moe_backend": "triton"}
    # Scheduler and worker in one process: half the start-up and 8 times the speed of two.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if config.tp == 1 else "1"
    # Else a process imports vLLM again, for each architecture that is new to this machine
    # (model_executor/models/registry.py:1079).
    registry._run_in_subprocess = _inspect_here
    # Compiling a few small functions takes longer than a small run gains by it, and a C++ compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if config.cores or config.tp > 1:
        num_workers = config.tp // config.nodes_per_server
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.cores or _cores_shared_out(num_workers)
    if config.cores and config.tp == 1:  # vLLM itself looks at them for workers of their own only
        os.environ["OMP_PLACES"] = _place(parse_id_list(config.cores))
    from mcore_rl.rollout import vllm_cpu_ops  # here, for the processes that are forked from this

    return arguments | {
        "enforce_eager": True,
        "kernel_config": vllm_cpu_ops.PRIORITY,
        # On a CPU with AMX, MLA would run on kernels for bfloat16 and for sizes that 32 divides
        # (platforms/cpu.py:156); other attention has a single backend there, whatever is asked.
        "attention_backend": "CPU_MLA",
        # Of tokens that prompts share only whole blocks are computed once. vLLM's own 128 tokens
        # are more than many a prompt has; latent attention has 16, whatever is asked.
        "block_size": 32,
        # A seeded request with a chunked prompt rewinds its generator, which one on the CPU
        # refuses: the engine dies (v1/worker/gpu_model_runner.py:3502).
        "enable_chunked_prefill": False,
        "max_num_seqs": config.max_num_seqs or 256,
        "max_num_batched_tokens": config.max_num_batched_tokens or max(8192, max_model_tokens),
    }


def sleep_arguments(can_sleep: bool) -> dict[str, Any]:
    """On the CPU lane every worker can (rollout/vllm_sleep.py)."""
    return {"enable_sleep_mode": can_sleep and not current_platform.is_cpu()}


def _inspect_here(inspect: Callable[[], Any]) -> Any:
    """What vLLM asks of a model's class, which must not initialise CUDA where there is any."""
    return inspect()


def check_heads(model: ModelConfig) -> None:
    """Raises ConfigError for attention heads that the CPU lane's kernels were not compiled for.

    vLLM notices at the first request, and the engine dies of it.
    """
    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    size, name = model.get_head_size(), "head_dim"
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.use_mla:
        sizes, name = CPUMLABackend.get_supported_head_sizes(), "kv_lora_rank + qk_rope_head_dim"
    if size not in sizes:
        raise ConfigError(
            f"{model.model}: {name} is {size}; vLLM on a CPU takes {', '.join(map(str, sizes))}"
        )


def _cores_shared_out(num_workers: int) -> str:
    """This process's cores, split among the workers: vLLM itself wants a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[worker::num_workers] or cores for worker in range(num_workers)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _place(cores: list[int]) -> str:
    return f"{{{','.join(map(str, cores))}}}"


def _take_place() -> None:
    """Runs on the cores that OMP_PLACES names as vLLM starts a worker, on a thread each.

    (utils/ompmultiprocessing.py:81.) A spawned worker reads that as it loads OpenMP, a forked one
    has loaded it.
    """
    place = os.environ.get("OMP_PLACES", "")
    if place.startswith("{"):
        cores = [int(core) for core in place.strip("{}").split(",")]
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


@functools.cache
def _end_calls_with_their_engine() -> None:
    """A call of all but `generate` waits for ever when the engine dies of it, or meanwhile.

    (v1/engine/core_client.py:1291: nobody fails its future.) It raises EngineDeadError instead.
    """
    upstream = AsyncMPClient._call_utility_async

    async def call(client: AsyncMPClient, *args: Any, **kwargs: Any) -> Any:
        answer = asyncio.ensure_future(upstream(client, *args, **kwargs))
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
                if client.resources.engine_dead:
                    raise EngineDeadError
            return answer.result()
        finally:
            answer.cancel()

    AsyncMPClient._call_utility_async = call


def remove_shared_memory(server: ServerName) -> None:
    """Unlink what the workers of a dead server left in /dev/shm (their C++ never unlinks it)."""
    for segment in Path("/dev/shm").glob(f"*mcore_rl_{server}*"):
        segment.unlink(missing_ok=True)


def _remove_mapped_memory() -> None:
    """Unlink this process's message queues and semaphores.

    Python's resource tracker would, unless it was killed with the server, as Ray kills an actor's
    children.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    # By inode: a semaphore is mapped under a temporary name before it gets its own.
    mine = {int(line.split(None, 5)[4]) for line in maps if " /dev/shm/" in line}
    for pattern in ("psm_*", "sem.mp-*"):
        for file in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_ino in mine:
                    file.unlink()


def _remove_rendezvous() -> None:
    """Unlink the file in which this worker's process group met (utils/network_utils.py:154)."""
    name = os.environ.get("VLLM_DIST_IDENT", "")  # set on CPU only (v1/worker/cpu_worker.py:148)
    if name.startswith("vllm_dist_"):
        Path(tempfile.gettempdir(), name).unlink(missing_ok=True)


class WorkerExtension(TraceTaker):
    """All that `collective_rpc` may call on a worker besides vLLM's own."""

    vllm_config: Any
    start_weight_update: Callable[[], None]

    def attempt(self, method: str, arguments: dict[str, Any]) -> tuple[str, bool] | None:
        """Call a method. What it raises comes back: why, and whether a peer is blamed."""
        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                getattr(self, method)(**arguments)
        except Exception as error:  # noqa: BLE001 (told to the server, which raises)
            return f"{type(error).__name__}: {error}", isinstance(error, PeerError)
        return None

    def begin_weight_update(self) -> None:
        """vLLM's start of an update, after one that failed too.

        A worker that got its part of the failed one is still in it (v1/worker/gpu_worker.py:1534).
        """
        self._weight_update_active = False
        self.start_weight_update()

    def load_checkpoint(self, path: str) -> None:
        """All weights from a Hugging Face folder, by vLLM's own reload."""
        model = self.model_runner.get_model()
        make_reloadable(model)
        self.model_runner.reload_weights(weights_path=path)
        repack_output_heads(model)

    def kept_bytes(self) -> tuple[int, int]:
        """Of the weights, and of the KV cache."""
        return vllm_sleep.kept_bytes(self.model_runner)


def _route_local_experts() -> None:
    """The CPU experts ignore `expert_map`, which ends expert parallelism in a native crash.

    (model_executor/layers/fused_moe/experts/cpu_moe.py:249.) Map the ids to local ones and give the
    experts of other ranks no weight.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    upstream = CPUUnquantizedExperts.apply

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        names = ["output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"]
        names += ["global_num_experts", "expert_map"]
        kwargs |= dict(zip(names, args, strict=False))
        expert_map = kwargs.pop("expert_map")
        if expert_map is not None:
            ids = kwargs["topk_ids"]
            local = expert_map[ids.long()]
            kwargs["topk_ids"] = local.clamp(min=0).to(ids.dtype)
            kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(local < 0, 0.0)
        upstream(self, *args[len(names) :], expert_map=None, **kwargs)

    CPUUnquantizedExperts.apply = apply


def _name_shared_memory(server: ServerName) -> None:
    """Give the workers' shared memory a name that is this server's own.

    Upstream's is empty under `external_launcher` (v1/worker/cpu_worker.py:148), so that segments of
    two jobs collide, and anonymous otherwise, so that leftovers cannot be told from a neighbour's.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    upstream = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: Any) -> str:
        return f"mcore_rl_{server}_{upstream(communicator)}".replace("/", "_")

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


@functools.cache  # a process may unpickle its config more than once
def _die_with(server: ServerName, pid: int) -> None:
    """End this process, `pid`, when the server process is gone, however it went.

    vLLM's engine process does not notice a server killed by SIGKILL and would live on: for minutes
    while it starts, for ever once it runs.
    """

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(server.pid)], [], [])
        _kill_importing_workers()
        remove_shared_memory(server)
        _remove_mapped_memory()
        _remove_rendezvous()
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, name="server-watchdog", daemon=True).start()


def _kill_importing_workers() -> None:
    """End workers of this engine process that do not watch the server yet: for many seconds.

    They have no memory to tidy up. Those that watch have, and vLLM has given them a name.
    """
    for child in psutil.Process().children():  # multiprocessing lists one only when it has started
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("spawn_main" in word for word in child.cmdline()):
                child.kill()


def _enter_process(name: str) -> ServerName:
    server = ServerName(name)
    if os.getpid() != server.pid:  # else a copy inside the server itself
        os.setpgid(0, 0)  # Ctrl-C in a terminal is for the server alone
        _die_with(server, os.getpid())
        answer_signals()
        _correct(server)
    return server


@functools.cache  # what an engine has patched is patched in a worker that it forks
def _correct(server: ServerName) -> None:
    leave_garbage_at_exit()
    guard_gloo()
    meet_at_our_rendezvous()
    register()
    if current_platform.is_cpu():
        _name_shared_memory(server)


@functools.cache  # vLLM loads plugins in each of its processes, some of which are forks
def register() -> None:
    """What any vLLM process needs to be fed by a trainer: vLLM's plugin of this package."""
    module = "mcore_rl.rollout.vllm_transfer"
    WeightTransferEngineFactory.register_engine(BACKEND, module, "ShardTransferEngine")
    vllm_sleep.install()
    vllm_float8.register_loader()
    vllm_weights.register_loader()
    if current_platform.is_cpu():
        _route_local_experts()
