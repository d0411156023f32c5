"""A server of a frozen model as an actor: it answers by HTTP, and nobody sends it weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.rollout.loop_thread import LoopThread

if TYPE_CHECKING:
    from mcore_rl.agents.api_server.http_server import HttpServer


@dataclass(frozen=True, slots=True)
class ModelServerSpec:
    model_path: str
    dtype: str
    max_context: int  # tokens of a prompt and the answer
    servers: RolloutConfig
    seed: int
    timeout_s: float  # of everything that the worker asks of its server
    key: str = field(repr=False)  # that requests have to have


class ModelServer:
    """Runs one server and its event loop."""

    def __init__(self, spec: ModelServerSpec) -> None:
        self._spec = spec
        self._server = VLLMServer(
            spec.model_path,
            spec.dtype,
            spec.max_context,
            spec.servers,
            spec.seed,
            timeout_s=spec.timeout_s,
        )
        self._http: HttpServer | None = None
        self._events = LoopThread(spec.timeout_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def prepare(self) -> None:
        """Import what `start` needs: the slowest part of it, and without device memory."""
        self._server.prepare()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_start=True)
    def start(self) -> str:
        """Returns the URL at which it serves: on this node's address, as Ray has it."""
        self._events.wait(self._start(ray.util.get_node_ip_address()))
        assert self._http is not None
        return self._http.url

    async def _start(self, host: str) -> None:
        from mcore_rl.agents.api_server.app import build_generate_app
        from mcore_rl.agents.api_server.http_server import HttpServer

        await self._server.start()
        print(f"vLLM's model runner: {self._server.model_runner}")
        app = build_generate_app(self._server, self._spec.key, self._spec.max_context)
        self._http = HttpServer(app, host)
        await self._http.start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shut_down(self) -> None:
        if self._http is not None:
            self._events.wait(self._http.close())
        self._events.wait(self._server.close())
