"""vLLM's engine and worker processes: engine arguments by device type, set-up, watchdog.

The server process gets its engine arguments here. Engine and worker processes are set up through
`ServerName` when they are spawned, or through `prepare_forks` when they are forked; workers also
get `WorkerExtension` (vLLM's `worker_extension_cls`). What they patch of vLLM is in patches/.
Upstream lines are those of vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
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
from vllm import envs
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils import system_utils
from vllm.utils.cpu_resource_utils import parse_id_list

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.kv_cache import DEFAULT_MAX_SEQS
from mcore_rl.inference.vllm.adapters import register_manager
from mcore_rl.inference.vllm.drafts import join_models
from mcore_rl.inference.vllm.patches.caches import FITS_CACHE, fit_caches, patch_caches
from mcore_rl.inference.vllm.patches.processes import (
    bind_stores,
    end_calls_of_dead_engines,
    name_shared_memory,
    return_all_answers,
    set_up_coordinator,
)
from mcore_rl.inference.vllm.patches.sleep import (
    list_kv_caches,
    list_weights,
    patch_sleep,
    sum_mapped_bytes,
)
from mcore_rl.inference.vllm.processes import use_worker_rendezvous
from mcore_rl.inference.vllm.trace import TraceTaker
from mcore_rl.inference.vllm.weights import (
    list_traced_parameters,
    load_by_rules,
    make_reloadable,
    register_loaders,
    repack_output_heads,
)
from mcore_rl.models.base import read_config
from mcore_rl.observability.process import skip_gc_at_exit
from mcore_rl.observability.stacks import dump_stacks_on_signal
from mcore_rl.parallel.network import find_interface, use_interface_towards
from mcore_rl.parallel.store import guard_gloo

BACKEND = "mcore_rl"  # name of our engine among vLLM's weight transfer engines
START_METHOD = {"cpu": "fork", "cuda": "spawn"}  # of engine and worker processes
_BINDS = "VLLM_CPU_OMP_THREADS_BIND"  # cores of each worker on this node, as "0|1"


class ServerName(str):
    """Name of a server, `<pid>-<random>`: in the names of its processes' shared memory.

    It is vLLM's `additional_config`. Each process that vLLM spawns first unpickles the config, and
    is set up by that (`__reduce__`), before it can hang or allocate anything. All names have the
    same hash for vLLM's cache of compiled graphs (config/vllm.py:549), so servers share it.
    """

    @classmethod
    def new(cls) -> ServerName:
        """Make a name for a server in this process."""
        return cls(f"{os.getpid()}-{secrets.token_hex(4)}")

    @property
    def pid(self) -> int:
        return int(self.partition("-")[0])

    def compute_hash(self) -> str:
        """Return the part of vLLM's key of compiled graphs."""
        return "mcore_rl"

    def __reduce__(self) -> tuple[Any, ...]:
        return _set_up_process, (str(self),)


class _Fork:
    """While it lives, multiprocessing calls `set_up` in each process that it forks."""

    def __init__(self, server: ServerName) -> None:
        self._server = server
        register_after_fork(self, _Fork.set_up)

    def set_up(self) -> None:
        """Set up the forked process."""
        _set_up_process(str(self._server))
        _pin_to_cores()


@contextlib.contextmanager
def prepare_forks(server: ServerName) -> Iterator[None]:
    """Make vLLM fork its processes on CPUs, and set up each of them first.

    Forking saves the import of vLLM, the longest part of a start. A process with CUDA must not be
    forked: on GPUs processes are spawned. Call this in a thread that has run no parallel
    computation: libgomp would wait in the child for helper threads that a fork does not copy.
    """
    # vLLM spawns on the CPU (platforms/cpu.py:413), and in a Ray actor, so that its processes can
    # use Ray (utils/system_utils.py:130), which ours do not.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = START_METHOD[current_platform.device_type]
    system_utils.is_in_ray_actor = lambda: False
    return_all_answers()
    bind_stores()
    set_up_coordinator(server)
    end_calls_of_dead_engines()
    fork = _Fork(server)  # multiprocessing keeps no reference
    try:
        yield
    finally:
        del fork


def build_device_arguments(
    config: RolloutConfig, name: ServerName, max_model_tokens: int, eager: bool
) -> dict[str, Any]:
    """Return vLLM's engine arguments of this device type, and those of `WorkerExtension`.

    Also sets the environment that engine and worker processes inherit, for good: a server owns its
    process.

    Args:
        eager: Compile no graphs.
    """
    # Workers are on this machine and their rendezvous is a file
    # (v1/executor/multiproc_executor.py:143), but their gloo groups would listen on the address of
    # the host name (distributed/parallel_state.py:509).
    os.environ.setdefault("GLOO_SOCKET_IFNAME", find_interface("127.0.0.1"))
    # NCCL reads its variable once: the weights' group, which may span machines, uses the interface
    # of the workers' own groups.
    if host := os.environ.get("RENDEZVOUS_HOST"):
        use_interface_towards(host, int(os.environ["RENDEZVOUS_PORT"]))
    guard_gloo()  # the server's process may be the worker's; others call it in _apply_patches
    arguments: dict[str, Any] = {
        "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
        "enforce_eager": eager,
        "additional_config": name,
        # None: vLLM's defaults for `vllm serve` (engine/arg_utils.py:2894).
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    if not current_platform.is_cpu():
        os.environ.pop(FITS_CACHE, None)
        if config.kv_cache_bytes is None:
            os.environ[FITS_CACHE] = "1"
        # A server uses rollout.kv_cache_bytes and the model's size. vLLM only checks that this
        # share of the GPU is free (v1/worker/utils.py:716), which it is not on a shared GPU.
        # Experts by Triton, vLLM's default on Hopper. On Blackwell the default is FlashInfer's
        # TRTLLM (fused_moe/oracle/unquantized.py:73), which routes inside its kernel, hidden from a
        # trace, and reorders and pads weights that a trainer writes again each step (line 462).
        return arguments | {"gpu_memory_utilization": 0.01, "moe_backend": "triton"}
    # Scheduler and worker in one process: half the start-up time and 8 times the speed of two.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if config.tp == 1 else "1"
    # vLLM inspects a model's class in a new process, which must not initialise CUDA, and imports
    # vLLM again (model_executor/models/registry.py:1079): not needed on a CPU.
    registry._run_in_subprocess = lambda inspect: inspect()
    # Compiling a few small functions needs a C++ compiler, and takes longer than a small run gains.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if config.cores or config.num_workers > 1:
        cores = config.cores or _split_cores(config.workers_per_node)
        os.environ[_BINDS] = cores
    if config.cores and config.num_workers == 1:  # vLLM reads the bind for several workers only
        cores = ",".join(map(str, parse_id_list(config.cores)))
        os.environ["OMP_PLACES"] = f"{{{cores}}}"
    from mcore_rl.inference.vllm.patches import cpu

    cpu.use_compiled_ops()  # in this process, from which the others are forked
    if config.dp > 1 and config.tp > 1:
        cpu.gather_single_tokens()
    return arguments | {
        "enforce_eager": True,
        "kernel_config": cpu.PRIORITY,
        # On a CPU with AMX, MLA's default kernels are for bfloat16 and for sizes that 32 divides
        # (platforms/cpu.py:156). Other attention has a single backend there, and ignores this.
        "attention_backend": "CPU_MLA",
        # Full blocks that prompts share are computed once. vLLM's default of 128 tokens is longer
        # than many prompts; latent attention always has 16.
        "block_size": 32,
        # A seeded request with a chunked prompt rewinds its generator, which a CPU generator
        # refuses: the engine dies (v1/worker/gpu_model_runner.py:3502).
        "enable_chunked_prefill": False,
        "max_num_seqs": config.max_num_seqs or DEFAULT_MAX_SEQS["cpu"],
        "max_num_batched_tokens": config.max_num_batched_tokens or max(8192, max_model_tokens),
    }


def build_cache_arguments(model_path: str) -> dict[str, Any]:
    """Return vLLM's engine arguments for the cache of prompts.

    It is off for layers of linear attention on CPUs: vLLM caches their states where chunks
    of a prompt end (model_executor/models/config.py:694), and prompts have no chunks there.
    """
    is_hybrid = bool(read_config(model_path).get("linear_num_key_heads"))
    return {"enable_prefix_caching": not (is_hybrid and current_platform.is_cpu())}


def build_sleep_arguments(can_sleep: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for sleep. On CPUs every worker can."""
    return {"enable_sleep_mode": can_sleep and not current_platform.is_cpu()}


def build_expert_arguments(records_experts: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for recorded experts; patch the runner on CPUs.

    Raises:
        ConfigError: VLLM_USE_V2_MODEL_RUNNER selects the runner of GPUs that records none.
    """
    if records_experts and current_platform.is_cpu():
        from mcore_rl.inference.vllm.patches import cpu

        cpu.record_experts()
    elif records_experts and envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ConfigError(
            "actor.moe.router_replay='rollout': vLLM's model runner V1 records no experts, and "
            "VLLM_USE_V2_MODEL_RUNNER=0 asks for it; allowed: 1, or unset"
        )
    return {"enable_return_routed_experts": records_experts}


def check_recorded_experts(config: VllmConfig) -> None:
    """Check the one of vLLM's rules (config/vllm.py:1135) that our settings can break on a CPU.

    Raises:
        ConfigError: there is no prefix cache.
    """
    if config.aux_output_config.enabled and not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "the experts of a token cannot be recorded: vLLM keeps them by the blocks of its "
            "prefix cache, and has none for latent attention on a CPU (platforms/cpu.py:526)"
        )


def check_heads(model: ModelConfig) -> None:
    """Check that the CPU has kernels for the model's attention heads.

    vLLM would notice at the first request, and the engine would die.

    Raises:
        ConfigError: the kernels were not compiled for their size.
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


def _split_cores(num_workers: int) -> str:
    """Split this process's cores among the workers. vLLM would need a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[worker::num_workers] or cores for worker in range(num_workers)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _pin_to_cores() -> None:
    """Pin this process to the cores in OMP_PLACES, with a thread on each.

    vLLM sets OMP_PLACES as it starts a worker (utils/ompmultiprocessing.py:81). A spawned worker
    reads it when it loads OpenMP; a forked one has loaded OpenMP already. An engine of a
    data-parallel rank that is its own worker gets nothing from vLLM.
    """
    places, binds = os.environ.get("OMP_PLACES", ""), os.environ.get(_BINDS, "").split("|")
    rank = re.fullmatch(r"EngineCore_DP(\d+)", multiprocessing.current_process().name)
    cores: list[int] = []
    if places.startswith("{"):
        cores = [int(core) for core in places.strip("{}").split(",")]
    elif rank and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        cores = parse_id_list(binds[int(rank[1]) % len(binds)])
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def remove_shared_memory(server: ServerName) -> None:
    """Unlink what the workers of a dead server left in /dev/shm (their C++ never unlinks it)."""
    for segment in Path("/dev/shm").glob(f"*mcore_rl_{server}*"):
        segment.unlink(missing_ok=True)


def _remove_mapped_memory() -> None:
    """Unlink this process's message queues and semaphores.

    Python's resource tracker does so, unless it was killed, too: Ray kills an actor's children.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    # By inode: a semaphore is mapped under a temporary name before it gets its own.
    mapped = {int(line.split(None, 5)[4]) for line in maps if " /dev/shm/" in line}
    for pattern in ("psm_*", "sem.mp-*"):
        for file in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_ino in mapped:
                    file.unlink()


def _remove_rendezvous() -> None:
    """Unlink the file in which this worker's process group met (utils/network_utils.py:154)."""
    name = os.environ.get("VLLM_DIST_IDENT", "")  # set on CPU only (v1/worker/cpu_worker.py:148)
    if name.startswith("vllm_dist_"):
        Path(tempfile.gettempdir(), name).unlink(missing_ok=True)


class WorkerExtension(TraceTaker):
    """Methods of a worker for `collective_rpc`, besides vLLM's own."""

    vllm_config: Any
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]

    def attempt(self, method: str, arguments: dict[str, Any]) -> tuple[str, bool] | None:
        """Call a method. Return its error, and whether that blames a peer; None if it succeeded."""
        # Not raised: of an exception vLLM sends the text alone (v1/executor/multiproc_executor.py).
        try:
            self.weight_transfer_engine.model = join_models(self.model_runner)
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                getattr(self, method)(**arguments)
        except Exception as error:  # noqa: BLE001 (the server raises it)
            return f"{type(error).__name__}: {error}", isinstance(error, PeerError)
        return None

    def begin_weight_update(self) -> None:
        """Start vLLM's phase of an update, also after one that failed.

        A worker that got its part of the failed one is still in it (v1/worker/gpu_worker.py:1534).
        """
        self._weight_update_active = False
        self.start_weight_update()

    def load_checkpoint(self, path: str) -> None:
        """Load all weights from a Hugging Face folder, by vLLM's own reload.

        That counts what goes through the loaders of parameters. vLLM's gpt-oss copies into its
        parameters itself (model_executor/models/gpt_oss.py:1219), which a reload would lose. A
        draft model is not reloaded.
        """
        model, joined = self.model_runner.get_model(), join_models(self.model_runner)
        drafts = joined is not model
        if drafts or type(model).__name__ == "GptOssForCausalLM":
            load_by_rules(joined, self.vllm_config, path, drafts=drafts)
            return
        make_reloadable(model)
        self.model_runner.reload_weights(weights_path=path)
        repack_output_heads(model)

    def store_adapters(self, version: int, content: bytes, alpha: float) -> None:
        """Take the adapters of a version (adapters.py)."""
        self.model_runner.lora_manager.store(version, content, alpha)

    def list_parameters(self) -> tuple[list[list[Any]], str]:
        """Return what this worker's parameters are made of, if its loader was traced.

        The second value is why the trace failed, or "".
        """
        return list_traced_parameters(self.model_runner.get_model())

    def measure_memory(self) -> tuple[int, int]:
        """Return the bytes of the weights and of the KV cache; 0 when asleep."""
        runner = self.model_runner
        if not current_platform.is_cpu():
            return sum_mapped_bytes("weights"), sum_mapped_bytes("kv_cache")
        weights = sum(storage.nbytes() for storage in list_weights(join_models(runner)))
        return weights, sum(storage.nbytes() for storage in list_kv_caches(runner))


@functools.cache  # a process may unpickle its config more than once
def _start_watchdog(server: ServerName, pid: int) -> None:
    """End this process, `pid`, when the server process has ended, for whatever reason.

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
    """Kill this engine process's workers that are still importing, and have no watchdog yet.

    They have no shared memory. vLLM has named the others, so their command line differs.
    """
    for child in psutil.Process().children():  # multiprocessing lists only those that have started
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("spawn_main" in word for word in child.cmdline()):
                child.kill()


def _set_up_process(name: str) -> ServerName:
    """Set up an engine or worker process of a server; return the server's name."""
    server = ServerName(name)
    if os.getpid() != server.pid:  # the server's process unpickles copies, too
        os.setpgid(0, 0)  # Ctrl-C in a terminal is for the server alone
        _start_watchdog(server, os.getpid())
        dump_stacks_on_signal()
        _apply_patches(server)
    return server


@functools.cache  # a worker that an engine forks has its patches
def _apply_patches(server: ServerName) -> None:
    """Patch vLLM, gloo and the garbage collector in this engine or worker process."""
    skip_gc_at_exit()
    guard_gloo()
    use_worker_rendezvous()
    bind_stores()
    register()
    if current_platform.is_cpu():
        name_shared_memory(server)


@functools.cache  # vLLM loads plugins in each of its processes, some of which are forks
def register() -> None:
    """Prepare a vLLM process for updates by a trainer: this package's plugin of vLLM."""
    module = "mcore_rl.inference.vllm.weights"
    WeightTransferEngineFactory.register_engine(BACKEND, module, "ShardTransferEngine")
    patch_sleep()
    patch_caches()
    if os.environ.get(FITS_CACHE):
        fit_caches()
    register_loaders()
    register_manager()
    if current_platform.is_cpu():
        from mcore_rl.inference.vllm.patches import cpu

        cpu.map_expert_ids()
        cpu.route_without_groups()
        cpu.exchange_tokens()
        cpu.hide_llvmlite()
