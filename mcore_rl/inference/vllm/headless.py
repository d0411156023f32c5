"""A further node of a vLLM server. Upstream lines are those of vLLM 0.32."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mcore_rl.inference.vllm.processes import StoppedProcesses

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from mcore_rl.inference.vllm.server import VLLMServer


class HeadlessWorkers:
    """A further node of a server: workers without an engine, or engines of data-parallel ranks.

    Args:
        server: The server, as its first node builds it.
    """

    def __init__(self, server: VLLMServer) -> None:
        self._server = server
        self._executor: MultiprocExecutor | CoreEngineProcManager | None = None
        self._stop_watch: StoppedProcesses | None = None

    async def start(self, *, reads_weights: bool = True) -> None:
        """Start the workers as `VLLMServer.start`; return when they have met the engine."""
        config, name = self._server.build_engine_config(headless=True, reads_weights=reads_weights)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        from mcore_rl.inference.vllm import worker as vllm_worker

        def launch() -> MultiprocExecutor | CoreEngineProcManager:
            with vllm_worker.prepare_forks(name):
                if config.parallel_config.data_parallel_size > 1:
                    return _launch_engines(config)
                return MultiprocExecutor(config)

        with ThreadPoolExecutor(1, "vllm-start") as thread:
            executor = await asyncio.get_running_loop().run_in_executor(thread, launch)
        # The engine would wait for a worker that has died: so the rank dies, and the driver knows.
        # By os._exit, as vLLM calls back in a thread, which sys.exit would end alone.
        if isinstance(executor, MultiprocExecutor):
            executor.register_failure_callback(lambda: os._exit(1))
            processes = [worker.proc for worker in executor.workers]
        else:
            _exit_with_engines(executor)
            processes = executor.processes
        self._stop_watch = StoppedProcesses([process.pid for process in processes])
        self._executor = executor

    def close(self) -> None:
        """End the workers; safe to call twice."""
        executor, self._executor = self._executor, None
        if self._stop_watch is not None:
            self._stop_watch.close()
        if executor is not None:
            executor.shutdown()


def _launch_engines(config: VllmConfig) -> CoreEngineProcManager:
    """Start the engines of a further node, which then meet the first node.

    As vLLM's `serve --headless` (entrypoints/cli/serve.py:236).
    """
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    parallel = config.parallel_config
    return CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(
            parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port
        ),
        executor_class=Executor.get_class(config),
        log_stats=False,
    )


def _exit_with_engines(manager: CoreEngineProcManager) -> None:
    """End this process when an engine has ended, unless `manager` was shut down before."""

    def watch() -> None:
        manager.monitor_engine_liveness()
        if manager.failed_proc_name is not None:
            os._exit(1)

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()
